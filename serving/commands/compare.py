"""`torchere compare A.mar B.mar --data PATH`: compares two archives on the same inputs; can draw a chart.

The models are loaded as by the server, but without a server. Pictures are prepared by the `preprocess` of
the first archive's handler.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from torchere.archiver.arguments import described
from torchere.archiver.atomic import staged
from torchere.archiver.cli import tidy_when_ended
from torchere.archiver.commands import refuse_code, signals_held
from torchere.archiver.errors import ArchiveError, ModelRefused, naming_files_of, plainly
from torchere.archiver.model_flags import allowed_drift
from torchere.archiver.models.steps import errors_only, refusing
from torchere.archiver.quantization import INT8_DRIFT
from torchere.archiver.reader import Archive, open_archive
from torchere.archiver.request import BUILT_IN_HANDLERS, DEFAULT_HANDLER, Prepare
from torchere.archiver.signature import Signature, read_signature
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.serving.commands.inputs import prepare_for
from torchere.serving.errors import InvalidArchive
from torchere.serving.process.allocator import keep_freed_memory

if TYPE_CHECKING:
    import torch

    from torchere.archiver.models.verify.report import Report


_NOT_REPLACED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY}  # by the folder, or a mounted file
_CORRECT = "unpack the archive, correct that, and pack the files again by torchere archive"
_LOADED = (
    "torchere compare loads what a server loads without a handler of the archive's own: TorchScript, .pt2, "
    "ONNX, or a class with its state dict; pack the model as one of these by torchere archive"
)


@dataclass(frozen=True)
class Contender:
    """One of the two archives, with its loaded model."""

    name: str
    run: Callable[..., Any]
    file: Path | None  # the weights file in the unpacked archive
    load: TorchScriptOptions
    prepare: Prepare  # converts a request's body as the archive's handler does
    signature: Signature | None  # of signature.json; None without this file

    @property
    def batched(self) -> bool:
        """Whether inputs and outputs have a batch dimension."""
        return self.signature is None or self.signature.batched

    @property
    def takes(self) -> str:
        """The advice in a refusal of inputs: which ones the model takes."""
        if self.signature is None:
            return f"give inputs of the shapes and datatypes that {self.name} takes, a batch each"
        inputs = ", ".join(f"{one.name} {one.datatype}{list(one.shape)}" for one in self.signature.inputs)
        return f"give inputs as {self.name} takes them: {inputs}"


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere compare` to `parser`."""
    text = "Run the models of two archives on the same inputs; compare outputs, times, sizes and memory."
    described(parser, text, "torchere compare fp32.mar int8.mar --data photographs --picture int8.svg")
    add = parser.add_argument
    add("original", type=Path, metavar="A.mar", help="the reference archive")
    add(
        "packed",
        type=Path,
        metavar="B.mar",
        help="the archive to compare with A, for example quantised, compiled or retrained",
    )
    add(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="folder of inputs, one per file, or a single file: .json, .pt, .npy, .npz, or an image, which "
        "A's handler decodes, crops and normalises as in a request",
    )
    add(
        "--max-drift",
        type=allowed_drift,
        default=INT8_DRIFT,
        metavar="X",
        help="exit with code 2 if the drift, the RMS difference of the outputs relative to A's, exceeds "
        f"X (default: {INT8_DRIFT}, as for int8 in `torchere archive`)",
    )
    add("--allow-code", action="store_true", help="run A's own handler, to prepare images")
    add("--picture", type=Path, metavar="FILE", help="also write the report as an SVG chart")
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Print the report; return 0 if B's outputs are close enough to A's, 2 otherwise or on an error."""
    keep_freed_memory(os.environ)  # so that measurements are as in the server
    try:
        # Warnings of handlers (such as on class names) are irrelevant to a comparison.
        with tidy_when_ended(), errors_only("torchere.handlers"):
            report = _compared(options)
    except (ArchiveError, ModelRefused, OSError) as error:
        print(f"torchere compare: {plainly(error)}", file=sys.stderr)
        return 2
    print(report.to_json() if options.json else report.table())
    if not report.accepted:
        from torchere.archiver.models.verify.compare import reason_of  # noqa: PLC0415 - imports torch

        print(f"torchere compare: {reason_of(report)}", file=sys.stderr)
    if options.picture:
        try:
            _write(options.picture, picture(report))
        except OSError as error:
            print(f"torchere compare: {plainly(error)}", file=sys.stderr)
            return 2
    return 0 if report.accepted else 2


def _write(target: Path, text: str) -> None:
    """Write the text whole or not at all; in place if the target can't be replaced.

    If the target is standard output (`/dev/stdout`), the text follows the report.
    """
    if target.exists() and os.path.samestat(target.stat(), os.fstat(1)):
        print(text, end="")
        return
    if not target.exists() or target.is_file():
        try:
            with staged(target.resolve()) as work:  # a link is kept
                work.write_text(text, encoding="utf-8")
            return
        except OSError as error:
            error.filename = str(target)  # instead of the hidden file, or of no file if the disk is full
            if error.errno not in _NOT_REPLACED:
                raise
    target.write_text(text, encoding="utf-8")


def names_of(one: Path, other: Path) -> tuple[str, str]:
    """Return the names of two archives, with as many folders as tell them apart."""
    first, second = one.absolute().parts, other.absolute().parts
    for count in range(1, max(len(first), len(second)) + 1):
        names = "/".join(first[-count:]), "/".join(second[-count:])
        if names[0] != names[1]:
            return names
    return f"{one.name} (A)", f"{other.name} (B)"  # one archive, compared with itself


def _compared(options: argparse.Namespace) -> Report:
    with signals_held():
        from torchere.archiver.models.measure.cost import batch_sizes  # noqa: PLC0415 - imports torch
        from torchere.archiver.models.verify.compare import verify, with_memory  # noqa: PLC0415

    allowed = options.allow_code
    with _contender(options.original, allow_code=allowed) as one, _contender(options.packed) as other:
        samples = _samples(options.data, one, other)
        files = one.file, other.file
        with refusing(f"running {one.name} and {other.name} on {options.data}", one.takes):
            report = verify(
                one.run,
                other.run,
                samples,
                max_drift=options.max_drift,
                batched=one.batched and other.batched,
                sizes=batch_sizes(one.signature, other.signature),
                names=names_of(options.original, options.packed),
                files=files,
                load=other.load,
            )
            return with_memory(report, files, (one.load, other.load), samples[0])


@contextmanager
def _contender(path: Path, *, allow_code: bool = False) -> Iterator[Contender]:
    """Unpack an archive to a temporary folder and load its model on the CPU.

    With `allow_code`, a handler of the archive's own is run to prepare pictures; else these are refused.
    """
    from torchere.serving.config.model_settings import config_of  # noqa: PLC0415 - not needed for --help

    archive = open_archive(path)
    with tempfile.TemporaryDirectory(prefix="torchere-compare-") as folder:
        root = archive.extract(Path(folder, "model"))
        manifest = archive.manifest
        config_file = root / manifest.config_file if manifest.config_file else None
        with _correctable(f"{path}: {manifest.config_file}"):
            config = config_of(archive).raw
        with _correctable(str(path)):
            signature = read_signature(root)
            load = _options(archive, root, config_file, config)
        handler = manifest.handler or DEFAULT_HANDLER
        prepare: Prepare = refuse_code
        if allow_code or handler in BUILT_IN_HANDLERS:
            # Without a folder, a built-in name is not looked up among the archive's files.
            prepare = prepare_for(handler, root if allow_code else None, config_file)
        yield Contender(
            name=path.name,
            run=_loaded(archive, root, config),
            file=root / manifest.serialized_file if manifest.serialized_file else None,
            load=load,
            prepare=prepare,
            signature=signature,
        )


@contextmanager
def _correctable(place: str) -> Iterator[None]:
    """Raise ModelRefused, with the place and the remedy, for an invalid file of an archive."""
    try:
        yield
    except (InvalidArchive, ValueError) as error:  # a SignatureError is a ValueError
        raise ModelRefused(f"{place}: {error}; {_CORRECT}") from error


def _samples(data: Path, contender: Contender, other: Contender) -> list[tuple[torch.Tensor, ...]]:
    """Read a file, or every file of a folder in the order of their names, as arguments of both models."""
    from torchere.archiver.models.inputs.examples import (  # noqa: PLC0415 - imports torch
        check_against,
        files_of,
        read_example,
    )

    if not data.exists():
        raise ModelRefused(
            f"--data {data}: no such file or folder; expected a folder of inputs, or one input"
        )
    takes = contender.signature.inputs if contender.signature else ()
    doubles = any(spec.datatype == "FP64" for spec in takes)
    samples = []
    for file in files_of(data):
        example = read_example(file, doubles=doubles, prepare=contender.prepare)
        wanted = [spec.name for spec in takes]
        samples.append(example.ordered(wanted) if wanted else example.tensors)
        for one in (contender, other):
            if one.signature is None:
                continue
            try:
                check_against(samples[-1], one.signature)
            except ModelRefused as error:
                raise ModelRefused(f"{file}, for {one.name}: {error}") from error
    return samples


def _loaded(archive: Archive, root: Path, config: dict[str, Any]) -> Callable[..., Any]:
    from torchere.archiver.models.inputs.run import run_of_session  # noqa: PLC0415
    from torchere.handlers.base import BaseHandler  # noqa: PLC0415 - imports torch
    from torchere.handlers.context import Context  # noqa: PLC0415
    from torchere.handlers.ts_compat.alias import __version__  # noqa: PLC0415

    handler = BaseHandler()
    # A model file may raise any exception.
    with naming_files_of(archive.path, root), refusing(f"loading the model of {archive.path}", _LOADED):
        handler.initialize(
            Context(
                model_name=archive.manifest.model_name or root.name,
                model_dir=str(root),
                manifest=json.loads(archive.manifest.dump()),
                gpu=None,
                batch_size=1,
                mms_version=__version__,
                model_yaml_config=config,
            )
        )
    model: Any = handler.model
    return model if callable(model) else run_of_session(model)  # a session of onnxruntime


def _options(archive: Archive, root: Path, file: Path | None, config: dict[str, Any]) -> TorchScriptOptions:
    from torchere.archiver.models.convert.files import check_section  # noqa: PLC0415 - imports torch

    with naming_files_of(archive.path, root, _CORRECT):
        check_section(file)
    return TorchScriptOptions.read(config)


_COLOURS = ("#1f77b4", "#ff7f0e")
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 640, 110, 16, 14, 64  # pixels
_FULL = _WIDTH - _LEFT - 110  # width of the longer bar in a pair
_SMALL = 'font-size="12"'


@dataclass(frozen=True, slots=True)
class _Pair:
    """The values of one resource or latency for both models; lower is better."""

    label: str
    values: tuple[float, float]
    shown: tuple[str, str]


def picture(report: Report) -> str:
    """Return the SVG text: pairs of bars for file size, memory and latencies, and output similarity."""
    from torchere.archiver.models.verify.report import likeness  # noqa: PLC0415 - imports torch

    pairs = _pairs(report)
    height = _TOP + len(pairs) * (2 * _BAR + _GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(12, 22, "Time of each model (shorter is better)", 'font-size="15"'),
        *_legend(report),
    ]
    for index, pair in enumerate(pairs):
        parts += _bars(pair, _TOP + index * (2 * _BAR + _GAP))
    said = (f"drift {report.difference.drift:.3g}", likeness(report.difference))
    parts.append(_text(12, height - 14, ", ".join(filter(None, said))))
    return "\n".join([*parts, "</svg>", ""])


def _pairs(report: Report) -> list[_Pair]:
    one, other = report.original, report.packed
    sizes = (("file", one.size_bytes, other.size_bytes), ("memory", one.memory_bytes, other.memory_bytes))
    pairs = [
        _Pair(label, (first, second), (f"{first / 1e6:.1f} MB", f"{second / 1e6:.1f} MB"))
        for label, first, second in sizes
        if first is not None and second is not None
    ]
    for batch in sorted(one.latency_ms.keys() & other.latency_ms.keys()):
        first_ms, second_ms = one.latency_ms[batch], other.latency_ms[batch]
        shown = (f"{first_ms:.3g} ms", f"{second_ms:.3g} ms")
        pairs.append(_Pair(f"batch of {batch}", (first_ms, second_ms), shown))
    return pairs


def _bars(pair: _Pair, top: int) -> list[str]:
    longest = max(*pair.values, 1e-12)
    parts = [_text(_LEFT - 10, top + _BAR + 5, pair.label, f'{_SMALL} text-anchor="end"')]
    for index, (value, shown) in enumerate(zip(pair.values, pair.shown, strict=True)):
        y, length = top + index * _BAR, max(1.0, _FULL * value / longest)
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR - 2}" fill="{_COLOURS[index]}"/>'
        )
        parts.append(_text(_LEFT + length + 6, y + _BAR - 4, shown))
    return parts


def _legend(report: Report) -> list[str]:
    parts, x = [], 12.0
    for colour, side in zip(_COLOURS, (report.original, report.packed), strict=True):
        parts.append(f'<rect x="{x:.0f}" y="36" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, 46, side.name))
        x += 40 + 7.2 * len(side.name)
    return parts


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {more or _SMALL}>{escape(text)}</text>'
