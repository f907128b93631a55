"""The example that a model is run on: the user's, the source's own, or the first sample."""

from __future__ import annotations

from collections.abc import Sequence

from torchere.archiver.models.inputs.examples import Example, example_of, files_of, read_example
from torchere.archiver.models.inputs.sizes import LARGEST, Tensors
from torchere.archiver.models.load.source import Source, inputs_up_to
from torchere.archiver.models.steps import Say
from torchere.archiver.request import BuildOptions
from torchere.archiver.signature import TensorSpec

_UNPREPARED = (
    "the handler prepares no pictures: they are taken in their own size with values from 0 to 1; if clients "
    "send other numbers, give --example and --samples as .npy or .pt, or handler.image in model-config.yaml"
)
_LENGTH = 64  # of texts, in advice about a model that does not tell its longest


def source_with_example(
    source: Source, options: BuildOptions, signed: Sequence[TensorSpec], say: Say
) -> tuple[Source, Tensors | None]:
    """Return the example, or None without any, and the source with the inputs that it has.

    Args:
        source: the model; it may have an example of its own.
        options: the user's example, and samples, of which the first serves as one if there is no other.
        signed: the inputs of the archive that the model comes from, to make an example of.
        say: takes lines about the example that was chosen.

    Raises:
        ModelRefused: the example can't be read, or has other inputs than the model.
        OSError: it can't be read.
    """
    example = _chosen(source, options, signed, say)
    if example is None:
        _tell_made_up(source, say)
        return source, source.example
    source = source.taking(example.names, len(example.tensors))
    names = source.signature.inputs if source.signature else None
    count = inputs_up_to(source.module, example.names, len(example.tensors))
    wanted = [spec.name for spec in names] if names else source.names_of_inputs(count)
    tensors = example.ordered(wanted)
    if not options.dynamic_sizes:
        _tell_fixed_lengths(source, tensors, say)
    return source, tensors


def _chosen(source: Source, options: BuildOptions, signed: Sequence[TensorSpec], say: Say) -> Example | None:
    path = options.example
    if path is None and source.example is None:
        if signed:
            return example_of(signed)
        if options.samples is not None:
            path = files_of(options.samples)[0]
            say(f"the example: {path}, the first of --samples, since --example is not given")
    if path is None:
        return None
    example = read_example(path, doubles=source.doubles, prepare=options.prepare)
    if example.unprepared:
        say(_UNPREPARED)
    return example


def _tell_made_up(source: Source, say: Say) -> None:
    if source.folder is None or source.example is None:
        return
    inputs = ", ".join(source.names_of_inputs(len(source.example)))
    say(
        f"tried with made-up inputs ({inputs}), since --example is not given: lengths of texts vary, "
        "and all other sizes but the batch are fixed"
    )
    if left_out := ", ".join(source.folder.left_out):
        say(f"without {left_out}, since the folder's tokenizer does not make it; an --example may have it")


def _tell_fixed_lengths(source: Source, example: Tensors, say: Say) -> None:
    """Say how the lengths of texts may vary, which an example fixes."""
    names = source.names_of_inputs(len(example))
    for free in source.folder.lengths(names, example) if source.folder is not None else ():
        now = free.size_in(example)
        most = free.high if free.high < LARGEST else max(_LENGTH, now)
        inputs = ",".join(names[place] for place, _ in free.places)
        say(f"texts have {now} tokens, as in the example; --dynamic {inputs}.1=1:{most} lets that vary")
