"""What a registry finds begun when it comes to be: see `preparation.py`, which begins it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from torchere.archiver.reader import Archive
from torchere.serving.errors import ServingError
from torchere.serving.execution.fork_client import Spawned
from torchere.serving.registry.store import Store, StoredArchive


class UnpackedAhead:
    """Unpacks archives of a store, one after the other, before anybody asks for them. Thread-safe.

    In a thread of its own, which lets go of the GIL for nearly all of the work.

    Nothing is reported from here: what can't be unpacked is not there, and whoever registers it is told why.

    Args:
        store: where they are.
        urls: their names in it, in the order in which they will be wanted.
    """

    def __init__(self, store: Store, urls: Sequence[str]) -> None:
        self._store = store
        self._unpacked: dict[str, Future[tuple[Archive, StoredArchive] | None]] = {
            url: Future() for url in urls
        }
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unpack-ahead", daemon=True)
        self._thread.start()

    def take(self, url: str, archive: Archive) -> StoredArchive | None:
        """What was unpacked of `archive`, which is the caller's now; None when it was not, or has changed.

        Waits for one that is being unpacked: call it in a thread.
        """
        unpacked = self._unpacked.pop(url, None)
        found = unpacked.result() if unpacked is not None else None
        if found is None:
            return None
        held, stored = found
        if (held.path, held.manifest, held.entries) == (archive.path, archive.manifest, archive.entries):
            return stored
        self._store.remove(stored)
        return None

    def close(self) -> None:
        """Stop, and delete what nobody took."""
        self._closing.set()
        self._thread.join()
        for unpacked in self._unpacked.values():
            if unpacked.exception() is None and (found := unpacked.result()):
                self._store.remove(found[1])
        self._unpacked.clear()

    def _run(self) -> None:
        for url, unpacked in tuple(self._unpacked.items()):
            try:
                unpacked.set_result(None if self._closing.is_set() else self._unpack(url))
            except BaseException as err:  # the top of a thread: who takes it is told
                unpacked.set_exception(err)

    def _unpack(self, url: str) -> tuple[Archive, StoredArchive] | None:
        try:
            archive = self._store.open(url, trusted=True)
            return archive, self._store.unpack(url, archive)
        except ServingError:
            return None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server's store, what is being unpacked from it, and the fork server if a model will need it.

    Whoever made it ends it, once the registry is closed.
    """

    store: Store
    ahead: UnpackedAhead
    fork_server: Spawned | None = None
