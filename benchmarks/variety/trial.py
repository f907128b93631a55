"""One model in one format by one method: packed by the command, loaded as by the server, held against eager.

Each trial runs in a child that is forked from a process that has torch, so that a crash is a result.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchere.archiver import open_archive
from torchere.archiver.models.measure.cost import processor_ms
from torchere.archiver.signature import read_signature
from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.metrics import MetricsCache
from torchere.handlers.tensor_handler import TensorHandler
from torchere.serving.commands.cli import main as torchere
from torchere.serving.config.model_settings import config_of
from variety.catalogue import Entry, Inputs

NONE = "fp32"
FORMATS = ("torchscript", "export", "aoti", "keep")
METHODS = (NONE, "int8-dynamic", "int8-static", "bf16", "int8-weight", "int4-weight")
PACKED, REFUSED, CRASHED, LATE, WRONG = "packed", "refused", "crashed", "late", "wrong"
# Largest difference, relative to the largest value of the output, beyond which an answer is wrong.
LIMITS = {NONE: 1e-4, "bf16": 0.1}
INT8_LIMIT = 0.6  # of one value; the packer has accepted the drift of all
_BUDGET_S = 1.0  # of timing


@dataclass(frozen=True, slots=True)
class Cell:
    """What one trial came to."""

    status: str
    line: str = ""  # of the refusal, or what is wrong
    difference: float | None = None  # largest, over the largest value of its output
    ratio: float | None = None  # processor time of eager over that of the packed model, for one row
    seconds: float = 0.0


def methods_of(entry: Entry, target: str) -> tuple[str, ...]:
    """Return the methods to try: none but fp32 where the model is kept."""
    if target == "keep":
        return (NONE,)
    return (NONE, "int8-trained") if entry.key == "qat" else METHODS


def tried(entry: Entry, target: str, method: str, files: Path, limit_s: float) -> Cell:
    """Pack and measure in a child process, which is killed after `limit_s`."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchere-formats-") as folder:
        done = in_child(
            lambda told: told(asdict(_tried(entry, target, method, files, Path(folder)))),
            Path(folder) / "log",
            limit_s,
        )
        seconds = round(time.monotonic() - started_s, 1)
        if isinstance(done, dict):
            return Cell(**{**done, "seconds": seconds})
        said = (Path(folder) / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    return Cell(
        LATE if done is None else CRASHED, f"{done or f'{limit_s:g} s'} after: {said[-1:]}", seconds=seconds
    )


def in_child(work: Callable[[Callable[[Any], None]], None], log: Path, limit_s: float) -> Any:
    """Run `work` in a forked child with its output in `log`.

    Returns what it tells; the name of the signal or the exit status if it ends without; None if it is late.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_child(work, log, writes)
    os.close(writes)
    end = time.monotonic() + limit_s
    status = None
    while status is None and time.monotonic() < end:
        found, code = os.waitpid(pid, os.WNOHANG)
        status = code if found else None
        if status is None:
            time.sleep(0.05)
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(reads, "rb") as pipe:
        told = pipe.read() if status is not None else b""
    if told:
        return json.loads(told)
    if status is None:
        return None
    return signal.Signals(-code).name if (code := os.waitstatus_to_exitcode(status)) < 0 else f"exit {code}"


def _be_child(work: Callable[[Callable[[Any], None]], None], log: Path, writes: int) -> None:
    """Run the work and end the process."""
    code = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = open(file, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
        faulthandler.enable(file)
        torch.set_num_threads(1)
        work(lambda told: _write_all(writes, json.dumps(told).encode()))
        code = 0
    except BaseException:  # the parent sees the log
        traceback.print_exc()
    finally:
        os._exit(code)


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _tried(entry: Entry, target: str, method: str, files: Path, folder: Path) -> Cell:
    flags = json.loads((files / "flags.json").read_text())
    if target == "keep":
        flags = _with_model_file(entry, flags, folder)
    command = ["archive", "--model-name", "net", "--export-path", str(folder), "--format", target, *flags]
    for one in entry.dynamic:
        command += ["--dynamic", one]
    if entry.batches and target in ("export", "aoti"):
        command += ["--dynamic-batch", entry.batches]
    if method != NONE:
        command += ["--quantize", method, "--samples", str(files / "samples")]
    log = folder / "command"
    with log.open("w", encoding="utf-8") as said, contextlib.redirect_stderr(said):
        status = torchere(command)
    lines = log.read_text(encoding="utf-8").splitlines()
    print("\n".join(lines))
    if status:
        line = next((one for one in reversed(lines) if one.startswith("torchere archive: ")), "no line")
        return Cell(REFUSED, line.removeprefix("torchere archive: "))
    return _held_against_eager(entry, folder / "net.mar", method)


def _with_model_file(entry: Entry, flags: list[str], folder: Path) -> list[str]:
    """Name the class in a file of its own, as a model that is kept needs it."""
    if "--factory" not in flags or entry.int8:
        return flags
    module, _, name = entry.factory.partition(":")
    (folder / "model.py").write_text(f"import {module}\n\n\nclass Net({module}.{name}):\n    pass\n")
    at = flags.index("--factory")
    return [*flags[:at], "--model-file", f"{folder}/model.py", *flags[at + 2 :]]


def _held_against_eager(entry: Entry, archive: Path, method: str) -> Cell:
    eager: Any = entry.make().eval()
    handler = _served(archive, archive.parent / "unpacked")
    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        first = entry.draw(1, 0, generator)
        ratio = _ratio(eager, handler, first)
        off, where = 0.0, ""
        for rows, other in _sizes(entry, handler):
            inputs = entry.draw(rows, other, generator)
            found = _flat(handler.model(*_ordered(handler, inputs)))
            one = _difference(_flat(eager(**inputs)), found)
            off, where = max((off, where), (one, f"{rows} rows, sizes {other}"))
        if handler.signature.batched:
            off, where = max((off, where), (_requests_off(entry, eager, handler, generator), "requests"))
    if not off <= LIMITS.get(method, INT8_LIMIT):
        return Cell(WRONG, f"off by {off:.3g} with {where}", off, ratio)
    return Cell(PACKED, "", off, ratio)


def _served(archive: Path, folder: Path) -> TensorHandler:
    opened = open_archive(archive)
    root = opened.extract(folder)
    handler = TensorHandler()
    handler.initialize(
        Context(
            model_name="net",
            model_dir=str(root),
            manifest=json.loads(opened.manifest.dump()),
            gpu=None,
            batch_size=1,
            mms_version="0.12.0",
            metrics=MetricsCache("net"),
            model_yaml_config=config_of(opened).raw,
        )
    )
    if read_signature(str(root)) is None:
        raise ValueError("no signature")
    return handler


def _ratio(eager: Any, handler: TensorHandler, inputs: Inputs) -> float | None:
    given = _ordered(handler, inputs)
    spec = handler.signature.inputs[0].shape
    if spec and spec[0] not in (-1, len(given[0])):
        given = tuple(torch.cat([one] * spec[0]) for one in given)
    named = dict(zip((one.name for one in handler.signature.inputs), given, strict=True))
    before, after = processor_ms(
        [lambda *_: eager(**named), handler.model],
        given,
        _BUDGET_S,
    )
    return before / after


def _sizes(entry: Entry, handler: TensorHandler) -> Iterator[tuple[int, int]]:
    """Yield numbers of rows and other sizes that the signature takes."""
    specs = handler.signature.inputs
    free = {spec.name for spec in specs if spec.shape and spec.shape[0] == -1}
    rows = (1, 3, 7) if free else (specs[0].shape[0] if entry.key != "graph" else 2,)
    for count in rows:
        for other in (0, 1, 2) if entry.dynamic else (0,):
            yield count, other


def _requests_off(entry: Entry, eager: Any, handler: TensorHandler, generator: torch.Generator) -> float:
    """Return the largest difference of requests of one row that the handler answers as one batch."""
    sent = [entry.draw(1, 0, generator) for _ in range(3)]
    context = handler.context
    assert context is not None
    context.begin_batch([RequestProcessor({}, str(at)) for at in range(len(sent))], lambda _at, _chunk: None)
    bodies = [{name: tensor[0].tolist() for name, tensor in inputs.items()} for inputs in sent]
    answers = handler.handle([{"body": body} for body in bodies], context)
    off = 0.0
    for inputs, answer in zip(sent, answers, strict=True):
        wanted = _flat(eager(**inputs))
        named = answer if isinstance(answer, dict) else {"output": answer}
        found = {name: torch.tensor(value)[None] for name, value in named.items()}
        off = max(off, _difference(wanted, found))
    return off


def _ordered(handler: TensorHandler, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return tuple(inputs[spec.name] for spec in handler.signature.inputs)


def _flat(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a result by name; other values (a cache of keys and values) are left out."""
    if isinstance(value, torch.Tensor):
        return {path or "output": value}
    found: dict[str, torch.Tensor] = {}
    if isinstance(value, dict):
        for name, item in value.items():
            found |= _flat(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (tuple, list)):
        for at, item in enumerate(value):
            found |= _flat(item, f"{path}.output_{at}" if path else f"output_{at}")
    return found


def _difference(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest value of the same output."""
    if not found:
        return float("inf")
    if not found.keys() <= wanted.keys():
        wanted = dict(zip(found, wanted.values(), strict=False))
    off = 0.0
    for name, tensor in found.items():
        expected = wanted[name].double()
        if expected.shape != tensor.shape:
            return float("inf")
        scale = max(float(expected.abs().max()), 1e-12)
        off = max(off, float((tensor.double() - expected).abs().max()) / scale)
    return off
