"""One call on a connection: received messages, messages to send, and the listener that answers it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, TypeVar

from torchere.serving.frontend.budgets import BudgetExceeded, Budgets, Lease
from torchere.serving.frontend.http2.flow_control import InboundFlow, OutboundFlow, StreamFlow
from torchere.serving.frontend.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, Piece, frame, head
from torchere.serving.frontend.http2.header_blocks import (
    HEAD_BLOCK,
    OK_BLOCK,
    Request,
    RequestHead,
    refusal_block,
    status_block,
)
from torchere.serving.frontend.http2.messages import (
    PREFIX_BYTES,
    Compressed,
    MessageFailed,
    MessageReader,
    Received,
    StatusCode,
    only_message,
)

T = TypeVar("T")
MAX_ENCODING = 100  # characters of the encoding's name that a call without a key keeps
JOINED_BYTES = 65_536  # below this, copying a message is cheaper than writing it in parts
Encoded = bytes | Sequence[bytes | memoryview]  # whole, or the parts of a long one
# The frames of headers and trailers around an answer of one message, up to their stream ids.
_HEAD_START = head(len(HEAD_BLOCK), HEADERS, END_HEADERS, 0)[:-4]
_OK_START = head(len(OK_BLOCK), HEADERS, END_STREAM | END_HEADERS, 0)[:-4]


class CallListener:
    """Receives the events of one call and answers it; this base ignores them.

    Called on the event loop; methods must not raise.

    Attributes:
        takes_one: the call is answered after the client's half-close, so a client that stops sending earlier
            is timed out; otherwise the client may be silent between messages.
    """

    __slots__ = ()
    takes_one: ClassVar[bool] = False

    def on_message(self, message: Received | Compressed) -> None:
        """Handle a message of the client."""

    def on_half_close(self) -> None:
        """Handle the client's half-close: it sends no more messages."""

    def on_failure(self, error: MessageFailed) -> None:
        """End the call with an error, because a message can't be accepted. It is the last event."""

    def on_cancel(self) -> None:
        """Stop work on the call: the client cancelled it, or the connection is lost."""

    def on_drain(self, *, is_stop: bool) -> None:
        """End the call if it would never end by itself: the connection closes after its last call.

        `is_stop`: the server stops. This event may follow an earlier one that had another cause.
        """


ENDED = CallListener()  # of an ended call


class Stream(StreamFlow):
    """One call. Answer it once: with `answer`, or with any number of `send` and one `end`.

    Used on the event loop only.

    Attributes:
        head: the request headers; without metadata if the call needs no key.
        timeout_s: timeout set by the client, in seconds; None: no deadline.
        client: address of the client; None over a Unix socket.
        caller: names the client; set when the call is authorized.
        subjects: the names in the client's certificate.
        ended: the answer is complete, though some of it may not be sent yet.
        limit_bytes: maximum size of a received message.
        messages: how many complete messages have arrived.
    """

    __slots__ = (
        *("_head_sent", "_inbound", "_outbound", "_reader", "caller", "client", "ended", "head", "messages"),
        *("limit_bytes", "listener", "subjects", "timeout_s"),
    )

    def __init__(
        self,
        stream_id: int,
        request: Request,
        client: Any,
        inbound: InboundFlow,
        outbound: OutboundFlow,
    ) -> None:
        StreamFlow.__init__(self, stream_id, outbound.initial_window)
        self.head, self.timeout_s = request
        self.client = client
        self.caller = ""
        self.subjects: tuple[str, ...] = ()
        self.listener = ENDED
        self.limit_bytes = inbound.limit_bytes
        self._inbound = inbound
        self._outbound = outbound
        self._reader: MessageReader | None = None  # created for messages that do not arrive in one piece
        self.messages = 0
        self._head_sent = False
        self.ended = False

    @property
    def connection(self) -> Hashable:
        """Identity of the call's connection, for limits per connection."""
        return self._inbound

    @property
    def budgets(self) -> Budgets:
        """The budgets of the server."""
        return self._inbound.budget.budgets

    @property
    def waits_for_client(self) -> bool:
        """Whether the call can't proceed until the client sends the rest of it."""
        return (
            self.remote_open
            and not (self.ended or self.paused)
            and (self.listener.takes_one or not (self._reader is None or self._reader.at_message_end))
        )

    def receive(self, pieces: Sequence[Piece], *, is_last: bool) -> None:
        """Process received bytes of the client's messages; `is_last`: no more follow."""
        try:
            # The end of a call's only message is not held, because the call `keep`s the message next.
            if not (self.ended or (is_last and self.listener.takes_one)):
                self._hold(sum(map(len, pieces)))
            for piece in pieces:
                if self.ended:
                    break
                if not piece:  # an empty frame that ends its stream
                    continue
                reader = self._reader
                if not self.paused and (reader is None or reader.at_message_end):
                    message = only_message(piece, self.limit_bytes)
                    if message is not None:
                        self.messages += 1
                        self.listener.on_message(message)
                        continue
                self._read(piece)
        except MessageFailed as err:
            self.listener.on_failure(err)

    def _read(self, piece: Piece) -> None:
        reader = self._reader
        if reader is None:
            reader = self._reader = MessageReader(self.limit_bytes, self.head.encoding)
        if self.paused or reader.unsplit:
            reader.unsplit += piece
        else:
            self._hand_over(reader.feed(piece))
            if reader.unsplit:
                self._read_on(reader)

    def _hand_over(self, messages: Sequence[Received | Compressed]) -> None:
        for message in messages:
            self.messages += 1
            self.listener.on_message(message)

    def _read_on(self, reader: MessageReader) -> None:
        """Split messages only while they are consumed: split ones may take a hundred times their size."""
        while reader.unsplit and not (self.paused or self.ended):
            self._hand_over(reader.more())

    def consumed(self, size: int) -> None:
        """Return a consumed message of `size` bytes to the memory budget."""
        if self.held_bytes:
            size = min(PREFIX_BYTES + size, self.held_bytes)
            self.held_bytes -= size
            self._inbound.budget.give(size, self.key_free)

    def consumed_all(self) -> None:
        """Return all held and kept bytes of the call to the memory budget."""
        size = self.held_bytes + self.kept_bytes
        if size:
            self.held_bytes = self.kept_bytes = 0
            self._inbound.budget.give(size, self.key_free)

    def keep(self, size: int) -> None:
        """Count a consumed message in the memory budget, until `let_go` or the end of the call.

        Has no effect once the call has ended: its tasks may go on for a moment, and nothing would return it.

        Raises:
            MessageFailed: there is no room for it.
        """
        if not self.ended:
            _room(self._inbound.budget.take, size, self.key_free)
            self.kept_bytes += size

    def let_go(self, size: int) -> None:
        """Return the bytes of an answered message to the memory budget; no effect once the call has ended."""
        size = min(size, self.kept_bytes)
        self.kept_bytes -= size
        self._inbound.budget.give(size, self.key_free)

    def hold_while_inflating(self, message: Compressed) -> Lease:
        """Take a message's bytes from the memory budget, and lease room for its decompressed form.

        Raises:
            MessageFailed: there is no room for them.
        """
        if len(message) > self.held_bytes and not self.ended:  # see `keep`
            self._hold(len(message) - self.held_bytes)
        return _room(self._inbound.budget.lease_inflation, len(message), self.limit_bytes)

    def lease(self, size: int) -> Lease:
        """Lease room for a message of `size` bytes, which stays held until the lease ends.

        Raises:
            MessageFailed: there is no room for it.
        """
        return _room(self._inbound.budget.lease_inflation, size, size)

    def _hold(self, size: int) -> None:
        """Take bytes of an incomplete call from the memory budget."""
        _room(self._inbound.budget.take, size, self.key_free)
        self.held_bytes += size
        self.arrived_bytes += size

    def restrict(self, limit_bytes: int) -> None:
        """Accept short messages only, and take them from the budget of calls that need no key.

        Drop most of the head, which no budget counts: a thousand open calls could have 70 MB of fields.
        """
        self._inbound.key_free_streams += not self.key_free
        self.key_free = True
        self.head = RequestHead(self.head.method, self.head.path, "", self.head.encoding[:MAX_ENCODING], ())
        self.limit_bytes = limit_bytes

    def half_close(self) -> None:
        """End the client's side of the stream."""
        self.remote_open = False
        # Bytes remain unsplit only while the stream is paused; `resume` then reports the half-close.
        if not (self.ended or (self._reader is not None and self._reader.unsplit)):
            self._half_closed()

    def _half_closed(self) -> None:
        if self._reader is None or self._reader.at_message_end:
            self.listener.on_half_close()
        else:
            text = "the stream ends in the middle of a message"
            self.listener.on_failure(MessageFailed(StatusCode.INTERNAL, text))

    def answer(self, message: Encoded) -> None:
        """Send the only message and status OK.

        Raises:
            MessageFailed: it is longer than the limit; nothing was sent.
        """
        if not isinstance(message, bytes) or not self._fits_at_once(message):
            self._put(message)
            self.end()  # sends headers, message and trailers together
            return
        self._complete()
        stream_id, size = self.id.to_bytes(4, "big"), len(message)
        data_head = head(PREFIX_BYTES + size, DATA, 0, self.id)
        prefix = b"\0" + size.to_bytes(4, "big")
        parts = (
            _HEAD_START,
            stream_id,
            HEAD_BLOCK,
            data_head,
            prefix,
            message,
            _OK_START,
            stream_id,
            OK_BLOCK,
        )
        self._outbound.write(b"".join(parts))
        self._outbound.finished(self)

    def send(self, message: Encoded) -> None:
        """Send one of several messages.

        Raises:
            MessageFailed: it is longer than the limit; nothing of it was sent.
        """
        if self._put(message):
            self._outbound.pump(self)

    def end(self, code: int = 0, message: str = "", details: bytes = b"") -> None:
        """End the answer with a gRPC status, after the queued messages.

        Args:
            code: gRPC status code; 0 is OK.
            message: human-readable status message.
            details: the status as a serialized `google.rpc.Status`, for programs.
        """
        if self.ended:
            return
        self._complete()
        if code == 0:
            self._begin()
            self.trailers = OK_BLOCK
        elif self._head_sent:
            self.trailers = status_block(code, message, details)
        else:
            self.trailers = refusal_block(200, code, message, details)
        self._outbound.pump(self)

    def refuse(self, code: int, message: str, details: bytes = b"", *, http_status: int = 200) -> None:
        """Refuse a call; `http_status` is not 200 for a request that is not a gRPC call.

        It counts as a call without a key, so that an unread refusal does not make the connection busy.
        """
        if not self.ended:
            self.restrict(0)
            self._complete()
            self.trailers = refusal_block(http_status, code, message, details)
            self._outbound.pump(self)

    def check(self, size: int) -> None:
        """Raise `MessageFailed` if a message of `size` bytes is too long to be sent."""
        self._outbound.check(size)

    def hold(self, size: int, *, is_next: bool) -> None:
        """Count an answer of `size` bytes before it is sent; `release` ends that.

        `is_next`: no other answer of the stream has to be sent before it.

        Raises:
            MessageFailed: too many bytes of answers are unsent.
        """
        self._outbound.check_room(size, ahead=not is_next)
        self._outbound.hold(size)
        self._outbound.ahead_bytes += size

    def release(self, size: int) -> None:
        """Count `size` bytes less."""
        self._outbound.hold(-size)
        self._outbound.ahead_bytes -= size

    def pause(self) -> None:
        """Stop consuming messages: once its window is used up, the client waits until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Consume messages again."""
        if not self.paused:
            return
        self.paused = False
        reader = self._reader
        if reader is not None and reader.unsplit:
            try:
                self._read_on(reader)
            except MessageFailed as err:
                self.listener.on_failure(err)
            if not (self.remote_open or reader.unsplit or self.ended):  # paused or not: see `half_close`
                self._half_closed()
        self._inbound.extend(self)

    def fail(self, error: MessageFailed) -> None:
        """End the call with an error, and stop its work."""
        if not self.ended:
            listener = self.listener  # which `on_failure` may replace
            listener.on_failure(error)
            listener.on_cancel()

    def cancel(self) -> None:
        """End the call, because the client cancelled it: nothing more is sent."""
        self._complete()
        self._outbound.drop(self)
        self.listener.on_cancel()
        self.listener = ENDED

    def _complete(self) -> None:
        """End the answer, and drop received bytes: the client may read the rest of the answer hours later."""
        self.ended = True
        self._reader = None

    def _put(self, message: Encoded) -> bool:
        """Queue a message, unless the answer has ended."""
        parts = (message,) if isinstance(message, bytes) else message
        size = sum(map(len, parts))
        self.check(size)
        if self.ended:
            return False
        self._begin()
        prefix = b"\0" + size.to_bytes(4, "big")
        if size < JOINED_BYTES:
            queued: list[bytes | memoryview] = [b"".join((prefix, *parts))]
        else:
            queued = [prefix, *[memoryview(part) for part in parts if part]]
        self._outbound.queue(self, queued, PREFIX_BYTES + size)
        return True

    def _fits_at_once(self, message: bytes) -> bool:
        """Tell whether an answer can be sent at once in one write, and reserve the window for it if so."""
        self.check(len(message))
        is_small = len(message) < JOINED_BYTES and not (self.ended or self._head_sent)
        return is_small and self._outbound.take_room(self, PREFIX_BYTES + len(message))

    def _begin(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            block = self._outbound.with_note(HEAD_BLOCK)
            self._outbound.write(frame(HEADERS, END_HEADERS, self.id, block))


def _room(ask: Callable[..., T], *arguments: int) -> T:
    """Call a method of a budget; turn its `BudgetExceeded` into `MessageFailed`, which ends the call."""
    try:
        return ask(*arguments)
    except BudgetExceeded as error:
        raise MessageFailed(StatusCode.RESOURCE_EXHAUSTED, f"SERVER: {error}") from error
