"""Reads a plain directory as an archive: output of the format `no-archive`, or files placed by hand."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    skipped, because Python creates it where code runs. A link to a file of the folder is an entry, as in a
    download of `huggingface_hub`, whose `snapshots` link to `blobs`; `links` has the entry that it leads to.
    Other links are refused: they may lead anywhere. A second name of a file (a hard link), as an unpacked
    folder has it, is taken for a link to the first name.
    """

    def __init__(self, path: Path, limits: ArchiveLimits) -> None:
        self._path = path
        self._limits = limits
        self.root = _only_folder_in(path) or path
        self.links: dict[str, str] = {}
        names: dict[tuple[int, int], str] = {}  # by device and inode, of files with several names
        intake = Intake(path, limits)
        folders = [self.root]
        while folders:
            folders += self._scan(folders.pop(), intake, names)
        files = {entry.name: entry for entry in intake.finish()}
        # A symbolic link may lead to a second name.
        self.links = {name: self.links.get(target, target) for name, target in self.links.items()}
        for name, target in self.links.items():
            if target not in files:
                reason = "it is a link that leads to no file of the folder"
                raise intake.refuse(name, reason, "put the file itself there")
            intake.add(replace(files[target], name=name), is_link=True)
        self.entries = tuple(sorted(intake.finish(), key=lambda entry: entry.name))

    def walk(self, wanted: Callable[[Entry], bool]) -> Iterator[tuple[Entry, Chunks]]:
        """See `Container.walk`."""
        for entry in self.entries:
            if wanted(entry):
                yield entry, self._chunks(entry)

    def make_links(self, target: Path) -> None:
        """Make the links in `target`, which has the other files: hard links, or copies if that fails.

        Raises:
            ArchiveError: the copies are larger than the limit allows.
            OSError: a copy can't be written.
        """
        make: Callable[[Path, Path], object] = os.link
        for name, linked in self.links.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                make(target / linked, target / name)
            except OSError:  # the file system has no hard links, or too few for one file
                if make is shutil.copyfile:
                    raise
                self._check_copied()
                make = shutil.copyfile
                make(target / linked, target / name)

    def _check_copied(self) -> None:
        """Refuse the folder if it is over the limits when the bytes of links count, too."""
        intake = Intake(self._path, self._limits)
        for entry in self.entries:
            intake.add(entry)

    def _scan(self, folder: Path, intake: Intake, names: dict[tuple[int, int], str]) -> list[Path]:
        """Add the files of one folder to the intake and return its subfolders."""
        folders = []
        with os.scandir(folder) as found:
            for item in found:
                name = Path(item.path).relative_to(self.root).as_posix()
                status = item.stat(follow_symlinks=False)
                linked = self._linked(item.path, name, status, names)
                if linked is not None:
                    intake.check_count(len(self.links) + 1)
                    self.links[name] = linked
                elif stat.S_ISREG(status.st_mode):
                    intake.add(Entry(name, status.st_size, status.st_size, "file", 0))
                elif not stat.S_ISDIR(status.st_mode):
                    raise intake.refuse(name, "it is a device, FIFO or socket", "put the file itself there")
                elif item.name != "__pycache__":
                    intake.add_directory(name)
                    folders.append(Path(item.path))
        return folders

    def _linked(
        self, path: str, name: str, status: os.stat_result, names: dict[tuple[int, int], str]
    ) -> str | None:
        """Return the name of the file that a link leads to; None if this is no link."""
        if stat.S_ISLNK(status.st_mode):
            return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(self.root))).as_posix()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink < 2:
            return None
        first = names.setdefault((status.st_dev, status.st_ino), name)
        return None if first == name else first

    def _chunks(self, entry: Entry) -> Chunks:
        size = 0
        with open_regular(self.root / self.links.get(entry.name, entry.name)) as file:
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
