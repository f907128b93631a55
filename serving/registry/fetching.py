"""Downloads beside everything else the server has threads for: few at once, and ended when nobody waits.

They may take minutes each. In the threads that all rooms share, a handful of slow ones would hold up metrics,
registering from the store, and predictions whose bodies are unpacked there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from torchere.serving.errors import DownloadFailed, Unavailable
from torchere.serving.registry.version import Version
from torchere.serving.store.fetch import Download, Interrupt, Turns
from torchere.serving.store.package import Store
from torchere.serving.store.url_rules import is_remote

AT_ONCE = 4
MAX_WAITING = 60


class Fetching:
    """Fetches archives into the store of one server. Lives on the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turns = Turns("downloads", AT_ONCE, MAX_WAITING)
        self._threads = ThreadPoolExecutor(AT_ONCE, "download")
        self._under_way: set[Interrupt] = set()
        self._closed = False

    async def fetch(self, url: str, reuse: bool) -> Download | None:
        """The copy in the store of what is at a URL; None when it is no URL. See `Store.download`.

        Cancelled, it ends the download, and what may be there all the same is deleted.

        Raises:
            Unavailable: too many downloads wait already.
        """
        if not is_remote(url):
            return None
        interrupt = Interrupt()
        # Its place is taken until the thread is through: one that asks for an address can't be interrupted.
        job = asyncio.ensure_future(self._in_turn(url, reuse, interrupt))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            interrupt.stop()
            if interrupt not in self._under_way:
                job.cancel()
            job.add_done_callback(_undo)
            raise

    async def _in_turn(self, url: str, reuse: bool, interrupt: Interrupt) -> Download:
        async with self._turns.take():
            if self._closed:
                raise _stopping()
            self._under_way.add(interrupt)
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._threads, self._store.download, url, reuse, interrupt)
            except DownloadFailed:
                if self._closed:
                    raise _stopping() from None
                raise
            finally:
                self._under_way.discard(interrupt)

    def close(self) -> None:
        """End what is under way, and begin nothing more: whoever waits gets `Unavailable`."""
        self._closed = True
        for interrupt in self._under_way:
            interrupt.stop()
        self._threads.shutdown(wait=False)


def delete(downloaded: Download | None) -> None:
    """Take the copy out of the store again, if it is ours."""
    if downloaded and downloaded.is_new:
        downloaded.path.unlink(missing_ok=True)


def hand_over(gone: Version, others: Iterable[Version]) -> bool:
    """Leave the copy that was fetched for a version to one that was registered from it by its name.

    False: there is none, and nobody needs the copy any more.
    """
    copy = gone.origin.archive.downloaded
    if copy is None:
        return False
    for other in others:
        archive = other.origin.archive
        if archive.file_name == copy.name and not archive.outside_store:
            other.origin = replace(other.origin, archive=replace(archive, downloaded=copy))
            return True
    return False


def _stopping() -> Unavailable:
    return Unavailable("The server is stopping.")


def _undo(download: asyncio.Future[Download]) -> None:
    if not download.cancelled() and download.exception() is None:
        delete(download.result())
