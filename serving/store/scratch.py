"""Removal of temporary files that a killed server leaves: folders of unpacked models, partial downloads.

Each one is locked through an open file; the kernel releases the lock when the process ends, for any reason.
The next server that uses the same parent folder deletes the unlocked ones. All calls block on the disk.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from torchere.serving.errors import ServingError

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "torchere-models-"
_BEFORE_LOCK_S = 5.0  # a partial download exists for a moment before it is locked
_CLAIM = ".claim"  # the locked file in a claimed folder


class ClaimedFolder:
    """A new temporary folder, locked until `release` or the end of this process. Thread-safe.

    The folder itself is locked, too: systemd-tmpfiles, which deletes files unused for days, skips a locked
    folder and its contents.

    Raises:
        ServingError: the folder can't be created.
    """

    def __init__(self, parent: Path | None) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
            draft = self.path / f"{_CLAIM}.new"
            try:
                self._claim = draft.open("wb")
            except OSError:
                self.path.rmdir()  # still without a claim, so `sweep_folders` would skip it
                raise
        except OSError as err:
            text = "set TEMP, or TMPDIR, to a folder that this user may write to."
            raise ServingError("Models can't be unpacked anywhere.", f"{err}; {text}") from err
        lock(self._claim)
        draft.rename(self.path / _CLAIM)  # when the claim appears, it is already locked
        self._itself: int | None = None
        with suppress(OSError):  # the limit of open files is reached: continue without this lock
            self._itself = os.open(self.path, os.O_RDONLY)
            lock(self._itself)

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """Make a folder in it; an error in the block deletes that folder."""
        folder = Path(tempfile.mkdtemp(dir=self.path))
        try:
            yield folder
        except BaseException:
            remove_tree(folder)
            raise

    def release(self) -> None:
        """Delete the folder and its contents."""
        remove_tree(self.path)
        self._claim.close()
        if self._itself is not None:
            os.close(self._itself)
            self._itself = None


def remove_tree(folder: Path) -> None:
    """Delete a folder and its contents, as far as possible; a handler may have nested it deeply.

    `shutil.rmtree` may be recursive; `rm` is not.
    """
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        with suppress(OSError):
            subprocess.run(["rm", "-rf", "--", folder], capture_output=True, check=False)


def lock(file: IO[bytes] | int) -> bool:
    """Lock an open file until it is closed; return False if it is locked or locks are not supported."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep_folders(parent: Path | None) -> list[Path]:
    """Delete the folders of servers that no longer run; return the paths of the folders.

    Only claimed folders of this user are deleted: the parent is usually the system's temporary folder, which
    every user can write to.
    """
    swept = []
    for folder in _ours(Path(parent or tempfile.gettempdir()), FOLDER_PREFIX):
        with suppress(OSError), (folder / _CLAIM).open("rb") as claim:
            if not folder.is_symlink() and lock(claim):
                remove_tree(folder)
                swept.append(folder)
    return swept


@functools.cache
def machine() -> str:
    """Return a prefix for partial files of this boot, whose locks are visible; "-": the boot is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8] + "-"
    except OSError:
        return "-"


def sweep_parts(store: Path, prefix: str, idle_s: float) -> list[Path]:
    """Delete unlocked partial files that were not modified for `idle_s` seconds; return their paths.

    The time is checked because the store may be on a network file system, where locks of other machines are
    not always visible. For files of this machine (see `machine`) the lock is enough. A modification time that
    is `idle_s` in the future counts, too: it was written before the clock was corrected.
    """
    swept = []
    for part in _ours(store, prefix):
        with suppress(OSError), part.open("rb") as opened:
            least_s = min(idle_s, _BEFORE_LOCK_S) if part.name.startswith(prefix + machine()) else idle_s
            idle = abs(time.time() - os.fstat(opened.fileno()).st_mtime) >= least_s
            if idle and not part.is_symlink() and lock(opened):
                part.unlink()
                swept.append(part)
    return swept


def _ours(folder: Path, prefix: str) -> Iterator[Path]:
    try:
        found = [path for path in folder.iterdir() if path.name.startswith(prefix)]
    except OSError:
        return
    for path in found:
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                yield path
