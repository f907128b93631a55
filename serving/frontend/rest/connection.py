"""One HTTP/1.1 connection: reads one request after the other, hands its body on, and enforces the time-outs.

A client may send requests without waiting for answers. Bytes behind a request wait here until that one is
answered, and more than a little of them in the socket: parsed, each request would hold kilobytes, and a
mistake in one of them would be answered in the midst of the answer before.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any

from torchere.serving.errors import OverBudget
from torchere.serving.frontend.budgets import BudgetExceeded, ConnectionBudget
from torchere.serving.frontend.rest.asgi import AppExchange
from torchere.serving.frontend.rest.bodies import BadBody, Chunks
from torchere.serving.frontend.rest.errors import INVALID_HTTP, OVER_BUDGET, STALLED_BODY, LastWords
from torchere.serving.frontend.rest.heads import CHUNKED, HEAD_END, MAX_KNOWN_BYTES, BadHead, Head, HeadReader
from torchere.serving.frontend.rest.predictions import Prediction
from torchere.serving.frontend.rest.tensors import TensorPrediction
from torchere.serving.frontend.unread import Unread, untaken_bytes
from torchere.serving.io.silence import Silence
from torchere.serving.io.turn_writes import write_together

if TYPE_CHECKING:
    from torchere.serving.frontend.rest.exchange import Exchange
    from torchere.serving.frontend.rest.listener import Listener

DRAIN_LINGER_S = 0.25  # of idle connections after the end of the listener: many round trips in a data centre
UNREAD_LINGER_S = 2.0  # how long a refused body is still read, so that the client gets to see the refusal
HEAD_TIMEOUT_S = 60.0  # a connection that has begun a head and not ended it by then is closed
BODY_TIMEOUT_S = 60.0  # likewise one that has begun a body, if nothing more of it comes for so long
AHEAD_BYTES = 65_536  # may wait here; beyond it the end of the connection is not noticed either
LARGE_BYTES = 65_536  # from here on copying an answer behind its head costs more than sending the two as two
_BLANK = re.compile(rb"[\r\n]*")

logger = logging.getLogger(__name__)


class Connection(asyncio.BufferedProtocol):
    """One connection. Used by the event loop only.

    Heads are read into a buffer that all connections share, as its bytes are dealt with before the next read.
    A large body is read straight to its place, which the exchange of its request provides.
    """

    __slots__ = (
        *("__weakref__", "_ahead", "_body_left", "_chunks", "_drained", "_idle", "_is_free", "_is_held"),
        *("_known", "_known_size", "_known_text", "_loop", "_reader", "_room", "_timer", "_times_full"),
        *("_unread", "_upload", "budget", "client", "exchange", "listener", "transport", "write_paused"),
    )
    transport: asyncio.Transport

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.budget = ConnectionBudget(listener.budgets)  # of the bodies of the present request
        self.exchange: Exchange | None = None  # the last one
        self.write_paused = False
        self.client: Any = None
        self._loop = asyncio.get_running_loop()
        self._is_free = True  # no request is present, no bytes wait, and the client takes its answers
        self._reader: HeadReader | None = None  # of a head whose end has not come
        self._body_left = 0  # bytes of the present body that are to come, if it has a length
        self._chunks: Chunks | None = None  # of a body whose end has not come, if it comes in chunks
        self._room: memoryview | None = None  # where the next bytes of the present body are to be
        self._ahead: bytearray | None = None  # bytes that wait for the present answer
        self._is_held = False  # nothing is read
        self._drained: asyncio.Future[None] | None = None  # set when the write buffer has room again
        self._times_full = 0  # that the socket's buffer was
        self._timer: asyncio.TimerHandle | None = None  # for the end of a head, or of a body that was refused
        self._idle: Silence | None = None  # since the last answer
        self._upload: Silence | None = None  # of a client that has not sent its body at once
        self._unread: Unread[tuple[int, int]] | None = None  # by a client that is slow to take an answer
        self._known: Head | None = None  # the last head of a prediction, its bytes, and those of its request
        self._known_text = b""
        self._known_size = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected, and has `HEAD_TIMEOUT_S` for its first head."""
        self.transport = transport
        self.listener.connections.add(self)
        peer = transport.get_extra_info("peername")
        self.client = peer[:2] if isinstance(peer, tuple) else None  # a Unix socket has no name
        self._mind_the_head()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go; bytes behind a large body stay in the socket."""
        return self.listener.view if self._room is None else self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came in."""
        if self._room is not None:
            self._fill(nbytes)
        elif not (self._is_free and self._run_known(nbytes)):
            data = bytes(self.listener.view[:nbytes])
            if self._ahead is None:
                self._read(data, 0)
            else:
                self._keep_back(data, 0)

    def _run_known(self, size: int) -> bool:
        """Begin a request that is there as a whole and whose head came before, without the parser."""
        listener = self.listener
        text = self._known_text
        head = self._known
        if head is None or size != self._known_size or not listener.buffer.startswith(text):
            text = bytes(listener.view[: listener.buffer.find(HEAD_END, 0, MAX_KNOWN_BYTES) + len(HEAD_END)])
            head = listener.heads.known.get(text)
            if head is None or size != len(text) + head.length:
                return False
            self._known, self._known_text, self._known_size = head, text, size
        self._is_free = False
        if self._timer is not None:
            self._end_timer()
        self._run(head, bytes(listener.view[len(text) : size]))
        return True

    def _read(self, data: bytes, start: int) -> None:
        """Deal with the bytes of one request. Bytes behind it wait until it is answered."""
        if not self._is_in_body():
            if self._reader is None:
                start = _end_of_blank(data, start)
                if start == len(data):
                    return
                if self.is_busy() or self.write_paused:
                    self._keep_back(data, start)
                    return
            start = self._read_head(data, start)
        if start < len(data) and self._is_in_body() and not self.transport.is_closing():
            start = self._read_body(data, start)
        if start < len(data) and not self.transport.is_closing():
            self._keep_back(data, start)

    def _read_head(self, data: bytes, start: int) -> int:
        self._is_free = False
        reader = self._reader
        if reader is None:
            self._reader = reader = HeadReader()
        try:
            end = reader.feed(data, start)
            if end < 0:
                self._mind_the_head()
                return len(data)
            self._reader = None
            head = self.listener.heads.read(reader)
        except BadHead as error:
            self._refuse(error)
            return len(data)
        self._end_timer()
        whole = end + head.length
        if end <= whole <= len(data) and head.target is not None and self.listener.heads.is_plain(head):
            self._run(head, data[end:whole])
            return whole
        self._begin(head)
        return end

    def _run(self, head: Head, body: bytes) -> None:
        """Have a prediction answered whose body came with its head."""
        exchange = TensorPrediction(self, head) if head.is_tensors else Prediction(self, head)
        self.exchange = exchange
        if self.listener.keys is None or exchange.authorized():
            try:
                self.budget.take(len(body))
            except BudgetExceeded as error:
                exchange.refuse(OverBudget(str(error)))
            else:
                exchange.run(body)

    def _begin(self, head: Head) -> None:
        exchange: Exchange
        if head.target is None:
            exchange = AppExchange(self, head)
        else:
            exchange = TensorPrediction(self, head) if head.is_tensors else Prediction(self, head)
        self.exchange = exchange
        if head.length == CHUNKED:
            self._chunks = Chunks()
        else:
            self._body_left = head.length
        if exchange.authorized():
            exchange.begin()
        if self._is_in_body():
            self._room = exchange.room
            self._mind_the_body()
        elif not exchange.complete:
            exchange.whole()

    def _is_in_body(self) -> bool:
        return self._body_left > 0 or self._chunks is not None

    def _read_body(self, data: bytes, start: int) -> int:
        exchange = self.exchange
        if exchange is None:  # never: it has a body
            return len(data)
        if self._chunks is None:
            end = min(len(data), start + self._body_left)
            self._body_left -= end - start
            piece = data[start:end]
        else:
            try:
                end, pieces = self._chunks.feed(data, start)
            except BadBody as error:
                self._refuse(error)
                return len(data)
            piece = b"".join(pieces)
            if self._chunks.over:
                self._chunks = None
        if piece and self._take(exchange, len(piece)):
            exchange.take(piece)
        self._came_on(exchange)
        return end

    def _fill(self, size: int) -> None:
        """The kernel wrote to the body's own place."""
        exchange = self.exchange
        if exchange is not None:
            self._body_left -= size
            if self._take(exchange, size):
                exchange.filled(size)
            self._came_on(exchange)

    def _take(self, exchange: Exchange, size: int) -> bool:
        """Count bytes of a body; False: nothing may be kept of it, because it is answered."""
        if exchange.complete:
            return False
        try:
            self.budget.take(size, exchange.head.key is None and self.listener.keys is not None)
        except BudgetExceeded as error:
            if exchange.prediction is None:
                self._end(OVER_BUDGET)  # the app may hold the bytes until its client is gone
            else:
                exchange.refuse(OverBudget(str(error)))
            return False
        return True

    def _came_on(self, exchange: Exchange) -> None:
        """More of a body is there, or all of it."""
        if self._is_in_body():
            self._room = exchange.room
            self._mind_the_body()
            if exchange.complete and not self._is_held and not self.transport.is_closing():
                # uvloop reads up to 32 times before others have their turn, and no answer asks for less
                self.hold()
                self._loop.call_soon(self._read_on)
            return
        self._room = None
        if self._upload is not None:
            self._upload.over()
        if not exchange.complete:
            exchange.whole()
        else:
            self._go_on(exchange.keep_alive)

    def _read_on(self) -> None:
        if self._ahead is None and not self.transport.is_closing():
            self.release()

    def _keep_back(self, data: bytes, start: int) -> None:
        """Keep bytes until the present request is answered."""
        self._is_free = False
        ahead = self._ahead
        if ahead is None:
            start = _end_of_blank(data, start)
            if start == len(data):
                self._is_free = not self.is_busy() and not self.write_paused
                return
            self._ahead = ahead = bytearray()
            if not self.is_busy() and not self.write_paused:
                self._loop.call_soon(self._read_ahead)
        ahead += data[start:]
        if len(ahead) > AHEAD_BYTES:
            self.hold()

    def _read_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not self.transport.is_closing():
            self.release()
            self._read(bytes(ahead), 0)

    def answered(self, keep_alive: bool) -> None:
        """The answer to the present request is out."""
        self.budget.give_all()
        if self._body_left == 0 and self._chunks is None:
            self._go_on(keep_alive)
        elif not keep_alive and self._timer is None:
            # Closing a socket with unread bytes in it makes the kernel reset the connection, and the client
            # would lose the answer that is already on its way.
            self._timer = self._loop.call_later(UNREAD_LINGER_S, self.transport.close)

    def _go_on(self, keep_alive: bool) -> None:
        """A request and its answer are over."""
        if not keep_alive:
            self._end_timer()
            self.transport.close()
            return
        if self._idle is None:
            self._idle = Silence(self.listener.keep_alive_s, self._idle_too_long)
        self._idle.watch()
        if self._ahead is None:
            self._is_free = not self.write_paused
        elif not self.write_paused:
            self._loop.call_soon(self._read_ahead)

    def is_busy(self) -> bool:
        """Whether a request has come whose answer, or whose body, is not over."""
        return (self.exchange is not None and not self.exchange.complete) or self._is_in_body()

    def write(self, head: bytes, body: bytes = b"") -> None:
        """Send both now; nothing where the client has just left."""
        if self.transport.is_closing():
            return
        if len(body) > LARGE_BYTES:
            write_together(self.transport, (head, body))
        else:
            self.transport.write(head + body)

    async def drain(self) -> None:
        """Wait until the write buffer has room, or the connection closes."""
        while self.write_paused and not self.transport.is_closing():
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        self.write_paused = True
        self._is_free = False
        self._times_full += 1
        if self._unread is None:
            self._unread = Unread(self._held_back, lambda _: self.transport.abort())
        self._unread.watch()

    def _held_back(self) -> tuple[int, int] | None:
        untaken = untaken_bytes(self.transport) if self.write_paused else None
        return None if untaken is None else (self._times_full, untaken)

    def resume_writing(self) -> None:
        """It has room again."""
        self.write_paused = False
        self._wake()
        if not self.is_busy() and not self.transport.is_closing() and self.exchange is not None:
            if self._ahead is not None:
                self._loop.call_soon(self._read_ahead)
            else:
                self._is_free = self._reader is None

    def _wake(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def hold(self) -> None:
        """Read nothing until `release`."""
        if not self._is_held:
            self._is_held = True
            self.transport.pause_reading()

    def release(self) -> None:
        """Read on."""
        if self._is_held:
            self._is_held = False
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, from either side."""
        self.listener.connections.discard(self)
        self._is_free = False
        self._end_timer()
        for watched in (self._idle, self._upload, self._unread):
            if watched is not None:
                watched.stop()
        self._idle = self._upload = self._unread = self._ahead = self._room = self._known = (
            None  # they hold this
        )
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.drop()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.ended()
        self.budget.give_all()
        self.write_paused = False
        self._wake()

    def announce_end(self) -> None:
        """From now on an answer ends the connection; the client hears it in the answer's head."""
        if self.exchange is not None:
            self.exchange.keep_alive = False

    def shutdown(self) -> None:
        """The listener is closed: answer what is in, then close.

        An idle connection stays for a moment. A request may be on its way, and closing under it would lose
        it: the client can't know whether it was run, so it may not send it again.
        """
        self.announce_end()
        self._loop.call_later(DRAIN_LINGER_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._reader is None and self._ahead is None and not self.is_busy():
            self.transport.close()

    def _idle_too_long(self) -> None:
        self._close_if_idle()

    def _refuse(self, error: Exception) -> None:
        """Answer a malformed or oversized request, and close."""
        logger.debug("%s sent a malformed request: %s", self.client, error)  # any client can, all the time
        self._end(INVALID_HTTP)

    def _end(self, last_words: LastWords) -> None:
        if self.transport.is_closing():
            return
        exchange = self.exchange
        if not self._is_in_body():  # it was a head
            self.transport.write(last_words.text)
            self.listener.refused(self.client, last_words.status)
        elif exchange is not None and not exchange.complete and exchange.status == 0:
            self.transport.write(last_words.text)
            exchange.ended(last_words.status)
        self.transport.close()

    def _mind_the_head(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _mind_the_body(self) -> None:
        """More of a body is to come."""
        if self._upload is None:
            self._upload = Silence(BODY_TIMEOUT_S, self._body_stalled)
        self._upload.watch()

    def _body_stalled(self) -> None:
        if self._is_held:  # it is us who take nothing
            self._mind_the_body()
        else:
            self._end(STALLED_BODY)


def _end_of_blank(data: bytes, start: int) -> int:
    """Where the empty lines end that a client may send before a request (RFC 9112, 2.2)."""
    blank = _BLANK.match(data, start)
    return blank.end() if blank is not None else start
