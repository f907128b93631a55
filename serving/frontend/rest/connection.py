"""One HTTP/1.1 connection: parses requests one by one, passes their bodies on, and enforces timeouts.

A client may pipeline requests. Bytes after a request stay unparsed until it is answered: up to `AHEAD_BYTES`
in a buffer, the rest in the socket. If they were parsed at once, each request would hold kilobytes, and the
response to a malformed one would be written in the middle of the response before it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from torchere.serving.access.identity import address_of, subjects_of
from torchere.serving.errors import OverBudget, TooManyRequests
from torchere.serving.frontend.budgets import BudgetExceeded, ConnectionBudget
from torchere.serving.frontend.rest.asgi import AppExchange
from torchere.serving.frontend.rest.bodies import Chunks, end_of_blank
from torchere.serving.frontend.rest.errors import OVER_BUDGET, STALLED_BODY, BadMessage, LastWords
from torchere.serving.frontend.rest.heads import CHUNKED, HEAD_END, MAX_KNOWN_BYTES, Head, HeadReader
from torchere.serving.frontend.rest.predictions import Prediction
from torchere.serving.frontend.rest.tensors import TensorPrediction
from torchere.serving.frontend.rest.unread_answers import UnreadAnswers
from torchere.serving.io.turn_writes import write_together
from torchere.serving.io.watchdog import Silence, Upload

if TYPE_CHECKING:
    from torchere.serving.access.client_limits import Account
    from torchere.serving.frontend.rest.exchange import Exchange
    from torchere.serving.frontend.rest.listener import Listener

DRAIN_LINGER_S = 0.25  # how long idle connections stay open at shutdown: many data-centre round trips
UNREAD_LINGER_S = 2.0  # how long a refused body is still read, so that the client receives the refusal
DROPPED_BYTES = 1 << 62  # length of a dropped body whose end is unknown, or comes after the connection's end
HEAD_TIMEOUT_S = 60.0  # a connection whose head is incomplete after so long is closed
BODY_TIMEOUT_S = 60.0  # a connection whose incomplete body stops, or is too slow, for so long is closed
AHEAD_BYTES = 65_536  # of pipelined bytes; beyond it reading pauses, so a disconnect is not noticed either
LARGE_BYTES = 65_536  # for a longer body, joining it to its head costs more than a separate write

logger = logging.getLogger(__name__)


class Connection(asyncio.BufferedProtocol):
    """One HTTP/1.1 connection. Used on the event loop only.

    Heads are read into a buffer that all connections share, because its bytes are used or copied before the
    next read. A large body is read directly into the buffer that its exchange provides.
    """

    __slots__ = (
        *("__weakref__", "_account", "_ahead", "_body_left", "_chunks", "_idle", "_is_free", "_is_held"),
        *("_known", "_known_size", "_known_text", "_loop", "_opened_s", "_reader", "_room", "_timer"),
        *("_unread", "_upload", "address", "budget", "client", "exchange", "listener", "subjects"),
        *("transport", "write_paused"),
    )
    transport: asyncio.Transport

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.budget = ConnectionBudget(listener.budgets)  # for the body of the current request
        self.exchange: Exchange | None = None  # the current or last one
        self.write_paused = False
        self.client: Any = None
        self.address = ""
        self.subjects: tuple[str, ...] = ()  # the names in the client's certificate
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._is_free = True  # no current request, no pipelined bytes, and writing is not paused
        self._reader: HeadReader | None = None  # of an incomplete head
        self._body_left = 0  # bytes left of the current body, if it has a Content-Length
        self._chunks: Chunks | None = None  # decoder of an incomplete chunked body
        self._room: memoryview | None = None  # buffer for the next bytes of the current body
        self._ahead: bytearray | None = None  # pipelined bytes, kept until the current request is answered
        self._is_held = False  # reading is paused
        self._timer: asyncio.TimerHandle | None = None  # timeout of a head, or of reading a refused body
        self._idle: Silence | None = None  # idle timeout since the last answer
        self._upload: Upload | None = None  # read timeout of a body that did not arrive with its head
        self._unread: UnreadAnswers | None = None  # over TLS, or once the write buffer was full
        self._account: Account | None = None  # of the client, if only its address names it
        self._known: Head | None = None  # the last prediction's head; its bytes and its request's size follow
        self._known_text, self._known_size = b"", 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection; the client has `HEAD_TIMEOUT_S` to send its first head."""
        self.transport = transport
        listener = self.listener
        if transport.get_extra_info("sslcontext") is not None:  # admitted when it was accepted
            self._unread = UnreadAnswers(transport, listener.budgets)
        elif not listener.connection_limit.admits(listener.connections):
            transport.abort()
            return
        listener.connections.add(self)
        peer = transport.get_extra_info("peername")
        self.client = peer[:2] if isinstance(peer, tuple) else None  # a Unix socket has no name
        self.address = address_of(peer)
        self.subjects = subjects_of(transport.get_extra_info("peercert"), time.time())
        if listener.client_limits is not None and listener.keys is None:
            self._account = listener.client_limits.keep(self.address)
        self._mind_the_head()
        if listener.stopping:
            self.shutdown()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes; bytes after a large body stay in the socket."""
        return self.listener.view if self._room is None else self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Process the bytes that were read into the buffer."""
        if self._room is not None:
            self._fill(nbytes)
        elif not (self._is_free and self._run_known(nbytes)):
            data = bytes(self.listener.view[:nbytes])
            if self._ahead is None:
                self._read(data, 0)
            else:
                self._keep_back(data, 0)

    def _run_known(self, size: int) -> bool:
        """Run a complete request whose head is cached, without parsing it; False if that is impossible."""
        listener = self.listener
        head, text = self._known, self._known_text
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

    def _read(self, data: bytes, start: int, in_turn: bool = False) -> None:
        """Process the bytes of one request. Pipelined bytes stay buffered until it is answered."""
        if not self._is_in_body():
            if self._reader is None:
                start = end_of_blank(data, start)
                if start == len(data):
                    return
                if self.is_busy() or self.write_paused:
                    self._keep_back(data, start)
                    return
            start = self._read_head(data, start)
        if start < len(data) and self._is_in_body() and not self.transport.is_closing():
            start = self._read_body(data, start, in_turn)
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
        except BadMessage as error:
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
        """Run a prediction whose body arrived with its head, and which is not refused for its head."""
        exchange = TensorPrediction(self, head) if head.is_tensors else Prediction(self, head)
        self.exchange = exchange
        account = self._account
        if account is not None:  # all that `authorized` would do; 1 us less
            try:
                account.charge(exchange.started_s)
            except TooManyRequests as error:
                exchange.refuse(error)
                return
            exchange.account = account
        elif not (self.listener.is_open or exchange.authorized()):
            return
        if self._take(exchange, len(body)):
            exchange.run(body)

    def _begin(self, head: Head) -> None:
        kind = AppExchange if head.target is None else TensorPrediction if head.is_tensors else Prediction
        exchange = self.exchange = kind(self, head)
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

    def _read_body(self, data: bytes, start: int, in_turn: bool) -> int:
        exchange = self.exchange
        if exchange is None:  # see `_end`
            self.hold()  # see `_came_on`
            self._loop.call_soon(self._read_on)
            return len(data)
        if self._chunks is None:
            end = min(len(data), start + self._body_left)
            self._body_left -= end - start
            piece = data[start:end]
        else:
            turns, began_s = self.listener.budgets.turns, time.monotonic()
            if turns.are_over and not in_turn:  # chunks of a byte take 0.4 us for each byte of their framing
                self.hold()  # else more would be read in this iteration
                self._ahead = bytearray(data[start:])
                turns.put_off(lambda: self._read_ahead(in_turn=True))
                return len(data)
            try:
                end, pieces = self._chunks.feed(data, start)
            except BadMessage as error:
                self._refuse(error)
                return len(data)
            turns.spend(time.monotonic() - began_s)
            piece = b"".join(pieces)
            if self._chunks.over:
                self._chunks = None
        if piece and self._take(exchange, len(piece)):
            exchange.take(piece)
        self._came_on(exchange, end - start)
        return end

    def _fill(self, size: int) -> None:
        """Process bytes that the kernel wrote directly into the body's buffer."""
        exchange = self.exchange
        if exchange is not None:
            self._body_left -= size
            if self._take(exchange, size):
                exchange.filled(size)
            self._came_on(exchange, size)

    def _take(self, exchange: Exchange, size: int) -> bool:
        """Take body bytes from the budget; False drops them, as the request is answered or refused."""
        if exchange.complete:
            return False
        try:
            self.budget.take(size, exchange.head.role is None and self.listener.keys is not None)
        except BudgetExceeded as error:
            if exchange.prediction is None:
                self.listener.metrics.refused(OverBudget(str(error)))
                self._end(OVER_BUDGET)  # as the app may hold the bytes until its client disconnects
            else:
                exchange.refuse(OverBudget(str(error)))
            return False
        return True

    def _came_on(self, exchange: Exchange, size: int) -> None:
        """Continue after `size` bytes more of a body, or its end, have arrived."""
        if self._is_in_body():
            self._room = exchange.room
            self._mind_the_body(size)
            if exchange.complete and not self._is_held and not self.transport.is_closing():
                # The rest of an answered body is dropped. uvloop reads up to 32 times before other
                # connections have their turn, so pause reading for one loop iteration.
                self.hold()
                self._loop.call_soon(self._read_on)
            return
        self._room = None
        if self._upload is not None:
            self._upload.over()
        self.release()  # ends a pause that was for the body, because nothing else would end it
        if not exchange.complete:
            exchange.whole()
        else:
            self._go_on(exchange.keep_alive)

    def _read_on(self) -> None:
        if self._ahead is None and not self.transport.is_closing():
            self.release()

    def _keep_back(self, data: bytes, start: int) -> None:
        """Buffer pipelined bytes until the current request is answered."""
        self._is_free = False
        ahead = self._ahead
        if ahead is None:
            start = end_of_blank(data, start)
            if start == len(data):
                self._is_free = not self.is_busy() and not self.write_paused
                return
            self._ahead = ahead = bytearray()
            if not self.is_busy() and not self.write_paused:
                self._loop.call_soon(self._read_ahead)
        ahead += data[start:]
        if len(ahead) > AHEAD_BYTES:
            self.hold()

    def _read_ahead(self, in_turn: bool = False) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not self.transport.is_closing():
            self.release()
            self._read(bytes(ahead), 0, in_turn)

    def answered(self, keep_alive: bool) -> None:
        """Continue after the response to the current request was written."""
        self.budget.give_all()
        if self._body_left == 0 and self._chunks is None:
            self._go_on(keep_alive)
        elif not keep_alive and self._timer is None:
            # Closing a socket with unread bytes makes the kernel reset the connection, and the client would
            # lose the response that is already on its way.
            self._timer = self._loop.call_later(UNREAD_LINGER_S, self._close)

    def _go_on(self, keep_alive: bool) -> None:
        """Close, or wait for the next request, after a request and its response have ended."""
        if not keep_alive:
            self._end_timer()
            self._close()
            return
        if self._idle is None:
            self._idle = Silence(self.listener.keep_alive_s, self._close_if_idle)
        self._idle.watch()
        if self._ahead is None:
            self._is_free = not self.write_paused
        elif not self.write_paused:
            self._loop.call_soon(self._read_ahead)

    def is_busy(self) -> bool:
        """Tell whether the current request's body or response is incomplete."""
        return (self.exchange is not None and not self.exchange.complete) or self._is_in_body()

    def write(self, head: bytes, body: bytes = b"") -> None:
        """Write head and body; do nothing if the connection is closing."""
        if self.transport.is_closing():
            return
        if len(body) <= LARGE_BYTES:
            head, body = head + body, b""
        if self._unread is not None and self._unread.is_of_tls:
            self._unread.write(head, body)
        elif body:
            write_together(self.transport, (head, body))
        else:
            self.transport.write(head)

    async def drain(self) -> None:
        """Wait until the write buffer has room, or the connection closes."""
        if self._unread is not None:
            await self._unread.wait()

    def pause_writing(self) -> None:
        """Record that the write buffer is full; close the connection if all connections hold too much."""
        self.write_paused = True
        self._is_free = False
        if self._unread is None:
            self._unread = UnreadAnswers(self.transport, self.listener.budgets)
        if flaw := self._unread.begin(self.listener.limits.max_response_bytes):
            logger.warning("a connection of %s is closed: %s", self.address, flaw)
            self.transport.abort()

    def resume_writing(self) -> None:
        """Record that the write buffer has room again, and go on with writers and pipelined bytes."""
        self.write_paused = False
        if self._unread is not None:
            self._unread.end()  # its rest may fill the buffer again
        if not (self.write_paused or self.is_busy() or self.transport.is_closing() or self.exchange is None):
            if self._ahead is not None:
                self._loop.call_soon(self._read_ahead)
            else:
                self._is_free = self._reader is None

    def hold(self) -> None:
        """Pause reading until `release`."""
        if not self._is_held:
            self._is_held = True
            self.transport.pause_reading()
            if self._upload is not None:
                self._upload.pause()

    def release(self) -> None:
        """Resume reading."""
        if self._is_held:
            self._is_held = False
            self.transport.resume_reading()
            if self._upload is not None:
                self._upload.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything: either side closed the connection."""
        self.listener.connections.discard(self)
        self._is_free = False
        self._end_timer()
        for watched in (self._idle, self._upload, self._unread):
            if watched is not None:
                watched.stop()
        # They reference this object.
        self._idle = self._upload = self._unread = self._ahead = self._room = self._known = None
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.drop()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.ended()
        if self._account is not None and self.listener.client_limits is not None:
            self.listener.client_limits.let_go(self._account)
            self._account = None
        self.budget.give_all()
        self.write_paused = False

    def announce_end(self) -> None:
        """Close the connection after the current response, whose head then has `Connection: close`."""
        if self.exchange is not None:
            self.exchange.keep_alive = False

    def shutdown(self) -> None:
        """Answer the requests that have arrived, then close, because the listener is closed.

        If idle, stay open for `DRAIN_LINGER_S`, because a client can't know if a request in transit was run.
        """
        self.announce_end()
        self._loop.call_later(DRAIN_LINGER_S, self._close_if_idle)
        if not self.is_busy():  # a head has begun, or may come
            self._end_timer()
            self._mind_the_head()
        if self._upload is not None:
            self._upload.hurry(self.listener.timeout_s(BODY_TIMEOUT_S))

    def _close_if_idle(self) -> None:
        if self._reader is None and self._ahead is None and not self.is_busy():
            self._close()

    def idle_since_s(self) -> float | None:
        """Return since when there is no request to answer, in monotonic seconds; None if there is one."""
        # The rest of a body whose request is answered or refused is only dropped.
        if self._ahead is not None or (self.exchange is not None and not self.exchange.complete):
            return None
        began_s = None if self._idle is None else self._idle.began_s
        return self._opened_s if began_s is None else began_s

    def close_idle(self) -> None:
        """Close the connection, because others need its place."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait for a client that does not read
        else:
            self.transport.close()

    def _refuse(self, error: BadMessage) -> None:
        """Reject a malformed or oversized request, and close the connection."""
        logger.debug("%s sent a malformed request: %s", self.client, error)  # else clients can flood the log
        self._end(error.last_words)

    def _end(self, last_words: LastWords) -> None:
        if self.transport.is_closing():
            return
        exchange = self.exchange
        if not self.is_busy():  # the head was malformed
            self.transport.write(last_words.text())
            self.listener.refused(self.client, last_words.status)
        elif exchange is not None and not exchange.complete and exchange.status == 0:
            self.transport.write(last_words.text(exchange.head.place.path))
            exchange.ended(last_words.status)
            self.budget.give_all()
        else:
            self._close()
            return
        self._end_timer()
        self._timer = self._loop.call_later(UNREAD_LINGER_S, self._close)  # as in `answered`
        self.exchange, self._room, self._body_left = None, None, DROPPED_BYTES
        if self.transport.can_write_eof():  # TLS can't
            self.transport.write_eof()

    def _close(self) -> None:
        (self.transport if self._unread is None else self._unread).close()

    def _mind_the_head(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self.listener.timeout_s(HEAD_TIMEOUT_S), self.transport.close)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _mind_the_body(self, size: int = 0) -> None:
        """Start the read timeout after `size` bytes of a body that is incomplete."""
        if self._upload is None:
            rate = self.listener.limits.min_upload_rate
            self._upload = Upload(self.listener.timeout_s(BODY_TIMEOUT_S), rate, self._body_stalled)
        self._upload.arrived(size)

    def _body_stalled(self) -> None:
        if self._is_held:  # we paused reading, so the client is not to blame
            self._mind_the_body()
        else:
            self._end(STALLED_BODY)
