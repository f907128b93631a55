"""Long steps of building a model: each is announced, timed, and fails with one line."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchere.archiver.errors import ModelRefused, PackingError

Say = Callable[[str], None]  # takes one line for the user


def silent(_line: str) -> None:
    """Drop the line: a `Say` for callers without output."""


@contextmanager
def step(say: Say, name: str) -> Iterator[None]:
    """Run the block as the step `name`; turn an error into one ModelRefused that names the step.

    Warnings of torch are suppressed: they are about its internals (torch.jit is deprecated, ...). The code
    that runs the tracer reports those about the model (`convert/torchscript.py`).
    """
    started_s = time.perf_counter()
    say(f"{name} ...")
    with warnings.catch_warnings(), refusing(name):
        warnings.simplefilter("ignore")
        yield
    say(f"{name}: {time.perf_counter() - started_s:.1f} s")


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn an error in the block, except a missing file, into one ModelRefused that names the step.

    A PackingError is raised as it is.
    """
    try:
        yield
    except (PackingError, FileNotFoundError):
        raise
    # Broad, because models are third-party code and may raise anything, and so may torch's tracers.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no text"]
        # TorchScript's interpreter gives the location first and the cause last.
        cause = lines[-1] if "in the TorchScript interpreter" in lines[0] else lines[0]
        if cause.startswith("Constraints violated"):  # torch.export gives the cause in the next line
            cause = ": ".join([cause.partition("!")[0], *(line.lstrip("- ") for line in lines[1:2])])
        kind = f"{type(error).__name__}: "  # TorchScript's own text has it already
        raise ModelRefused(f"{name} failed: {kind}{cause.removeprefix(kind)[:300]}") from error
