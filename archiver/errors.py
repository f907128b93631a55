"""Errors of packing and reading archives; each has one readable text."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class ArchiveError(Exception):
    """An archive can't be read: its bytes, its names or its manifest are wrong.

    `str(error)` is one line with the archive, the entry (if the error is about one), the reason and the
    advice. Callers with a message of their own use only `reason`.
    """

    def __init__(self, archive: str | Path, reason: str, advice: str, entry: str | None = None) -> None:
        self.archive = str(archive)
        self.reason = reason
        self.advice = advice
        self.entry = entry
        where = f"{self.archive}: entry {_shown(entry)}" if entry is not None else self.archive
        super().__init__(one_line(f"{where}: {reason} ({advice})"))


class PackingError(Exception):
    """An archive can't be written: an input is missing or wrong, or the output is already there.

    If TorchServe's archiver has a text for the case, `str(error)` is exactly that text, which may have more
    than one line.
    """


class ModelRefused(PackingError):
    """A model, example or option can't be used; `str(error)` is one line: the value found and expected.

    Raised for damaged files, files for another purpose or machine than their names say, and files that would
    run code of their own. None of their code was run.
    """

    def __init__(self, text: str) -> None:
        super().__init__(one_line(" ".join(text.split())))


class EndedBySignal(SystemExit):
    """A signal ends this process, in contrast to a model's own code that calls `sys.exit`."""


@contextmanager
def naming_files_of(archive: Path, folder: Path, advice: str = "") -> Iterator[None]:
    """Name the archive instead of `folder`, where it is unpacked, in each PackingError from the block.

    An error that names a file of the archive ends with `advice`.
    """
    try:
        yield
    except PackingError as error:
        text = str(error)
        if str(folder) not in text:
            raise
        kind = ModelRefused if isinstance(error, ModelRefused) else PackingError
        named = text.replace(str(folder), str(archive))
        raise kind(f"{named}; {advice}" if advice else named) from error


def plainly(error: BaseException) -> str:
    """Return the text of an error; an OSError about a file gives "FILE: reason", without its number.

    The error for a full disk names no file, so the text names the two folders that are written to.
    """
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename:
        place = tempfile.gettempdir()
        return (
            f"{error.strerror}: free some on the disk of the output or of {place}, or set TMPDIR to another"
        )
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _shown(entry: str) -> str:
    """Return the name in quotes with unprintable characters escaped, cut to 120 characters."""
    quoted = ascii(entry)
    return quoted if len(quoted) <= 120 else f"{quoted[:117]}..."


def one_line(text: str) -> str:
    r"""Return the text with line breaks and other unprintable characters escaped (`\n`, `\x1b`, `\u202e`)."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def first_names(names: Sequence[str]) -> str:
    """Return the first five names in one line, each cut to 80 characters, with the number of the others."""
    shown = ", ".join(ascii(name)[1:-1][:80] for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
