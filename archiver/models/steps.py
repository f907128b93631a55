"""Long steps of building a model: each is announced and timed, reports progress, and fails with one line."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torchere.archiver.errors import EndedBySignal, ModelRefused, PackingError

Say = Callable[[str], None]  # takes one line for the user; may be called from another thread
T = TypeVar("T")
_LIBRARIES = ("torch", "torchao", "transformers")  # their loggers
_EVERY_S = 10.0  # time between two lines about a loop
_STILL_S = 30.0  # time between two lines about a step that is still running


def silent(_line: str) -> None:
    """Discard the line; the `Say` callback of callers that show no output."""


@contextmanager
def step(say: Say, name: str, advice: str = "") -> Iterator[None]:
    """Run the block as the step `name`; turn an error into one ModelRefused that names the step.

    The error's text ends with `advice`, a remedy.

    Suppresses Python warnings, and log records below ERROR of torch, torchao and transformers: they concern
    internals (torch.jit is deprecated, a kernel for another machine is not loaded, ...). The code that runs
    the tracer reports warnings about the model (`convert/torchscript.py`).
    """
    started_s = time.perf_counter()
    say(f"{name} ...")
    ended = threading.Event()
    threading.Thread(target=_tell_that_it_lasts, args=(ended, name, say), daemon=True).start()
    try:
        with warnings.catch_warnings(), errors_only(*_LIBRARIES), refusing(name, advice):
            warnings.simplefilter("ignore")
            yield
    finally:
        ended.set()
    say(f"{name}: {time.perf_counter() - started_s:.1f} s")


@contextmanager
def errors_only(*names: str) -> Iterator[None]:
    """In the block, drop log records below ERROR of the named loggers."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(max(logger.level, logging.ERROR))
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _tell_that_it_lasts(ended: threading.Event, name: str, say: Say) -> None:
    """Report every 30 s how long the step has been running: compilers report no progress."""
    started_s = time.perf_counter()
    while not ended.wait(_STILL_S):
        say(f"{name}: running for {time.perf_counter() - started_s:.0f} s")


def counted(items: Iterable[T], count: int, what: str, say: Say) -> Iterator[T]:
    """Yield the items; report every 10 s how many of `count` are done, and how long the rest takes."""
    started_s = told_s = time.perf_counter()
    for done, item in enumerate(items, 1):
        yield item
        now_s = time.perf_counter()
        if now_s - told_s >= _EVERY_S and done < count:
            told_s = now_s
            left_s = (now_s - started_s) / done * (count - done)
            say(f"{what}: {done} of {count}, about {left_s:.0f} s left")


def line_of(error: BaseException, place: int = 0) -> str:
    """Return the first line of an error's text, or the last (-1), cut to 300 characters.

    A colon at its end is removed. For an error without text, it is the name of the error's class.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[place][:300].removesuffix(":") if lines else type(error).__name__


@contextmanager
def refusing(name: str, advice: str = "") -> Iterator[None]:
    """Turn an error in the block, except a missing file, into one ModelRefused that names the step.

    The error's text ends with `advice`. A PackingError is raised unchanged.
    """
    try:
        yield
    except (PackingError, FileNotFoundError):
        raise
    # All exceptions, because models, which are third-party code, and torch's tracers may raise any.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no text"]
        # TorchScript's interpreter gives the location first and the cause last.
        cause = lines[-1] if "in the TorchScript interpreter" in lines[0] else lines[0]
        if cause.startswith("Constraints violated"):  # torch.export gives the cause in the next line
            cause = ": ".join([cause.partition("!")[0], *(line.lstrip("- ") for line in lines[1:2])])
        elif cause.endswith(":"):
            cause = " ".join([cause, *lines[1:2]]).removesuffix(":")
        kind = f"{type(error).__name__}: "  # an error of TorchScript names its class already
        told = f"{name} failed: {kind}{cause.removeprefix(kind)[:300]}"
        raise ModelRefused(f"{told}; {advice}" if advice else told) from error


@contextmanager
def not_ending(name: str) -> Iterator[None]:
    """Turn a `sys.exit` of the user's code in the block into a ModelRefused that names the step."""
    try:
        yield
    except EndedBySignal:
        raise
    except SystemExit as end:
        raise ModelRefused(
            f"{name} failed: it ends the process (sys.exit({end.code!r})), as argparse does on flags it "
            "does not know; put that under if __name__ == '__main__'"
        ) from end
