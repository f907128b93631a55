"""Maps one file for all versions with equal weights, so that the weights are in memory only once.

Each version has a hard link to that file. The file system counts the links, so a version can be removed
without regard to the others. A handler must never write to the shared file, because that would change another
version:

* A built-in handler does not write to the archive's folder, so the weights file in the folder is the link.
* A version with its own Python code has its own file in its folder, and the link next to the folder, where
  the loaders look for it (`handlers/loading/weights.py`). The first such version has already mapped its
  weights file when a second version is registered. The file that the first version has mapped therefore
  becomes the shared file, and a copy takes its place in the first version's folder. The copy costs disk
  space, and sharing is skipped where the file system is in memory.

Only files that loaders map are considered, and a file is read only if another one has the same size and CRC.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

from torchere.archiver.reader import Archive
from torchere.handlers.built_in import BUILT_IN_HANDLERS
from torchere.handlers.loading.weights import WORTH_MAPPING_BYTES, shared_file

logger = logging.getLogger(__name__)

_COMPARE_BYTES = 256 << 10  # compared at a time, because the comparison holds the GIL
_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The weights of one unpacked archive."""

    path: Path  # in the folder of the unpacked archive
    size: int  # bytes
    crc: int | None  # CRC-32; None: the archive format has none
    own_code: bool  # the archive's own Python code runs, and may write to `path`

    @property
    def shared(self) -> Path:
        """The path of the link, which exists only if `own_code` is true and the weights are shared."""
        return Path(shared_file(str(self.path)))

    def may_equal(self, other: WeightsFile) -> bool:
        """Return whether size and CRC match, so that comparing the contents is worthwhile."""
        crcs = {self.crc, other.crc} - {None}
        return self.size == other.size and len(crcs) <= 1


def weights_file(archive: Archive, directory: Path, handler: str | None) -> WeightsFile | None:
    """Return the weights that were unpacked into `directory`; None if they can't be shared.

    No loader maps them, or they have a second name in the folder (see `Archive.extract`), by which a handler
    could write to the file that is shared.
    """
    name = archive.manifest.serialized_file or ""
    mapped = name.endswith(".pt") or archive.manifest.model_file  # a state dict
    entry = next((entry for entry in archive.entries if entry.name == name), None)
    if entry is None or not mapped or "/" in name or entry.size < WORTH_MAPPING_BYTES:
        return None
    if (directory / name).stat().st_nlink > 1:
        return None
    python = any(entry.name.endswith((".py", ".pyc", ".so")) for entry in archive.entries)
    return WeightsFile(directory / name, entry.size, entry.crc, python or handler not in BUILT_IN_HANDLERS)


class WeightSharing:
    """The weights of all unpacked archives of a store. Thread-safe; blocks on the disk.

    A failure is not an error: the version then maps its own file.
    """

    def __init__(self) -> None:
        self._known: dict[Path, WeightsFile] = {}
        # Guards _known; held while files are compared, so that no file is deleted during the comparison.
        self._lock = threading.Lock()

    def join(self, weights: WeightsFile) -> None:
        """Share the weights of a version that is not loaded yet with a version that has equal weights."""
        with self._lock:
            for other in self._known.values():
                if other.may_equal(weights) and _share(other, weights):
                    logger.info("%s: the memory of its weights is shared with %s", weights.path, other.path)
                    break
            self._known[weights.path.parent] = weights

    def leave(self, directory: Path) -> None:
        """Forget the version unpacked into `directory`, which will be deleted."""
        with self._lock:
            self._known.pop(directory, None)


def _share(held: WeightsFile, new: WeightsFile) -> bool:
    try:
        mapped = held.shared if held.shared.exists() else held.path
        changed_ns = mapped.stat().st_mtime_ns
        if not _same_bytes(mapped, new.path):
            return False
        shielded = _shielded(held) if held.own_code else held.path
        if shielded is None or shielded.stat().st_mtime_ns != changed_ns:  # modified during the comparison
            return False
        _adopt(new, shielded, changed_ns)
    except OSError as err:  # the disk is full, or the file system has no hard links
        logger.info("%s and %s are the same and not shared: %s", held.path, new.path, err)
        return False
    return True


def _same_bytes(one: Path, other: Path) -> bool:
    with one.open("rb") as left, other.open("rb") as right:
        while piece := left.read(_COMPARE_BYTES):
            if piece != right.read(_COMPARE_BYTES):
                return False
        return not right.read(1)


def _shielded(held: WeightsFile) -> Path | None:
    """Return the link to the file that `held` maps, outside its handler's folder, creating it if needed.

    Return None if the copy for the handler would be on an in-memory file system. Running executors keep their
    mapping; new executors use the link.
    """
    link = held.shared
    if link.exists():
        return link
    if is_in_memory(held.path):
        return None
    link.parent.mkdir(exist_ok=True)
    copy = link.with_name("copy")
    try:
        shutil.copyfile(held.path, copy)
        shutil.copystat(held.path, copy)  # an equal mtime shows that the handler has not changed it
        os.link(held.path, link)
        os.replace(copy, held.path)
    except OSError:
        shutil.rmtree(link.parent, ignore_errors=True)  # remove the link: `held.path` may be the same file
        raise
    return link


def _adopt(new: WeightsFile, shielded: Path, changed_ns: int) -> None:
    """Link the file `shielded` to the path from which the loader of `new` maps its weights."""
    link = new.shared
    link.parent.mkdir()
    os.link(shielded, link)
    if new.own_code:
        os.utime(new.path, ns=(changed_ns, changed_ns))
    else:
        os.replace(link, new.path)
        link.parent.rmdir()


def is_in_memory(path: Path) -> bool:
    """Return whether the file is on an in-memory file system; False if unknown."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in _MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    # proc(5): the third field is the device, the first one after a lone "-" is the type of the file system.
    return any(m[2] == wanted and m[m.index("-") + 1] in _MEMORY_FILE_SYSTEMS for m in mounts)
