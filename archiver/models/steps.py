"""The long steps of making a model: each is announced, timed, and fails with one line."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchere.archiver.errors import ModelRefused, PackingError

Say = Callable[[str], None]  # takes one line for the user


def silent(_line: str) -> None:
    """A `Say` for those who have nobody to tell."""


@contextmanager
def step(say: Say, name: str) -> Iterator[None]:
    """Run the block as the step `name`; whatever it raises becomes one ModelRefused that says so.

    Warnings of torch are kept back: they speak of its own insides (torch.jit is deprecated, ...). Those about
    the model are told by who runs the tracer (`tracing.py`).
    """
    started_s = time.perf_counter()
    say(f"{name} ...")
    with warnings.catch_warnings(), refusing(name):
        warnings.simplefilter("ignore")
        yield
    say(f"{name}: {time.perf_counter() - started_s:.1f} s")


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn whatever the block raises into one ModelRefused that names the step, but for a missing file."""
    try:
        yield
    except (PackingError, FileNotFoundError):
        raise
    # Broad, because models are other people's code, which may raise anything, and torch's tracers do, too.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no text"]
        # TorchScript's interpreter begins with where it was, and ends with what was wrong there.
        cause = lines[-1] if "in the TorchScript interpreter" in lines[0] else lines[0]
        if cause.startswith("Constraints violated"):  # torch.export says in the next line what is wrong
            cause = ": ".join([cause.partition("!")[0], *(line.lstrip("- ") for line in lines[1:2])])
        kind = f"{type(error).__name__}: "  # which TorchScript's own text has already
        raise ModelRefused(f"{name} failed: {kind}{cause.removeprefix(kind)[:300]}") from error
