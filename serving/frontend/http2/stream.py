"""One call on a connection: what has come of it, what is to go out, and who takes it in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchere.serving.frontend.http2.frame_reader import Piece
from torchere.serving.frontend.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, head
from torchere.serving.frontend.http2.header_blocks import (
    HEAD_BLOCK,
    OK_BLOCK,
    RequestHead,
    refusal_block,
    status_block,
)
from torchere.serving.frontend.http2.inflow import STREAM_WINDOW_BYTES
from torchere.serving.frontend.http2.messages import (
    PREFIX_BYTES,
    MessageFailed,
    MessageReader,
    Packed,
    Received,
)
from torchere.serving.frontend.http2.receiver import OVER, Receiver
from torchere.serving.frontend.http2.status import StatusCode

if TYPE_CHECKING:
    from torchere.serving.frontend.http2.connection import Connection

HIGH_WATER_BYTES = 65_536  # of what waits to go out; whoever makes more is asked to wait
JOINED_BYTES = 65_536  # below this, copying a message is cheaper than writing it in parts
Encoded = bytes | Sequence[bytes | memoryview]  # whole, or the parts of a long one
_LAST = END_STREAM | END_HEADERS


class Stream:
    """Answer it once: with `answer`, or with any number of `send` and one `end`. Lives on the event loop."""

    __slots__ = (
        *("_drained", "_ended", "_head_sent", "_waiting_bytes", "allowed_bytes", "arrived_bytes", "brought"),
        *("came_bytes", "connection", "head", "held_bytes", "id", "outbox", "paused", "reader", "receiver"),
        *("remote_open", "sent_bytes", "trailers", "window"),
    )

    receiver: Receiver

    def __init__(self, connection: Connection, stream_id: int, request: RequestHead, window: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.head = request
        self.reader = MessageReader(connection.listening.receive_limit_bytes, request.encoding)
        self.remote_open = True
        self.allowed_bytes = STREAM_WINDOW_BYTES  # what the client may send in all, as it was told
        self.came_bytes = 0  # of frames of DATA, in all; a frame counts when it begins
        self.brought = False  # a whole message came
        self.arrived_bytes = 0  # of messages, in all, before the call was whole; see `Unfinished`
        self.held_bytes = 0  # of these, until the call is whole or the message taken
        self.paused = False  # nobody takes its messages: it gets no new leave
        self.window = window  # what the client takes in
        self.sent_bytes = 0  # of answers that had to wait
        self.outbox: deque[bytes | memoryview] = deque()
        self.trailers: bytes | None = None  # the last header block, once it is known
        self._waiting_bytes = 0
        self._head_sent = False
        self._ended = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether its answer is complete, as far as whoever answers is concerned."""
        return self._ended

    @property
    def owes(self) -> bool:
        """Whether the call stands still until its client sends the rest of it."""
        return (
            self.remote_open
            and not (self._ended or self.paused)
            and (self.receiver.takes_one or not self.reader.at_message_end)
        )

    def take(self, pieces: Sequence[Piece], *, is_last: bool) -> None:
        """Bytes of the client's messages came."""
        try:
            if not (is_last or self._ended):
                self.connection.unfinished.hold(self, sum(map(len, pieces)))
            for piece in pieces:
                if self._ended:
                    break
                if self.paused or self.reader.behind:
                    self.reader.behind += piece
                else:
                    self._hand_over(self.reader.feed(piece))
                    if self.reader.behind:
                        self._read_on()
        except MessageFailed as err:
            self.receiver.flawed(err.code, str(err))

    def _hand_over(self, messages: Sequence[Received | Packed]) -> None:
        for message in messages:
            self.brought = True
            self.receiver.message(message)

    def _read_on(self) -> None:
        """Split what came, as long as somebody takes it: the messages may take a hundred times its memory."""
        while self.reader.behind and not (self.paused or self._ended):
            self._hand_over(self.reader.more())

    def taken(self, size: int) -> None:
        """A message of so many bytes is not held for its client any more."""
        if self.held_bytes:
            self.connection.unfinished.let_go(self, PREFIX_BYTES + size)

    def taken_all(self) -> None:
        """The same for all that came of it."""
        if self.held_bytes:
            self.connection.unfinished.let_go(self, self.held_bytes)

    def holds(self, size: int) -> None:
        """So much is held for it, though it came whole.

        Raises:
            MessageFailed: there is no room for it.
        """
        if size > self.held_bytes:
            self.connection.unfinished.hold(self, size - self.held_bytes)

    def half_close(self) -> None:
        """The client sends no more."""
        self.remote_open = False
        if not (self._ended or self.reader.behind):  # which is so while it is paused only
            self._half_closed()

    def _half_closed(self) -> None:
        if self.reader.at_message_end:
            self.receiver.half_closed()
        else:
            self.receiver.flawed(StatusCode.INTERNAL, "the stream ends in the middle of a message")

    def answer(self, message: Encoded) -> None:
        """Answer with one message, and well.

        Raises:
            MessageFailed: it is longer than may be; nothing was sent.
        """
        if not isinstance(message, bytes) or not self._goes_at_once(message):
            self._put(message)
            self.end()  # sends all of it together
            return
        self._ended = True
        stream_id = self.id
        self.connection.write(
            frame(HEADERS, END_HEADERS, stream_id, HEAD_BLOCK)
            + head(PREFIX_BYTES + len(message), DATA, 0, stream_id)
            + b"\0"
            + len(message).to_bytes(4, "big")
            + message
            + frame(HEADERS, _LAST, stream_id, OK_BLOCK)
        )
        self.connection.finished(self)

    def send(self, message: Encoded) -> None:
        """Send one message of several.

        Raises:
            MessageFailed: it is longer than may be; nothing was sent of it.
        """
        if self._put(message):
            self.connection.outflow.pump(self)

    def end(self, code: int = 0, message: str = "") -> None:
        """End the answer with a gRPC status, behind what still waits to go out."""
        if self._ended:
            return
        self._ended = True
        if code == 0:
            self._begin()
            self.trailers = OK_BLOCK
        elif self._head_sent:
            self.trailers = status_block(code, message)
        else:
            self.trailers = refusal_block(200, code, message)
        self.connection.outflow.pump(self)

    def refuse(self, http_status: int, code: int, message: str) -> None:
        """Answer what is no gRPC call, for clients that only look at the HTTP status."""
        if not self._ended:
            self._ended = True
            self.trailers = refusal_block(http_status, code, message)
            self.connection.outflow.pump(self)

    def check(self, size: int) -> None:
        """Let a message of so many bytes pass.

        Raises:
            MessageFailed: it is longer than may be.
        """
        limit_bytes = self.connection.listening.send_limit_bytes
        if size > limit_bytes:
            raise MessageFailed(
                StatusCode.RESOURCE_EXHAUSTED,
                f"SERVER: Sent message larger than max ({size} vs. {limit_bytes})",
            )

    async def drained(self) -> None:
        """Wait until the client has taken in enough for more to be made; at once, if it has."""
        if self._waiting_bytes > HIGH_WATER_BYTES:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def sent(self, size: int) -> None:
        """So much of what waited went out."""
        self.sent_bytes += size
        self._wait_for(-size)
        if self._waiting_bytes <= HIGH_WATER_BYTES:
            self._wake()

    def pause(self) -> None:
        """Have the client wait, once its window is full, until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Take in more."""
        if not self.paused:
            return
        self.paused = False
        if self.reader.behind:
            try:
                self._read_on()
            except MessageFailed as err:
                self.receiver.flawed(err.code, str(err))
            if not (self.remote_open or self.reader.behind or self._ended):  # paused or not: see `half_close`
                self._half_closed()
        self.connection.inflow.give_leave(self)

    def lost(self) -> None:
        """It is over from the client's side: nothing more goes out."""
        self._ended = True
        self.outbox.clear()
        self.reader.behind.clear()
        self._wait_for(-self._waiting_bytes)
        self._wake()
        self.receiver.gone()
        self.receiver = OVER

    def _put(self, message: Encoded) -> bool:
        """Have a message wait to go out, unless the answer has ended."""
        parts = (message,) if isinstance(message, bytes) else message
        size = sum(map(len, parts))
        self.check(size)
        if self._ended:
            return False
        self._begin()
        prefix = b"\0" + size.to_bytes(4, "big")
        if size < JOINED_BYTES:
            self.outbox.append(b"".join((prefix, *parts)))
        else:
            self.outbox.append(prefix)
            self.outbox += [memoryview(part) for part in parts if part]
        self._wait_for(PREFIX_BYTES + size)
        return True

    def _wait_for(self, size: int) -> None:
        self._waiting_bytes += size
        self.connection.outflow.held_bytes += size

    def _goes_at_once(self, message: bytes) -> bool:
        """Whether a message can go out whole, with all that is around it; takes the room for it."""
        self.check(len(message))
        is_small = len(message) < JOINED_BYTES and not (self._ended or self._head_sent)
        return is_small and self.connection.outflow.take_room(self, PREFIX_BYTES + len(message))

    def _begin(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            block = self.connection.outflow.noted(HEAD_BLOCK)
            self.connection.write(frame(HEADERS, END_HEADERS, self.id, block))

    def _wake(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
