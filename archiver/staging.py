"""All or nothing: work goes into a hidden sibling of the target, which takes its place only when complete."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNFINISHED = re.compile(r"\.torchere-[0-9a-f]{16}\.(part|old)")


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is such a sibling: another run's, or one that was killed left it."""
    return _UNFINISHED.fullmatch(name) is not None


@contextmanager
def staged(target: Path, *, merge: bool = False) -> Iterator[Path]:
    """Give a path beside `target` (same file system, not yet existing) to write a file or directory to.

    When the block ends well it is renamed to `target`, replacing a file or directory that is there; when the
    block raises, whatever was written is removed and `target` is as it was. With `merge` a directory that is
    there keeps what the new one has not.
    """
    work = _sibling(target, "part")
    try:
        yield work
        if target.is_dir() and merge:
            _merge(work, target)
        elif target.is_dir() and not target.is_symlink():
            _swap(work, target)
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


def _swap(work: Path, target: Path) -> None:
    """Put one directory in the place of another, which no single rename does."""
    aside = _sibling(target, "old")
    os.rename(target, aside)
    try:
        os.rename(work, target)
    except OSError:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside)


def _sibling(target: Path, purpose: str) -> Path:
    # The name's length must not depend on the target's, which may be as long as a file system allows.
    return target.with_name(f".torchere-{os.urandom(8).hex()}.{purpose}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
