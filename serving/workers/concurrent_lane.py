"""A lane that runs many requests at once, for handlers with `asyncCommunication`.

Contract: each request is a batch of one with its own copy of the context, and the handler's coroutines run on
one event loop, in the main thread of the process. The server sends up to `LoadSpec.at_once` runs, and takes
their reports in any order. As there is only one lane, the cell for a run's begin mark is that of its place.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from torchere.serving.errors import HandlerFailed
from torchere.serving.types import InferResponse
from torchere.serving.workers.executor import BatchReport
from torchere.serving.workers.frames import FrameReader, Parts
from torchere.serving.workers.host import HandlerHost, PartialSink
from torchere.serving.workers.lanes import LanePage, next_run, report_without_room
from torchere.serving.workers.messages import Partial, Run, encode_frame, encode_report
from torchere.serving.workers.plain import line_of

logger = logging.getLogger(__name__)

LOOK_S = 0.05  # polling interval of the page: which requests are cancelled, and whose parts are held back


class LaneOfProcess(Protocol):
    """The part of `Lane` in `process.py` that is used here."""

    data: socket.socket
    batches: FrameReader
    host: HandlerHost

    def send(self, parts: Parts) -> None:
        """Send a message to the server."""

    def take_share(self) -> None:
        """Use as many intra-op threads as the server allows."""


class _Running:
    """One run under way: its task, and the parts of its answer that wait for its client."""

    __slots__ = ("has_begun", "is_cancelled", "place", "run_id", "sending", "task", "waiting")

    def __init__(self, message: Run) -> None:
        self.run_id, self.place = message.run_id, message.place
        self.task: asyncio.Task[None]
        self.waiting: deque[Parts] = deque()
        self.sending = threading.Lock()  # handlers may send parts from their own threads
        self.has_begun = self.is_cancelled = False


class ConcurrentLane:
    """Serves the only lane of a process, which is loaded and warm, until the server or the handler ends it.

    `obey` handles the waiting messages of the control socket; it returns False when the server is gone.
    """

    def __init__(
        self, lane: LaneOfProcess, page: LanePage, control: socket.socket, obey: Callable[[], bool]
    ) -> None:
        self._lane, self._host, self._page, self._control, self._obey = lane, lane.host, page, control, obey
        self._loop = lane.host.loop
        self._runs: set[_Running] = set()
        self._timer: asyncio.TimerHandle | None = None

    def serve(self) -> None:
        """Run the event loop."""
        self._loop.add_reader(self._lane.data, self._take)
        self._loop.add_reader(self._control, self._take_order)
        if self._lane.batches.has_more:
            self._loop.call_soon(self._take)
        self._loop.run_forever()
        for running in self._runs:
            if not running.has_begun:  # `next_run` may have marked it, for its large values
                self._page.mark(running.place, 0, 0.0)

    def _take_order(self) -> None:
        if not self._obey():
            self._loop.stop()

    def _take(self) -> None:
        """Start a task for each run that has arrived; wait for the rest of a frame, which is on its way."""
        while True:
            message = next_run(self._lane.batches, self._page, self._begin)
            if message is None:
                self._loop.stop()
                return
            running = _Running(message)
            running.task = self._loop.create_task(self._run(message, running))
            self._runs.add(running)
            if self._timer is None:
                self._timer = self._loop.call_later(LOOK_S, self._look)
            if not self._lane.batches.has_more:
                return

    def _begin(self, message: Run) -> None:
        self._page.mark(message.place, message.run_id, time.monotonic())

    async def _run(self, message: Run, running: _Running) -> None:
        def send_part(index: int, part: InferResponse) -> None:
            self._begin(message)
            running.waiting.append([encode_frame(Partial(message.run_id, index, part))])
            self._send_waiting(running)

        host = self._host
        if host.end_cause:  # the run has not begun: the server sends it to another worker
            return
        running.has_begun = True
        self._begin(message)
        self._lane.take_share()
        try:
            report = await self._report_of(message, send_part, running)
            with suppress(asyncio.CancelledError):  # the client has left: the run still needs its report
                while running.waiting and not running.is_cancelled:
                    await asyncio.sleep(LOOK_S)  # `_look` sends them when the client has read the others
            self._lane.send(encode_report(message.run_id, report, host.end_cause, self._page.to_server))
        except OSError:  # the server is gone
            self._loop.stop()
        finally:
            self._runs.discard(running)
        if host.end_cause:
            self._loop.stop()

    async def _report_of(self, message: Run, send_part: PartialSink, running: _Running) -> BatchReport:
        if message.large:
            return report_without_room(message)
        request = message.requests[0]
        try:
            return await self._host.run_beside(request, send_part, lambda: running.is_cancelled)
        except Exception as err:  # it would end this task only, and the run would wait for its time-out
            logger.exception("a request failed outside of its handler")
            return BatchReport([HandlerFailed(detail=line_of(err))])

    def _send_waiting(self, running: _Running) -> None:
        """Send the parts that wait, unless the server holds them back."""
        with running.sending:  # held over the whole loop, so that parts stay in order
            while running.waiting and not self._page.is_held(running.place):
                self._lane.send(running.waiting.popleft())

    def _look(self) -> None:
        """Cancel the runs whose client has left, and send the parts that were held back."""
        for running in list(self._runs):
            # A task that is cancelled before its first step never runs, so its run would get no report.
            is_at_work = running.has_begun and not running.is_cancelled
            if is_at_work and self._page.all_cancelled(running.place, 1):
                running.is_cancelled = True
                running.task.cancel()
            try:
                self._send_waiting(running)
            except OSError:  # the server is gone
                self._loop.stop()
        self._timer = self._loop.call_later(LOOK_S, self._look) if self._runs else None
