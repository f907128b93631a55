"""Weights that stay in their archive until the model answers.

Copying them is most of what unpacking a large archive takes: from a tenth of a second for 400 MB to more than
one, where the machine has to find memory for the copy. So the weights of TorchScript are only checked when
their archive is unpacked. The model is loaded on the pages of the archive; a moment later they are copied
into the folder, where all else expects them, and the copy takes the place of the archive in memory.

What makes this safe is the kernel's promise (fcntl(2), F_SETLEASE): whoever opens the archive for writing, or
cuts it short, waits until we let it go, which we do when the copy is made. The kernel gives a lease to the
owner of a file or to root, when nobody has it open for writing, and not on every file system. Without one the
weights are unpacked with the rest.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from torchere.archiver.entries import Entry
from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import Archive
from torchere.archiver.zipcontainer import ZipContainer
from torchere.handlers.weights_place import Place, announce, withdraw
from torchere.serving.registry.remapping import show_file, show_nothing
from torchere.serving.registry.weight_sharing import is_in_memory, weights_file

if TYPE_CHECKING:  # a server opens archives before it has imported torch
    import torch

logger = logging.getLogger(__name__)

_WORTH_LEAVING_BYTES = 32 << 20  # copied in about a hundredth of a second
# A slow disk takes this much within the 45 seconds for which the kernel lets those wait who want to write
# (/proc/sys/fs/lease-break-time). Then it lets them.
_MOST_BYTES = 4 << 30
_COPIED_BYTES = 8 << 20  # at a time
_FIRST_ANSWERS_S = 0.5  # between loading and copying: they have the cores to themselves
_LOADED_WITHIN_S = 10.0  # what is not loaded by then is copied without waiting for that


class LeasedWeights:
    """`LateWeights` of one unpacked archive; it takes over `archive`, an open file with a lease.

    Thread-safe. Announced, and on their way, from `begin` on.

    Args:
        archive: where the weights are.
        entry: where they are in it.
        part: an empty file with room for them.
        path: what it is called when it is written, on the same file system.
    """

    def __init__(self, archive: BinaryIO, entry: Entry, part: Path, path: Path) -> None:
        self.size = entry.size
        self.name = entry.name
        self._archive = archive
        self._offset = entry.offset or 0
        self._part = part
        self._path = path
        self._kept: list[torch.UntypedStorage] = []
        self._then: list[Callable[[], None]] = []
        self._hurry = self._written = False
        self._error: OSError | None = None  # why it is not written
        self._changed = threading.Condition()  # guards all of these
        self._exchange = threading.Lock()  # held while somebody maps the archive, or has it exchanged
        self._thread = threading.Thread(target=self._run, name="copy-weights", daemon=True)

    def begin(self) -> None:
        """Let loaders know."""
        announce(str(self._path), self)
        self._thread.start()

    @contextmanager
    def lent(self) -> Iterator[Place | None]:
        """See `LateWeights.lent`."""
        with self._exchange:
            here = None if self._archive.closed else f"/proc/self/fd/{self._archive.fileno()}"
            yield Place(here, self._offset, self.size, self._keep) if here else None

    def wait(self) -> None:
        """See `LateWeights.wait`."""
        with self._changed:
            self._be_quick()
            self._changed.wait_for(lambda: self._written or self._error)
            if self._error and not self._written:
                raise self._error

    def when_written(self, then: Callable[[], None]) -> None:
        """Call `then` in some thread when the file is there, before it is mapped; at once when it is."""
        with self._changed:
            if not self._written:
                self._then.append(then)
                return
        then()

    def close(self) -> None:
        """Give up what nobody has mapped; what somebody has is finished first, as it may be in use."""
        with self._exchange, self._changed:  # whoever is loading has told by then
            if not self._kept:
                self._error = OSError(f"{self._path} was given up before it was written")
            self._be_quick()
        if self._thread.ident is not None:
            self._thread.join()
        withdraw(str(self._path))
        self._archive.close()

    def _be_quick(self) -> None:
        self._hurry = True
        self._changed.notify_all()

    def _keep(self, storage: torch.UntypedStorage) -> None:
        with self._changed:
            self._kept.append(storage)
            self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._kept or self._hurry, _LOADED_WITHIN_S)
            self._changed.wait_for(lambda: self._hurry, _FIRST_ANSWERS_S)
        try:
            if self._copied():
                self._put_in_place()
        except OSError as err:
            # Executors go on with the archive, as long as the lease lasts: until the version is removed.
            logger.error("the weights of %s can't be unpacked: %s", self._path, err)
            with self._changed:
                self._error = err
                self._changed.notify_all()

    def _copied(self) -> bool:
        """Copy the weights; False when they were given up."""
        with self._part.open("r+b") as part:
            done = 0
            while done < self.size:
                if self._error:
                    return False
                at_once = min(_COPIED_BYTES, self.size - done)
                done += os.sendfile(part.fileno(), self._archive.fileno(), self._offset + done, at_once)
        return True

    def _put_in_place(self) -> None:
        self._part.replace(self._path)
        with self._changed:
            self._written = True
            self._changed.notify_all()
        for then in self._then:
            then()
        with self._exchange:
            for storage in self._kept:
                self._show_copy(storage.data_ptr())
            self._kept.clear()
            self._archive.close()

    def _show_copy(self, mapped: int) -> None:
        with self._path.open("rb") as file:
            show_file(mapped + self._offset, self.size, file.fileno())
        show_nothing(mapped, self._offset)


def lease_weights(archive: Archive, directory: Path) -> LeasedWeights | None:
    """Lease an archive whose weights may stay in it for now; None when they are to be unpacked.

    Args:
        archive: from `open_archive`.
        directory: where all else of it will be unpacked, in a folder that exists.

    Raises:
        OSError: there is no room for the weights.
    """
    entry = _entry_to_leave(archive, directory)
    if entry is None or not isinstance(archive.container, ZipContainer):
        return None
    file = archive.container.reopened()
    try:
        if not _lease(file):
            file.close()
            return None
        part = directory.with_name("weights.part")
        with part.open("xb") as empty:
            os.posix_fallocate(empty.fileno(), 0, entry.size)
    except BaseException:
        file.close()
        raise
    return LeasedWeights(file, entry, part, directory / entry.name)


def _entry_to_leave(archive: Archive, directory: Path) -> Entry | None:
    """The weights of TorchScript that a handler of ours loads, if they can be mapped where they are."""
    weights = weights_file(archive, directory, archive.manifest.handler)
    if weights is None or weights.own_code or archive.manifest.model_file:
        return None
    with suppress(ArchiveError):
        entry = archive.entry(weights.path.name)
        mappable = entry.method == "stored" and entry.offset is not None and entry.offset % mmap.PAGESIZE == 0
        if mappable and _WORTH_LEAVING_BYTES <= entry.size <= _MOST_BYTES:
            return None if is_in_memory(directory.parent) else entry
    return None


def _lease(file: BinaryIO) -> bool:
    """Whether the kernel promises to make those wait who want to write to the file, until it is closed."""
    try:
        # It tells when somebody waits, which needs no answer: the copy will be made soon. Its own signal for
        # that, SIGIO, would end the process; this one is ignored by those who do not handle it.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except (OSError, AttributeError) as err:  # not ours, in use, or a system without leases
        logger.debug("no lease on %s: %s", file.name, err)
        return False
    return True
