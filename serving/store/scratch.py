"""What a server that was killed leaves behind: folders of unpacked models, and parts of downloads.

Each is claimed by a lock on an open file, which the kernel drops with the process, however it ends. What
nobody holds is swept by the next server that starts there. Everything here blocks on the disk.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from torchere.serving.errors import ServingError

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "torchere-models-"
_CLAIM = ".claim"  # the locked file in a claimed folder


class ClaimedFolder:
    """A new temporary folder that is ours until `release`, or until this process ends. Thread-safe.

    It is locked itself, too: that tells systemd-tmpfiles, which deletes what nobody has touched for days, to
    leave it alone with all that is in it.

    Raises:
        ServingError: there is no place for it.
    """

    def __init__(self, parent: Path | None) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
            draft = self.path / f"{_CLAIM}.new"
            try:
                self._claim = draft.open("wb")
            except OSError:
                self.path.rmdir()  # nobody sweeps what was never claimed
                raise
        except OSError as err:
            text = "set TEMP, or TMPDIR, to a folder that this user may write to."
            raise ServingError("Models can't be unpacked anywhere.", f"{err}; {text}") from err
        lock(self._claim)
        draft.rename(self.path / _CLAIM)  # it is there with its lock, or not at all
        self._itself = _locked_folder(self.path)

    def release(self) -> None:
        """Delete the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._claim.close()
        if self._itself is not None:
            os.close(self._itself)
            self._itself = None


def _locked_folder(folder: Path) -> int | None:
    try:
        itself = os.open(folder, os.O_RDONLY)
    except OSError:  # no more files may be open: it serves all the same
        return None
    lock(itself)
    return itself


def lock(file: IO[bytes] | int) -> bool:
    """Lock an open file until it is closed; False when somebody else has, or there are no locks here."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sweep_folders(parent: Path | None) -> list[Path]:
    """Delete the folders of servers that are gone; returns them.

    Only our own user's count, and only claimed ones: the parent is mostly the system's, which all can write.
    """
    swept = []
    for folder in _ours(Path(parent or tempfile.gettempdir()), FOLDER_PREFIX):
        with suppress(OSError), (folder / _CLAIM).open("rb") as claim:
            if not folder.is_symlink() and lock(claim):
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
    return swept


def sweep_parts(store: Path, prefix: str, idle_s: float) -> list[Path]:
    """Delete parts of downloads that nobody goes on with, and that were not touched for `idle_s`.

    The store may be on a network, where the locks of other machines are not always seen: hence the time. One
    that is as far ahead counts as well: it was written before the clock was put right.
    """
    swept = []
    for part in _ours(store, prefix):
        with suppress(OSError), part.open("rb") as opened:
            idle = abs(time.time() - os.fstat(opened.fileno()).st_mtime) >= idle_s
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
            if not hasattr(os, "geteuid") or path.lstat().st_uid == os.geteuid():
                yield path
