"""Downloads in their own bounded thread pool; a download ends when its caller is cancelled.

A download may take minutes. In the default thread pool a few slow downloads would block metrics, registration
from the store, and predictions whose bodies are decompressed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torchere.serving.errors import DownloadFailed, Unavailable
from torchere.serving.registry.version import Version
from torchere.serving.store.fetch import Download, Interrupt
from torchere.serving.store.package import Store
from torchere.serving.store.turns import Turns
from torchere.serving.store.url_rules import is_remote

AT_ONCE = 4
MAX_WAITING = 60


class Fetching:
    """Fetches archives into the store of one server. Used on the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turns = Turns("downloads", AT_ONCE, MAX_WAITING)
        self._threads = ThreadPoolExecutor(AT_ONCE, "download")
        self._under_way: set[Interrupt] = set()
        self._closed = False

    async def fetch(
        self, url: str, by_operator: bool, *, signs: bool = False, reuses: bool = False
    ) -> Download | None:
        """Download a URL into the store; return None when `url` is not a URL. See `Store.download`.

        Cancellation interrupts the download and deletes a copy that is completed anyway.

        Raises:
            Unavailable: too many downloads are queued.
        """
        if not is_remote(url):
            return None
        interrupt = Interrupt()
        download = partial(self._store.download, url, by_operator, interrupt, signs=signs, reuses=reuses)
        # The slot stays taken until the thread returns: a DNS lookup can't be interrupted.
        job = asyncio.ensure_future(self._in_turn(download, interrupt))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            interrupt.stop()
            if interrupt not in self._under_way:
                job.cancel()
            job.add_done_callback(self._undo)
            raise

    async def _in_turn(self, download: Callable[[], Download], interrupt: Interrupt) -> Download:
        async with self._turns.take():
            if self._closed:
                raise _stopping()
            self._under_way.add(interrupt)
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._threads, download)
            except DownloadFailed:
                if self._closed:
                    raise _stopping() from None
                raise
            finally:
                self._under_way.discard(interrupt)

    def _undo(self, download: asyncio.Future[Download]) -> None:
        if not download.cancelled() and download.exception() is None and download.result().is_new:
            self._store.delete(download.result().path)

    def close(self) -> None:
        """Interrupt running downloads and start no more; waiting callers get `Unavailable`."""
        self._closed = True
        for interrupt in self._under_way:
            interrupt.stop()
        self._threads.shutdown(wait=False)


@dataclass(slots=True, eq=False)
class Claim:
    """Lets a registration under way, or a workflow, take over a file that was downloaded for another."""

    path: Path  # of its archive, in the store of models or that of workflows
    copy: Path | None = None  # the download that it has taken over


def hand_over(copy: Path, versions: Iterable[Version], claims: Iterable[Claim]) -> bool:
    """Transfer a downloaded copy to another version, or claim, that uses the same file by its name.

    Return False when there is none. `versions` are those whose store holds the copy.
    """
    for version in versions:
        archive = version.origin.archive
        if archive.file_name == copy.name and not archive.outside_store:
            take_over(version, copy)
            return True
    for claim in claims:
        if claim.path == copy:
            claim.copy = copy
            return True
    return False


def take_over(version: Version, copy: Path) -> None:
    """Make a version the owner of a downloaded copy, which is deleted with its last owner."""
    version.origin = replace(version.origin, archive=replace(version.origin.archive, downloaded=copy))


def _stopping() -> Unavailable:
    return Unavailable("The server is stopping.")
