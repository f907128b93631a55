"""Reads a plain directory as an archive: output of the format `no-archive`, or files placed by hand."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from torchere.archiver.container.entries import (
    CHUNK_BYTES,
    ArchiveLimits,
    Chunks,
    Entry,
    Intake,
    open_regular,
)
from torchere.archiver.errors import ArchiveError


class FolderContainer:
    """One directory, listed and checked; see `entries.Container`.

    `root` is the folder with the files: the directory itself, or the only directory in it. `__pycache__` is
    skipped, because Python creates it where code runs. Links are refused: they may lead anywhere.
    """

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        self._path = path
        self.root = _only_folder_in(path) or path
        intake = Intake(path, limits)
        folders = [self.root]
        while folders:
            folders += self._scan(folders.pop(), intake)
        self.entries = tuple(sorted(intake.finish(), key=lambda entry: entry.name))

    def walk(self, wanted: Callable[[Entry], bool]) -> Iterator[tuple[Entry, Chunks]]:
        """See `Container.walk`."""
        for entry in self.entries:
            if wanted(entry):
                yield entry, self._chunks(entry)

    def _scan(self, folder: Path, intake: Intake) -> list[Path]:
        """Add the files of one folder to the intake and return its subfolders."""
        folders = []
        with os.scandir(folder) as found:
            for item in found:
                name = Path(item.path).relative_to(self.root).as_posix()
                status = item.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    intake.add(Entry(name, status.st_size, status.st_size, "file", 0))
                elif not stat.S_ISDIR(status.st_mode):
                    kind = "a link" if item.is_symlink() else "a device, FIFO or socket"
                    raise intake.refuse(name, f"it is {kind}", "put the file itself there")
                elif item.name != "__pycache__":
                    intake.add_directory(name)
                    folders.append(Path(item.path))
        return folders

    def _chunks(self, entry: Entry) -> Chunks:
        size = 0
        with open_regular(self.root / entry.name) as file:
            while (chunk := file.read(CHUNK_BYTES)) and size <= entry.size:
                size += len(chunk)
                yield chunk
        if size != entry.size:
            raise ArchiveError(
                self._path, "the file changed after the directory was listed", "open it again", entry.name
            )


def _only_folder_in(path: Path) -> Path | None:
    """Return the only item of `path` if it is a directory (SageMaker's layout); hidden names don't count."""
    inside = [name for name in os.listdir(path) if not name.startswith(".")]
    if len(inside) != 1 or inside == ["MAR-INF"]:
        return None
    only = path / inside[0]
    return only if stat.S_ISDIR(os.lstat(only).st_mode) else None
