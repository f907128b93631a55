"""Noticing that a client went away while its request waits, without a price for fast requests.

A request that is answered within one sweep costs two dictionary operations. Only those that wait longer
get a task that listens for the end of their connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.types import Receive

from torchere.serving.frontend.rest.body import ClientGone

SWEEP_S = 0.01  # a request is watched when it is between one and two of these old


class Watched:
    """One request that is waiting; `gone` tells that its client closed the connection."""

    __slots__ = ("gone", "listener", "receive", "task")

    def __init__(self, task: asyncio.Task[object], receive: Receive) -> None:
        self.task = task
        self.receive = receive
        self.gone = False
        self.listener: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Cancel the request's task when its client goes away. The body must have been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.task.cancel()


class DisconnectWatch:
    """Watches the requests of one event loop; not thread-safe.

    Between `enter` and `leave` the task of the request is cancelled if its client goes away.
    """

    def __init__(self) -> None:
        self._young: dict[int, Watched] = {}
        self._old: dict[int, Watched] = {}
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, receive: Receive) -> Watched:
        """Begin to watch the current task's request."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is watched in its own task: call this in a coroutine of one")
        watched = Watched(task, receive)
        self._young[id(watched)] = watched
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        return watched

    def leave(self, watched: Watched) -> None:
        """Stop watching; call it whatever became of the request."""
        key = id(watched)
        if self._young.pop(key, None) is None and self._old.pop(key, None) is None:
            listener, watched.listener = watched.listener, None
            if listener is not None:
                listener.cancel()

    @contextlib.contextmanager
    def watching(self, receive: Receive) -> Iterator[None]:
        """Watch the current task's request within the block.

        Raises:
            ClientGone: in place of the cancellation, when the client went away.
        """
        watched = self.enter(receive)
        try:
            yield
        except asyncio.CancelledError:
            if not watched.gone:
                raise
            _absorb_cancellation(watched.task)
            raise ClientGone from None
        finally:
            self.leave(watched)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for watched in self._old.values():
            watched.listener = loop.create_task(watched.listen())
        self._old, self._young = self._young, {}
        # The sweep stops when nothing waits: an idle server has no timer.
        self._timer = loop.call_later(SWEEP_S, self._sweep) if self._old else None


def _absorb_cancellation(task: asyncio.Task[object]) -> None:
    # From Python 3.11 a task counts its cancellations, and one that was dealt with must be taken back.
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()
