"""Reads `.tar.gz` archives. TorchServe drops the first component of every name; see `_root_of`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torchere.archiver.entries import ArchiveLimits, Chunks, Entry, Identity, Intake, open_regular
from torchere.archiver.errors import ArchiveError
from torchere.archiver.tarheaders import Header, TarStream


class TarContainer:
    """One gzip-packed tar, indexed and checked; see `entries.Container`.

    Indexing unpacks the whole once without keeping it, and so does every walk.
    """

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        self._path = path
        with open_regular(path) as file:
            self._identity = Identity.of(file)
            headers = self._checked_headers(TarStream(path, file), limits)
        names = [header.name for header in headers]
        self._root = _root_of(names)
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
        """All headers but that of the root itself; the limits hold while they are read."""
        intake = Intake(self._path, limits)
        headers = []
        for found in stream.headers():
            header = found._replace(name=_without_dot(found.name))
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


def _without_dot(name: str) -> str:
    """`tar -C folder .` writes every name with `./` in front."""
    return name.removeprefix("./")


def _root_of(names: list[str]) -> str:
    """The folder that everything lies in, with a slash, or "" when there is none.

    The archiver puts everything below one folder named after the model. TorchServe drops the first component
    whatever it is, and so spoils archives made of the files alone; those are read as they are here.
    """
    firsts = {name.partition("/")[0] for name in names}
    if len(firsts) != 1 or not any("/" in name for name in names) or firsts == {"MAR-INF"}:
        return ""
    return f"{firsts.pop()}/"
