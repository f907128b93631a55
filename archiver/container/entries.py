"""The common form of all archive kinds: a checked list of entries, and a stream of their bytes."""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

from torchere.archiver.errors import ArchiveError

# Rules for the names of entries. Pure functions, used when packing and when reading.
#
# An entry name is a relative POSIX path. The same rules hold for both directions, so that nothing can be
# packed that could not be read back.

MANIFEST_NAME = "MAR-INF/MANIFEST.json"
MAX_NAME_BYTES = 1024  # of the whole name in UTF-8; Linux's PATH_MAX, 4096, includes the target folder
MAX_PART_BYTES = 255  # of each part of the name; NAME_MAX of the usual file systems

_DRIVE = re.compile(r"^[A-Za-z]:")


def problem_with(name: str) -> str | None:
    """Return why `name` is refused; None if it is valid. Pass a directory's name without its last slash."""
    if not name:
        return "the name is empty"
    if "\\" in name:
        return "the name has a backslash"
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        return "the name has a NUL, control or surrogate character"
    if name.startswith("/") or _DRIVE.match(name):
        return "the name is an absolute path"
    return _problem_with_parts(name)


def _problem_with_parts(name: str) -> str | None:
    parts = name.split("/")
    if ".." in parts:
        return "the name leaves the archive by '..'"
    if "" in parts or "." in parts:
        return "the name has an empty or '.' part"
    if any(part[-1] in ". " for part in parts):
        return "a part of the name ends in a dot or a space, which some systems drop"
    if len(name.encode()) > MAX_NAME_BYTES or any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        return f"the name is longer than {MAX_NAME_BYTES} bytes, or a part of it than {MAX_PART_BYTES}"
    return None


def folded(name: str) -> str:
    """Return `name` case-folded and in NFC: equal for names that some file systems take for one file."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def first_clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Find two file names that cannot both be unpacked.

    On some file systems they are the same name (see `folded`), or one is a parent folder of the other. The
    time grows with the length of the names, not with the depth of the folders.
    """
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(folded(name), name)) is not name:
            return other, name
    # Sorted with the slash before every other character, a folder's files directly follow its name.
    for key, after in pairwise(sorted(seen, key=lambda key: key.replace("/", "\0"))):
        if after.startswith(f"{key}/"):
            return seen[key], seen[after]
    return None


CHUNK_BYTES = 2**20
Method = Literal["stored", "deflated", "gzip", "file"]
Chunks = Iterator[bytes]


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Limits on an untrusted archive. Sizes are bytes after unpacking."""

    max_entries: int = 10_000  # files and directories together
    max_total_bytes: int = 64 * 2**30
    max_manifest_bytes: int = 4 * 2**20  # room for the digests of `max_entries` files


@dataclass(frozen=True, slots=True)
class Entry:
    """One file in an archive; its name has been checked and is a relative POSIX path."""

    name: str
    size: int  # bytes after unpacking, as declared; streaming fails when the data differs
    stored_size: int  # bytes in the archive; for gzip, which compresses it as a whole, the same as `size`
    method: Method
    # Where the data begins in its file (zip, folder); None in a .tar.gz, which is compressed as a whole.
    offset: int | None = None
    crc: int | None = None  # CRC-32 of the data, when the format has one per entry


class Container(Protocol):
    """One kind of archive. Immutable; every walk opens the file again, so no handle is kept."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All files, in the order of a walk."""
        ...

    def walk(self, wanted: Callable[[Entry], bool]) -> Iterator[tuple[Entry, Chunks]]:
        """Stream the wanted entries; use up the chunks of each entry before asking for the next.

        The chunks of an entry are together exactly `size` bytes, or an ArchiveError is raised.
        """
        ...


class Intake:
    """Collects entries while an archive is indexed; refuses bad names and archives over the limits.

    Every entry is checked before it is kept, so memory stays bounded by `max_entries` for any file.
    """

    def __init__(self, archive: Path, limits: ArchiveLimits) -> None:
        self._archive = archive
        self._limits = limits
        self._entries: dict[str, Entry] = {}
        self._count = 0
        self._total_bytes = 0

    def add(self, entry: Entry, *, is_link: bool = False) -> None:
        """Check and add one file; the bytes of a link to another one do not count."""
        self.add_directory(entry.name)
        if other := self._entries.get(folded(entry.name)):
            same = "is in the archive twice" if other.name == entry.name else f"is the same as {other.name!r}"
            raise self.refuse(
                entry.name, f"the name {same}, on some systems at least", "keep one of the entries"
            )
        self._total_bytes += 0 if is_link else entry.size
        if entry.size < 0 or self._total_bytes > self._limits.max_total_bytes:
            raise self.refuse(
                entry.name,
                f"the files so far are larger than {self._limits.max_total_bytes} bytes",
                "a server's setting max_archive_bytes raises the limit, if you trust the archive",
            )
        self._entries[folded(entry.name)] = entry

    def add_directory(self, name: str) -> None:
        """Count a directory and check its name; directories are created with the files in them."""
        self.check_count(self._count + 1)
        self._count += 1
        if problem := problem_with(name):
            raise self.refuse(name, problem, "pack the archive again with relative names")

    def check_count(self, count: int) -> None:
        """Refuse an archive that declares `count` entries when that is more than the limit."""
        if count > self._limits.max_entries:
            raise ArchiveError(
                self._archive,
                f"more than {self._limits.max_entries} entries",
                "a server's setting max_archive_entries raises the limit, if you trust the archive",
            )

    def finish(self) -> tuple[Entry, ...]:
        """Return the entries in the order they were added; refuse a file that is also a folder."""
        names = [entry.name for entry in self._entries.values()]
        if clash := first_clash(names):
            raise self.refuse(clash[0], f"it is a file and the folder of {clash[1]!r}", "rename one of them")
        return tuple(self._entries.values())

    def refuse(self, entry: str, reason: str, advice: str) -> ArchiveError:
        """Return the error that names this archive and `entry`."""
        return ArchiveError(self._archive, reason, advice, entry=entry)


def identity_of(file: BinaryIO) -> tuple[int, ...]:
    """Return the identity of an open file, which changes when the file is replaced or rewritten."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_regular(path: Path, identity: tuple[int, ...] | None = None) -> BinaryIO:
    """Open a regular file for reading; with `identity`, only if it is still the same file, unchanged."""
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ArchiveError(path, "not a regular file", "name a .mar, a .tar.gz or a directory")
    if identity is not None and identity_of(file) != identity:
        file.close()
        raise ArchiveError(path, "the file changed after it was opened", "open it again")
    return file


def _without_waiting(path: str, flags: int) -> int:
    # Opening a FIFO without a writer would block for ever.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
