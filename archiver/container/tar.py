"""Reads `.tar.gz` archives. TorchServe drops the first component of every name; see `_root_of`."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torchere.archiver.container.entries import (
    CHUNK_BYTES,
    ArchiveLimits,
    Chunks,
    Entry,
    Intake,
    identity_of,
    open_regular,
)
from torchere.archiver.errors import ArchiveError

# The records of a gzip-packed tar, read from front to back with bounded memory.
#
# The standard library parses single headers. The loop over the headers is written here, because `tarfile`
# reads as many bytes as an extended header claims to have, and because only plain files and directories are
# accepted.

BLOCK_BYTES = 512
MAX_EXTENDED_BYTES = 2**16  # a long name or a set of pax records
MAX_EXTENDED_IN_A_ROW = 4
MAX_PAX_RECORDS = 128  # limit on the records of one header; usual tar programs write fewer than ten
MAX_PADDING_BYTES = 2**20  # limit on the zeros after the last entry; GNU tar pads archives to 10 KiB

_PAX, _PAX_GLOBAL, _LONG_NAME = tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.GNUTYPE_LONGLINK: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a FIFO",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


class Header(NamedTuple):
    """One file or directory; `name` is as stored, without a trailing slash."""

    name: str
    size: int
    is_directory: bool


class TarStream:
    """A gzip-packed tar that is read once, from front to back. Not thread-safe.

    Every method raises ArchiveError when the bytes are damaged or refused.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._packed = gzip.GzipFile(fileobj=file, mode="rb")
        self._left_bytes = 0  # of the current file's data
        self._padding_bytes = 0  # after the data, up to a full block

    def headers(self) -> Iterator[Header]:
        """Yield one header after the other; unread data is skipped."""
        while True:
            for _ in self.data():
                pass
            header = self._header()
            if header is None:
                return
            self._left_bytes = header.size
            self._padding_bytes = -header.size % BLOCK_BYTES
            yield header

    def data(self) -> Iterator[bytes]:
        """Yield the current file's data in chunks."""
        while self._left_bytes:
            chunk = self._some(min(self._left_bytes, CHUNK_BYTES))
            self._left_bytes -= len(chunk)
            yield chunk
        self._exactly(self._padding_bytes)
        self._padding_bytes = 0

    def _header(self) -> Header | None:
        """Read the next file or directory, with its extended headers applied; None at the end."""
        extended: dict[str, str] = {}
        for _ in range(MAX_EXTENDED_IN_A_ROW + 1):
            block = self._exactly(BLOCK_BYTES)
            if not any(block):
                self._expect_nothing_more()
                return None
            info = self._parsed(block)
            if info.type == _PAX_GLOBAL:
                self._refuse_global(self._pax(info))
            elif info.type == _PAX:
                self._extend(extended, self._pax(info))
            elif info.type == _LONG_NAME:
                name = self._text(self._extended(info).partition(b"\0")[0])
                self._extend(extended, {"path": name})
            else:
                return self._entry(info, extended)
        raise self._refuse("too many extended headers in a row")

    def _extend(self, extended: dict[str, str], more: dict[str, str]) -> None:
        """Add the records of one more header; refuse two values of a key, because readers use either."""
        for key, value in more.items():
            if extended.setdefault(key, value) != value:
                values = f"{extended[key]!a:.80} and {value!a:.80}"
                raise self._refuse(f"two extended headers give one entry the {key} {values}")

    def _entry(self, info: tarfile.TarInfo, extended: dict[str, str]) -> Header:
        name = extended.get("path", info.name)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            kind = _KINDS.get(info.type, f"of the unknown type {info.type!r}")
            raise self._refuse(f"it is {kind}; only files and directories are read", name)
        if any(key.startswith("GNU.sparse") for key in extended):
            raise self._refuse("it is a sparse file", name)
        size = self._number(extended["size"]) if "size" in extended else info.size
        if size < 0 or (size and info.isdir()):
            raise self._refuse(f"the size {size} is wrong", name)
        return Header(name.rstrip("/") if info.isdir() else name, size, info.isdir())

    def _parsed(self, block: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise self._refuse(f"a tar header is damaged: {error}") from error

    def _extended(self, info: tarfile.TarInfo) -> bytes:
        if not 0 <= info.size <= MAX_EXTENDED_BYTES:
            raise self._refuse(f"an extended header of {info.size} bytes")
        data = self._exactly(info.size + -info.size % BLOCK_BYTES)
        if any(data[info.size :]):  # some readers take a long name up to its NUL instead
            raise self._refuse("bytes behind the end of an extended header")
        return data[: info.size]

    def _pax(self, info: tarfile.TarInfo) -> dict[str, str]:
        """Parse consecutive records `<length> <key>=<value>`, each with a line feed at its end."""
        data = self._extended(info)
        records: dict[str, str] = {}
        start = 0
        for _ in range(MAX_PAX_RECORDS):
            if start == len(data):
                return records
            length_text = data[start : start + 9].partition(b" ")[0]
            length = self._number(self._text(length_text[:8]))
            record = data[start : start + length]
            start += length
            key, equals, value = record[len(length_text) + 1 : -1].partition(b"=")
            if len(record) != length or not key or not equals or record[-1:] != b"\n":
                raise self._refuse("a pax record is damaged")
            if key in (b"path", b"size") or key.startswith(b"GNU.sparse"):
                records[self._text(key)] = self._text(value)
        if start < len(data):
            raise self._refuse(f"a header of more than {MAX_PAX_RECORDS} pax records")
        return records

    def _refuse_global(self, records: dict[str, str]) -> None:
        if records:
            raise self._refuse("a global header gives all files one name or size")

    def _number(self, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 19):
            raise self._refuse(f"{text!r} is not a size")
        return int(text)

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._refuse("a name is not UTF-8", raw.decode("latin-1")) from error

    def _expect_nothing_more(self) -> None:
        seen = 0
        while chunk := self._read(CHUNK_BYTES):
            seen += len(chunk)
            if any(chunk) or seen > MAX_PADDING_BYTES:
                raise self._refuse("there is something behind the end of the tar")

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            found += self._some(size - len(found))
        return bytes(found)

    def _some(self, size: int) -> bytes:
        chunk = self._read(size)
        if not chunk:
            raise self._refuse("the file is cut off")
        return chunk

    def _read(self, size: int) -> bytes:
        try:
            return self._packed.read(size)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self._refuse(f"the gzip data is damaged: {error}") from error

    def _refuse(self, reason: str, entry: str | None = None) -> ArchiveError:
        return ArchiveError(self._path, reason, "pack the archive again", entry=entry)


class TarContainer:
    """One gzip-packed tar, indexed and checked; see `entries.Container`.

    Indexing unpacks the whole file once without keeping it, and so does every walk.
    """

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        self._path = path
        with open_regular(path) as file:
            self._identity = identity_of(file)
            headers = self._checked_headers(TarStream(path, file), limits)
        self._root = _root_of([header.name for header in headers])
        intake = Intake(path, limits)
        for header in headers:
            self._take(header, intake)
        self.entries = intake.finish()

    def walk(self, wanted: Callable[[Entry], bool]) -> Iterator[tuple[Entry, Chunks]]:
        """See `Container.walk`."""
        entries = iter(self.entries)
        with open_regular(self._path, self._identity) as file:
            stream = TarStream(self._path, file)
            for header in stream.headers():
                if header.is_directory:
                    continue
                entry = next(entries, None)
                if entry is None or entry.size != header.size:
                    raise self._changed()
                if wanted(entry):
                    yield entry, stream.data()
        if next(entries, None) is not None:
            raise self._changed()

    def _changed(self) -> ArchiveError:
        return ArchiveError(self._path, "the file changed after it was opened", "open it again")

    def _checked_headers(self, stream: TarStream, limits: ArchiveLimits) -> list[Header]:
        """Return all headers except the root's; the limits are checked while reading."""
        intake = Intake(self._path, limits)
        headers = []
        for found in stream.headers():
            header = found._replace(name=found.name.removeprefix("./"))  # from `tar -C folder .`
            if header.name != "." or not header.is_directory:
                self._put(header, header.name, intake)
                headers.append(header)
        return headers

    def _take(self, header: Header, intake: Intake) -> None:
        if header.name != self._root.rstrip("/"):
            self._put(header, header.name.removeprefix(self._root), intake)
        elif not header.is_directory:
            raise ArchiveError(
                self._path, "a file and a folder have this name", "rename one", entry=header.name
            )

    @staticmethod
    def _put(header: Header, name: str, intake: Intake) -> None:
        if header.is_directory:
            intake.add_directory(name)
        else:
            intake.add(Entry(name, header.size, header.size, "gzip"))


def _root_of(names: list[str]) -> str:
    """Return the one top folder that holds all names, with a slash, or "" if the archive has no such folder.

    The archiver puts everything below one folder named after the model. TorchServe always drops the first
    component, which breaks archives made of the files alone; here their names are kept as they are.
    """
    firsts = {name.partition("/")[0] for name in names}
    if len(firsts) != 1 or not any("/" in name for name in names) or firsts == {"MAR-INF"}:
        return ""
    return f"{firsts.pop()}/"
