"""Work goes into a hidden sibling of the target, and takes its place only when it is complete."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNFINISHED = re.compile(r"\.torchere-[0-9a-f]{16}\.part")


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is such a sibling: another run's, or one that was killed left it."""
    return _UNFINISHED.fullmatch(name) is not None


@contextmanager
def staged(target: Path, *, merge: bool = False) -> Iterator[Path]:
    """Give a path beside `target` (same file system, not yet existing) to write a file or directory to.

    When the block ends well it is renamed to `target`, replacing a file that is there; when the block raises,
    whatever was written is removed and `target` is as it was. With `merge` a directory that is there takes
    the new one's files and keeps its others; file by file, so that a failure half-way leaves some of each.

    Raises:
        OSError: nothing was written, it can't be renamed, or (without `merge`) `target` is a directory that
            holds something.
    """
    work = target.with_name(f".torchere-{os.urandom(8).hex()}.part")  # as long for every target
    try:
        yield work
        if merge and target.is_dir():
            _merge(work, target)
        else:
            os.replace(work, target)
    finally:
        _remove(work)


def _merge(work: Path, target: Path) -> None:
    """Put each file of a directory into another."""
    for file in sorted(path for path in work.rglob("*") if path.is_file()):
        place = target / file.relative_to(work)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
