"""Lines of the access log, many in one write, away from the event loop.

Through Python's logging a line costs a fifth of what answering a small request costs: a record, a walk
through the handlers, a format, and a write each. So the loop makes the line's text itself, which takes it a
few microseconds, and a thread hands what came in a tenth of a second to the output at once. The thread needs
the GIL as little as can be: each time it asks for it the loop stands still. An output that stands still holds
up that thread and nobody else: what does not fit is dropped, counted, and said when there is an output again.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from torchere.serving.logs.fields import LoggedPrediction, ModelVersion, log_fields

if TYPE_CHECKING:
    from torchere.serving.logs.trace_context import TraceContext

FLUSH_S = 0.1  # how long a line may wait, and what a crash may cost
MAX_WAITING = 100_000  # lines; some 30 MB
_CHUNK = 1000  # lines in one write

Client = str | tuple[object, ...] | None  # what names the peer: text, host and port, nothing (a Unix socket)
logger = logging.getLogger(__name__)


class AccessLine(NamedTuple):
    """One answered request."""

    created_s: float  # seconds since the epoch
    client: Client
    request_line: str | bytes  # what stands between the quotes
    status: int  # the HTTP status, or the number of the gRPC code
    elapsed_ms: int
    request_id: str = ""
    trace: TraceContext | None = None
    version: ModelVersion | None = None  # of the version that a prediction was for

    @property
    def ids(self) -> dict[str, str]:
        """The fields that JSON lines have besides, as far as they are known."""
        return log_fields(self.request_id, self.trace, self.version)

    @property
    def asked(self) -> str:
        """The part of the message that a connection's requests have in common: its peer, and the line."""
        return _asked(self.client, self.request_line)

    @property
    def message(self) -> str:
        """TorchServe's form of it, as the client wrote it: not escaped."""
        return f"{self.asked} {self.status} {self.elapsed_ms}"


@lru_cache(maxsize=512)
def _asked(client: Client, request_line: str | bytes) -> str:
    peer = client if isinstance(client, str) else "{}:{}".format(*(client or ("unix", 0)))
    text = request_line if isinstance(request_line, str) else request_line.decode("latin-1")
    return f'/{peer} "{text}"'


class LineFormatter(logging.Formatter, ABC):
    """A form of log lines that has one for the access log's, too."""

    @abstractmethod
    def format_access(self, line: AccessLine) -> str:
        """The line, without its end; on one line, whatever the client wrote."""


@runtime_checkable
class TakesAccessLines(Protocol):
    """A logging handler that writes many lines at once."""

    def access_text(self, line: AccessLine) -> str:
        """The text of a line with its end, "" when it does not go there; on the event loop."""

    def write_access(self, text: str, lines: int) -> None:
        """Write the text of so many lines, in any thread."""


class _Output:
    """One handler, and the text that waits for it. The loop appends, the writer takes from the front."""

    __slots__ = ("handler", "texts")

    def __init__(self, handler: TakesAccessLines) -> None:
        self.handler = handler
        self.texts: list[str] = []

    def write(self) -> None:
        """Write what waits. Each step on the list is one under the GIL, so no lock keeps the loop waiting."""
        while texts := self.texts[:_CHUNK]:
            del self.texts[: len(texts)]
            self.handler.write_access("".join(texts), len(texts))


class AccessLog:
    """Writes the lines of one logger. `add` belongs to the event loop, the rest to any thread.

    Lines go through logging as ever while one of the handlers that would get them can't take many at once.
    """

    def __init__(self, logger: logging.Logger, flush_s: float = FLUSH_S, limit: int = MAX_WAITING) -> None:
        self.logger = logger
        self.dropped = 0
        self._said = 0  # of them
        self._flush_s = flush_s
        self._limit = limit
        self._outputs: list[_Output] | None = []  # None: one of them takes single lines only
        self._is_noted = False  # the thread knows that something waits
        self._lock = threading.Lock()  # held while lines are written, so that they stay in order
        self._writer: _Writer | None = None

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
        prediction: LoggedPrediction | None = None,
        request_id: str = "",
    ) -> None:
        """Note one answered request.

        Args:
            client: its peer.
            request_line: what stands between the quotes.
            status: what the client was told: the HTTP status, or the number of the gRPC code.
            started_s: when it came in, in monotonic seconds.
            prediction: what it asked for, when it is one: its ids are in the JSON line.
            request_id: the id that a request has without one.
        """
        elapsed_ms = round((time.monotonic() - started_s) * 1000)
        trace = version = None
        if prediction is not None:
            request_id, trace, version = prediction.request_id, prediction.trace, prediction.meter
        line = AccessLine(time.time(), client, request_line, status, elapsed_ms, request_id, trace, version)
        if not self._is_noted:
            self._outputs = self._find_outputs()
        if self._outputs is None:
            self.logger.info("%s", line.message, extra=line.ids)
            return
        self._put_down(line, self._outputs)
        if not self._is_noted:
            self._is_noted = True
            self._wake()

    def _put_down(self, line: AccessLine, outputs: list[_Output]) -> None:
        for output in outputs:
            if len(output.texts) >= self._limit:
                self.dropped += 1
                return
        for output in outputs:
            if text := output.handler.access_text(line):
                output.texts.append(text)

    def flush(self) -> None:
        """Write what waits, now and in this thread."""
        with self._lock:
            outputs = self._outputs or ()
            self._is_noted = False  # a line that comes from now on wakes the thread again
            for output in outputs:
                output.write()
        if self.dropped > self._said:
            lost, self._said = self.dropped - self._said, self.dropped
            logger.warning("%d lines of the access log are lost: nobody took them in time", lost)

    def close(self) -> None:
        """Write what waits, and end the thread; a line that comes later begins a new one."""
        if self._writer is not None:
            atexit.unregister(self.close)  # before a line that comes meanwhile begins the next thread
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        self.flush()

    def _find_outputs(self) -> list[_Output] | None:
        """The outputs as they are now; who is one still keeps what waits for it."""
        known = {output.handler: output for output in self._outputs or ()}
        found = []
        for handler in _handlers(self.logger):
            if not isinstance(handler, TakesAccessLines):
                return None
            found.append(known.get(handler) or _Output(handler))
        return found

    def _wake(self) -> None:
        writer = self._writer
        if writer is None:
            self._writer = writer = _Writer(self.flush, self._flush_s)
            atexit.register(self.close)
        writer.wake()  # one that is being closed leaves it to `close`


class _Writer:
    """The thread that flushes a while after it is woken, until it is closed. It begins at once."""

    def __init__(self, flush: Callable[[], None], wait_s: float) -> None:
        self._flush = flush
        self._wait_s = wait_s
        self._awake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something waits to be written."""
        self._awake.set()

    def close(self) -> None:
        """End the thread, which may leave something unwritten."""
        self._closing.set()
        self._awake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._awake.wait()
            self._awake.clear()
            self._closing.wait(self._wait_s)  # more may come
            self._flush()


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """All handlers that a line of a logger goes to."""
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None
