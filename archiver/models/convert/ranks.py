"""`--parallel`: tries a model split over processes (ranks), and writes the split into its configuration.

The trial compares the outputs of the ranks with those of one process. The ranks are forked and communicate
with gloo over loopback. A model that ends or blocks a rank ends the trial (`probe/isolation.py`), but not the
packer.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.files import config_text, takes_sections, with_section
from torchere.archiver.models.inputs.run import Named, run_on, shapes
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.load.source import EAGER, HUGGING_FACE, Source
from torchere.archiver.models.measure.difference import at_least_rounding, distances
from torchere.archiver.models.probe.derive import batch_refusal
from torchere.archiver.models.probe.isolation import ModelEndedProcess, end_with_parent, forked, isolated
from torchere.archiver.models.probe.precision import largest_magnitude
from torchere.archiver.models.probe.row_independence import Trial
from torchere.archiver.models.spread import spread
from torchere.archiver.models.spread.huggingface import spread_folder
from torchere.archiver.models.spread.weights import held_bytes
from torchere.archiver.models.steps import Say, step
from torchere.archiver.request import KEEP, BuildOptions
from torchere.archiver.split import SECTION, Split

# The section `parallel` with its lines. Another program may have a section of this name, so only a section
# with `tensor` or `pipeline` (`_IS_OURS`) is taken to spread a model over ranks.
_SECTION = re.compile(rf"""^["']?{SECTION}["']?:(.*(?:\n[ \t]+.*)*)""", re.MULTILINE)
_IS_OURS = re.compile(r"""[{\s,"'](?:tensor|pipeline)["']?\s*:""")
MOST_DIFFERENCE = 1e-4  # of the largest value, or of 1 if that is smaller
_OTHER_PLAN = "name other layers, or take pipeline instead of tensor, or the other way round"


def _refuse_ranks(config: Path | None) -> None:
    """Raise ModelRefused if `config` spreads the model over ranks, because such a model has to stay a class.

    The weights may be in another place, and the class alone would be converted with its initial weights.
    """
    section = _SECTION.search(config_text(config))
    if section is not None and _IS_OURS.search(section[1]):
        raise ModelRefused(
            f"{config} has the section {SECTION}, which spreads a class over ranks, and a converted model is "
            "none; take the section out and give the model with its weights"
        )


def with_ranks(
    source: Source, example: Tensors | None, options: BuildOptions, work: Path, say: Say
) -> BuildOptions:
    """Try the model over the ranks of `options.parallel`; return options whose config file asks for them.

    Raises:
        ModelRefused: the ranks can't run the model or give other outputs, or no section can be appended.
    """
    module, path, split = source.module, source.path, options.parallel
    if options.model_format != KEEP:
        _refuse_ranks(options.config_file)
    if split is None:
        return options
    if module is None or source.kind not in (EAGER, HUGGING_FACE):
        raise ModelRefused(
            f"{path}: {source.kind} can't be spread over ranks; expected a class (--model-file) or a Hugging "
            "Face folder"
        )
    if example is None:
        raise ModelRefused("--parallel is tried before the model is packed: give --example with inputs")
    if split.weights:
        if options.serialized_file is not None:
            raise ModelRefused(
                f"{path} has weights, and --parallel says that they are at {split.weights}; leave out one of "
                "them, and give the class (--model-file)"
            )
        say(f"the weights are those that the class makes; those at {split.weights} are not read here")
    _config_with(options.config_file, split, work)  # refuses before the trial

    if split.pipeline > 1 and (reason := _why_in_one_part(module, example, say)):
        say(f"all rows pass the stages in one part: {reason}")
        split = replace(split, batched=False)

    def part(device: torch.device) -> torch.nn.Module:
        if source.folder is None:
            return spread(module, split, device)
        model = spread_folder(path, split, device)
        return replace(source.folder, model=model).module(source.names_of_inputs(len(example)))

    with step(say, f"trying {split.ranks} ranks"):
        told = try_split(module, part, split.ranks, example, say)
    say(told)
    return replace(options, config_file=_config_with(options.config_file, split, work))


def _why_in_one_part(module: torch.nn.Module, example: Tensors, say: Say) -> str:
    """Return why a pipeline can't cut the rows of the model's inputs into parts; "" if it can.

    The trial over ranks may miss such a reason, because one row, or equal rows, can give equal answers.
    """

    def work(tell: Say, _say: Say) -> str:
        return str(batch_refusal(Trial(module, example, tell=tell)) or "")

    with step(say, "trying rows apart"):
        try:
            return isolated(work, say)
        except ModelEndedProcess as end:
            return str(end)


def _config_with(config: Path | None, split: Split, work: Path) -> Path:
    """Write a copy of the configuration that has the section `parallel`."""
    text = config_text(config)
    if _SECTION.search(text):
        raise ModelRefused(
            f"{config} has a section {SECTION}; take it out, and --parallel writes the one that was tried"
        )
    if not takes_sections(text):
        raise ModelRefused(f"{config} takes no section as it is written; add to it: {split.line()}")
    return with_section(config, split.line(), work)


def try_split(
    whole: torch.nn.Module,
    part: Callable[[torch.device], torch.nn.Module],
    ranks: int,
    example: Tensors,
    say: Say,
) -> str:
    """Run the example in one process and over ranks; return a line on how far the outputs differ.

    Args:
        whole: the model.
        part: returns this rank's part of the model; called in the process of each rank.
        ranks: the number of ranks.
        example: inputs.
        say: receives lines about the trial.

    Raises:
        ModelRefused: the model can't be split like this, fails in a rank, or has other outputs.
    """

    def work(tell: Say, _say: Say) -> str:
        tell(f"{shapes(example)} in one process")
        wanted = run_on(whole, example)
        tell(f"{shapes(example)} over {ranks} ranks")

        def in_rank(rank: int) -> dict[str, Any]:
            mine = part(torch.device("cpu"))
            try:
                found = run_on(mine, example)
            except ModelRefused as refusal:
                raise ModelRefused(f"in rank {rank} of {ranks}, {refusal}; {_OTHER_PLAN}") from refusal
            difference = largest_difference(wanted, found)
            return {"difference": difference, "bytes": held_bytes(mine)}

        return json.dumps(in_ranks(ranks, in_rank))

    answers = json.loads(isolated(work, say))
    difference = max(each["difference"] for each in answers)
    sizes = [each["bytes"] for each in answers]
    held = ", ".join(f"{size / 1e6:.1f}" for size in (sizes[:1] if len(set(sizes)) == 1 else sizes))
    return (
        f"over {ranks} ranks: the answers differ by {difference:.1g} at most from those of one process; of "
        f"{held_bytes(whole) / 1e6:.1f} MB of weights a rank holds {held} MB"
    )


def largest_difference(wanted: Named, found: Named) -> float:
    """Return the largest difference; raise ModelRefused if it is too large."""
    largest = 0.0
    for (name, one), (_, other) in zip(wanted, found, strict=True):
        if one.shape != other.shape:
            raise ModelRefused(
                f"the output {name!r} has the shape {tuple(other.shape)} over the ranks, and "
                f"{tuple(one.shape)} in one process"
            )
        if not one.numel():
            continue
        apart = distances(one, other)
        limit = at_least_rounding(MOST_DIFFERENCE, one.dtype)
        # Relative to the largest value; for values that fill a mask (-1e9), relative to each value itself.
        sizes = one.double().abs().nan_to_num(0.0, 0.0).clamp(min=max(1.0, largest_magnitude(one.double())))
        difference = float(apart.amax())
        if bool((apart > limit * sizes).any()):
            raise ModelRefused(
                f"the output {name!r} differs by {difference:.2g} between the ranks and one process, more "
                f"than {limit:.2g}: the plan splits what the model needs whole; {_OTHER_PLAN}"
            )
        largest = max(largest, difference)
    return largest


def in_ranks(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Do the work in forked processes that gloo connects; return their results, which are JSON values.

    Raises:
        ModelRefused: a rank failed, or its process ended; the text names it.
    """
    ranks: list[tuple[int, Connection[Any, Any]]] = []
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="torchere-ranks-") as folder:
        try:
            for rank in range(count):
                store = Path(folder, "store")
                ranks.append(forked(functools.partial(_serve, rank, count, store, work)))
            numbers = {receiving: rank for rank, (_, receiving) in enumerate(ranks)}
            while len(results) < count:
                waiting = [receiving for receiving, rank in numbers.items() if rank not in results]
                for receiving in wait(waiting):
                    rank = numbers[receiving]  # type: ignore[index]  # one of those that were given
                    results[rank] = _answer(receiving, rank)  # type: ignore[arg-type]
        finally:
            for child, receiving in ranks:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                receiving.close()
    return [results[rank] for rank in range(count)]


def _answer(receiving: Connection[Any, Any], rank: int) -> Any:
    try:
        kind, content = json.loads(receiving.recv_bytes())
    except EOFError:
        raise ModelRefused(f"rank {rank} ended without an answer") from None
    if kind == "refused":
        raise ModelRefused(content)
    return content


def _serve(
    rank: int, count: int, store: Path, work: Callable[[int], Any], sending: Connection[Any, Any]
) -> NoReturn:
    end_with_parent()
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)

    def answer() -> None:
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
            content = ["done", work(rank)]
        except (ModelRefused, ValueError) as refusal:  # `spread` raises ValueError
            content = ["refused", str(refusal)]
        except Exception as error:  # raised by the model's code
            content = ["refused", f"the model failed in rank {rank}: {type(error).__name__}: {error}"]
        sending.send_bytes(json.dumps(content).encode())

    # In a new thread, because OpenMP's threads do not survive a fork.
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    # The parent ends this process when all ranks have answered: another rank may still read data from it.
    signal.pause()
    os._exit(0)
