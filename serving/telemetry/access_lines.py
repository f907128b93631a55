"""Lines of the access log, many in one write, away from the event loop.

Through Python's logging a line costs a fifth of what answering a small request costs: a record, a walk
through the handlers, a format, and a write each. So the loop only puts down what happened, and a thread makes
it lines a tenth of a second later. An output that stands still holds up that thread and nobody else: what
does not fit is dropped, and counted.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torchere.serving.telemetry.timeline import log_fields

if TYPE_CHECKING:
    from torchere.serving.telemetry.timeline import Timeline
    from torchere.serving.telemetry.trace_context import TraceContext
    from torchere.serving.telemetry.version_meter import VersionMeter

FLUSH_S = 0.1  # how long a line may wait, and what a crash may cost
MAX_WAITING = 100_000  # lines; some 30 MB
_CHUNK = 1000  # lines in one write

Client = str | Sequence[object] | None  # what names the peer: text, host and port, or nothing (a Unix socket)


class AccessLine(NamedTuple):
    """One answered request."""

    created_s: float  # seconds since the epoch
    client: Client
    request_line: str | bytes  # what stands between the quotes
    status: int  # the HTTP status, or the number of the gRPC code
    elapsed_ms: int
    request_id: str = ""
    trace: TraceContext | None = None
    meter: VersionMeter | None = None  # of the version that a prediction was for

    @property
    def ids(self) -> dict[str, str]:
        """The fields that JSON lines have besides, as far as they are known."""
        return log_fields(self.request_id, self.trace, self.meter)

    @property
    def message(self) -> str:
        """TorchServe's form of it, as the client wrote it: not escaped."""
        client, line = self.client, self.request_line
        peer = client if isinstance(client, str) else "{}:{}".format(*(client or ("unix", 0)))
        text = line if isinstance(line, str) else line.decode("latin-1")
        return f'/{peer} "{text}" {self.status} {self.elapsed_ms}'


class LineFormatter(logging.Formatter, ABC):
    """A form of log lines that has one for the access log's, too."""

    @abstractmethod
    def format_access(self, line: AccessLine) -> str:
        """The line, without its end; on one line, whatever the client wrote."""


@runtime_checkable
class TakesAccessLines(Protocol):
    """A logging handler that writes many lines at once."""

    def write_access(self, lines: Sequence[AccessLine]) -> None:
        """Write them, in any thread."""


class AccessLog:
    """Writes the lines of one logger. `add` belongs to the event loop, the rest to any thread.

    Lines go through logging as ever while one of the handlers that would get them can't take many at once.
    """

    def __init__(self, logger: logging.Logger, flush_s: float = FLUSH_S, limit: int = MAX_WAITING) -> None:
        self.logger = logger
        self.dropped = 0
        self._flush_s = flush_s
        self._limit = limit
        self._waiting: deque[AccessLine] = deque()
        self._awake = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()  # held while lines are written, so that they stay in order
        self._thread: threading.Thread | None = None

    @property
    def enabled(self) -> bool:
        """Whether lines are wanted at all; ask before `add`."""
        return self.logger.isEnabledFor(logging.INFO)

    def add(
        self,
        client: Client,
        request_line: str | bytes,
        status: int,
        started_s: float,
        *,
        timeline: Timeline | None = None,
        request_id: str = "",
    ) -> None:
        """Note one answered request.

        Args:
            client: its peer.
            request_line: what stands between the quotes.
            status: what the client was told: the HTTP status, or the number of the gRPC code.
            started_s: when it came in, in monotonic seconds.
            timeline: of its prediction, when it is one: its ids are in the JSON line.
            request_id: the id that a request has without one.
        """
        elapsed_ms = round((time.monotonic() - started_s) * 1000)
        trace = meter = None
        if timeline is not None:
            request_id, trace, meter = timeline.request_id, timeline.trace, timeline.meter
        line = AccessLine(time.time(), client, request_line, status, elapsed_ms, request_id, trace, meter)
        waiting = self._waiting
        if not waiting and not self._batched():
            self.logger.info("%s", line.message, extra=line.ids)
            return
        if len(waiting) >= self._limit:
            self.dropped += 1
            return
        waiting.append(line)
        if len(waiting) == 1:
            self._wake()

    def flush(self) -> None:
        """Write what waits, now and in this thread."""
        with self._lock:
            while chunk := self._chunk():
                for handler in _handlers(self.logger):
                    if isinstance(handler, TakesAccessLines):
                        handler.write_access(chunk)

    def close(self) -> None:
        """Write what waits, and end the thread; a line that comes later begins a new one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._closing.set()
            self._awake.set()
            thread.join()
            self._closing.clear()
            atexit.unregister(self.close)
        self.flush()

    def _batched(self) -> bool:
        return all(isinstance(handler, TakesAccessLines) for handler in _handlers(self.logger))

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._awake.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._awake.wait()
            self._awake.clear()
            self._closing.wait(self._flush_s)  # more may come
            self.flush()

    def _chunk(self) -> list[AccessLine]:
        chunk: list[AccessLine] = []
        while self._waiting and len(chunk) < _CHUNK:
            chunk.append(self._waiting.popleft())
        return chunk


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """All handlers that a line of a logger goes to."""
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None
