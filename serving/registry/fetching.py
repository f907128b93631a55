"""Downloads in their own bounded thread pool; a download ends when its caller is cancelled.

A download may take minutes. In the default thread pool a few slow downloads would block metrics, registration
from the store, and predictions whose bodies are decompressed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchere.serving.errors import DownloadFailed, Unavailable
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
    """The claim of a registration, a version or a workflow on its archive: a download goes with the last."""

    path: Path  # of the archive, in the store of models or that of workflows
    copy: Path | None = None  # the same, if it is a download that this claim has to delete


def give_up(claim: Claim, claims: set[Claim]) -> Path | None:
    """End a claim; return its download, unless another of the claims on that file takes it over."""
    claims.discard(claim)
    heir = next((other for other in claims if other.path == claim.copy), None)
    if heir is None:
        return claim.copy
    heir.copy = claim.copy
    return None


def _stopping() -> Unavailable:
    return Unavailable("The server is stopping.")
