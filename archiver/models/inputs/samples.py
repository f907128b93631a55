"""The inputs of `--samples`: which files are read, and which of them the model fails on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.examples import files_of, read_samples, spread
from torchere.archiver.models.inputs.run import Run, run_on
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.steps import Say, step
from torchere.archiver.request import BuildOptions


@dataclass(frozen=True)
class Samples:
    """Inputs for calibration and verification; empty without `--samples`."""

    tensors: list[Tensors] = field(default_factory=list)
    files: Sequence[Path] = ()  # one for each of `tensors`

    @contextmanager
    def named(self, run: Run) -> Iterator[None]:
        """Name the file of the first sample that the model fails on, if a library's error ends the block.

        The samples are run only after an error, because running all of them once more may take minutes.

        Raises:
            ModelRefused: the model fails on a sample.
        """
        try:
            yield
        # Broad, because models and quantisers are third-party code and may raise any error.
        except Exception as error:
            if not isinstance(error, ModelRefused) or error.__cause__ is not None:
                for file, sample in zip(self.files, self.tensors, strict=True):
                    try:
                        run_on(run, sample)
                    except ModelRefused as refusal:
                        raise ModelRefused(f"{file}: {refusal}") from refusal
            raise


def chosen_samples(options: BuildOptions, names: Sequence[str], like: Tensors, say: Say) -> Samples:
    """Read the files of `--samples`, at most `--max-samples` of them; see `read_samples`."""
    if options.samples is None:
        return Samples()
    found = files_of(options.samples)
    files = spread(found, options.max_samples)
    with step(say, f"reading {len(files)} samples"):
        samples = read_samples(files, names, like, options.prepare)
    if len(files) < len(found):
        say(f"samples: {len(files)} of {len(found)} files, evenly spaced; --max-samples sets how many")
    return Samples(samples, files)
