"""The access log, whose lines a thread writes in batches, and the ids that log lines have as fields.

Python's logging would spend a fifth of the time of a small request on its line: it creates a record, calls
each handler, formats and writes. Here the event loop only formats the line, which takes a few microseconds,
and a thread writes the lines together, every tenth of a second. It takes the GIL this rarely because the
event loop is blocked each time. A blocked output delays only that thread: lines beyond the limit are dropped,
counted, and reported when the output accepts lines again.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torchere.serving.logs.trace_context import TraceContext

ACCESS_LOGGER = "ACCESS_LOG"
FLUSH_S = 0.1  # longest wait of a line; a crash may lose the lines of that time
MAX_WAITING = 100_000  # lines, about 30 MB
_CHUNK = 1000  # lines in one write

Client = str | tuple[object, ...] | None  # an address: text, or host and port; None: a Unix socket
logger = logging.getLogger(__name__)


class ModelVersion(Protocol):
    """The names of a version that log lines contain."""

    model: str
    version: str


class LoggedPrediction(Protocol):
    """The parts of a prediction that log lines contain; `batching/request.py` implements it."""

    request_id: str
    trace: TraceContext | None

    @property
    def meter(self) -> ModelVersion | None:
        """The version that the request is for; None: no version was found."""


def log_fields(
    request_id: str, trace: TraceContext | None = None, version: ModelVersion | None = None
) -> dict[str, str]:
    """Return the known fields of a request, for `extra=`."""
    fields = {"request_id": request_id} if request_id else {}
    if trace is not None:
        fields["trace_id"] = trace.trace_id
    if version is not None:
        fields |= {"model": version.model, "version": version.version}
    return fields


def fields_of(request_id: str, prediction: LoggedPrediction | None) -> dict[str, str]:
    """Return `log_fields` of a request; `prediction` is None for requests other than predictions."""
    if prediction is None:
        return log_fields(request_id)
    return log_fields(request_id, prediction.trace, prediction.meter)


class AccessLine(NamedTuple):
    """One answered request."""

    created_s: float  # seconds since the epoch
    client: Client
    request_line: str | bytes  # the quoted part of the message
    status: int  # the HTTP status, or the gRPC status code as a number
    elapsed_ms: int
    request_id: str = ""
    trace: TraceContext | None = None
    version: ModelVersion | None = None  # the version that a prediction was sent to, if known

    @property
    def ids(self) -> dict[str, str]:
        """The additional fields of a JSON line; unknown ones are left out."""
        return log_fields(self.request_id, self.trace, self.version)

    @property
    def asked(self) -> str:
        """The start of the message: client address and request line.

        It is the same for identical requests on one connection.
        """
        return _asked(self.client, self.request_line)

    @property
    def message(self) -> str:
        """The message in TorchServe's format; the client's text is not escaped."""
        return f"{self.asked} {self.status} {self.elapsed_ms}"


@lru_cache(maxsize=512)
def _asked(client: Client, request_line: str | bytes) -> str:
    peer = client if isinstance(client, str) else "{}:{}".format(*(client or ("unix", 0)))
    text = request_line if isinstance(request_line, str) else request_line.decode("latin-1")
    return f'/{peer} "{text}"'


class LineFormatter(logging.Formatter, ABC):
    """A formatter of log records that also formats lines of the access log."""

    @abstractmethod
    def format_access(self, line: AccessLine) -> str:
        """Return the line without its line end; line breaks in the client's text must be escaped."""


class TakesAccessLines(logging.Handler):
    """A logging handler that can write many access-log lines at once; this one writes none."""

    def access_text(self, line: AccessLine) -> str:
        """Return the text of a line with its line end, or "" if this handler does not write access-log lines.

        Called on the event loop.
        """
        return ""

    def write_access(self, text: str, lines: int) -> None:
        """Write `text`, which holds `lines` lines. Called in any thread."""


@dataclass(slots=True)
class _Output:
    """One handler and its queue of text. The event loop appends; the writer thread removes from the front."""

    handler: TakesAccessLines
    texts: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Write the queued text. List operations are atomic under the GIL, so the loop waits for no lock."""
        while texts := self.texts[:_CHUNK]:
            del self.texts[: len(texts)]
            self.handler.write_access("".join(texts), len(texts))


class AccessLog:
    """Writes the lines of one logger. Call `add` on the event loop, the other methods in any thread.

    If one of the logger's handlers can't write many lines at once, all lines go through Python's logging.
    """

    def __init__(self, logger: logging.Logger, flush_s: float = FLUSH_S, limit: int = MAX_WAITING) -> None:
        self.logger = logger
        self.dropped = 0
        self._said = 0  # dropped lines that have been reported
        self._flush_s = flush_s
        self._limit = limit
        self._outputs: list[_Output] | None = []  # None: one of the handlers writes single lines only
        self._is_noted = False  # the thread has been woken for the queued lines
        # Held while lines are written, so that they stay in order; a handler that fails may log something.
        self._lock = threading.RLock()
        self._writer: _Writer | None = None

    @property
    def enabled(self) -> bool:
        """Whether lines are logged at all; check it before `add`."""
        return self.logger.isEnabledFor(logging.INFO)

    @property
    def waits(self) -> bool:
        """Whether lines are queued."""
        return self._is_noted

    def add(
        self,
        client: Client,
        request_line: str | bytes,
        status: int,
        started_s: float,
        *,
        prediction: LoggedPrediction | None = None,
        request_id: str = "",
        trace: TraceContext | None = None,
    ) -> None:
        """Log one answered request: see `AccessLine`.

        `started_s` is when it arrived, in monotonic seconds. `request_id` and `trace` are those of a request
        that is not a prediction.
        """
        elapsed_ms = round((time.monotonic() - started_s) * 1000)
        version = None
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
            if not self._wake():
                self._is_noted = False  # the next line tries again

    def _put_down(self, line: AccessLine, outputs: list[_Output]) -> None:
        for output in outputs:
            if len(output.texts) >= self._limit:
                self.dropped += 1
                return
        for output in outputs:
            if text := output.handler.access_text(line):
                output.texts.append(text)

    def flush(self) -> None:
        """Write the queued lines now, in the calling thread."""
        with self._lock:
            outputs = self._outputs or ()
            self._is_noted = False  # the next line wakes the thread again
            for output in outputs:
                output.write()
        if self.dropped > self._said:
            lost, self._said = self.dropped - self._said, self.dropped
            logger.warning("%d lines of the access log are lost: the output did not take them in time", lost)

    def close(self) -> None:
        """Write the queued lines and end the thread; a later line starts a new thread."""
        if self._writer is not None:
            atexit.unregister(self.close)  # a line that is added from now on may start a new thread
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        self.flush()

    def _find_outputs(self) -> list[_Output] | None:
        """Return an output for each current handler; the queued text of a known handler is kept."""
        known = {output.handler: output for output in self._outputs or ()}
        found = []
        for handler in _handlers(self.logger):
            if not isinstance(handler, TakesAccessLines):
                return None
            found.append(known.get(handler) or _Output(handler))
        return found

    def _wake(self) -> bool:
        """Wake the thread, which starts with the first line; return whether there is one."""
        writer = self._writer
        if writer is None:
            try:
                self._writer = writer = _Writer(self.flush, self._flush_s)
            except RuntimeError:  # no thread can start now; the request is answered all the same
                return False
            atexit.register(self.close)
        writer.wake()  # if the writer is closing, `close` writes the line
        return True


class _Writer:
    """A thread that calls `flush` `wait_s` seconds after `wake`, until it is closed. Starts immediately."""

    def __init__(self, flush: Callable[[], None], wait_s: float) -> None:
        self._flush = flush
        self._wait_s = wait_s
        self._awake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that lines are queued."""
        self._awake.set()

    def close(self) -> None:
        """End the thread; queued lines may be left unwritten."""
        self._closing.set()
        self._awake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._awake.wait()
            self._awake.clear()
            self._closing.wait(self._wait_s)  # collects more lines
            self._flush()


def _handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    """Yield all handlers that receive the records of a logger."""
    current: logging.Logger | None = logger
    while current is not None:
        yield from current.handlers
        current = current.parent if current.propagate else None


# The access log of this process: one line per request, for both protocols, in TorchServe's format.
access_log = AccessLog(logging.getLogger(ACCESS_LOGGER))
