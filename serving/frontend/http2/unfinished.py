"""What lies here of calls whose clients have not sent all of them: how much, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchere.serving.frontend.http2.messages import MessageFailed
from torchere.serving.frontend.http2.status import StatusCode
from torchere.serving.frontend.stalls import Stalls

if TYPE_CHECKING:
    from torchere.serving.frontend.http2.stream import Stream

# Of one connection: some eighty calls on their way at a time, each as long as it may be by default. Where
# messages may be longer, four of them.
UNFINISHED_BYTES = 2**29
UNFINISHED_MESSAGES = 4
SILENCE_S = 60.0  # between two looks: a call of which nothing more came from one to the next is given up


class Unfinished:
    """Bounds what one connection's clients may leave lying. Lives on the event loop.

    Counts what came of a call before its end, and of a stream of messages what nobody has taken.

    Args:
        streams: those of the connection.
        receive_limit_bytes: of a message.
    """

    __slots__ = ("_limit_bytes", "_stalls", "_streams", "held_bytes", "stop", "watch")

    def __init__(self, streams: Mapping[int, Stream], receive_limit_bytes: int) -> None:
        self._streams = streams
        self._limit_bytes = max(UNFINISHED_BYTES, UNFINISHED_MESSAGES * receive_limit_bytes)
        self._stalls = Stalls(SILENCE_S, self._owed, self._give_up)
        self.held_bytes = 0
        self.watch: Callable[[], None] = self._stalls.watch  # a call began that is not whole
        self.stop: Callable[[], None] = self._stalls.stop  # the connection is gone

    def hold(self, stream: Stream, size: int) -> None:
        """So much of a call came, and not its end.

        Raises:
            MessageFailed: there is no room for it.
        """
        if self.held_bytes + size > self._limit_bytes:
            raise MessageFailed(
                StatusCode.RESOURCE_EXHAUSTED,
                f"SERVER: Unfinished calls of this connection have more than {self._limit_bytes} bytes",
            )
        self.held_bytes += size
        stream.held_bytes += size
        stream.arrived_bytes += size

    def let_go(self, stream: Stream, size: int) -> None:
        """So much of it was taken."""
        size = min(size, stream.held_bytes)
        self.held_bytes -= size
        stream.held_bytes -= size

    def _owed(self) -> dict[int, int]:
        return {stream.id: stream.arrived_bytes for stream in self._streams.values() if stream.owes}

    def _give_up(self, owed: Mapping[int, int]) -> None:
        for stream_id in owed:
            stream = self._streams.get(stream_id)
            if stream is not None:
                stream.receiver.flawed(
                    StatusCode.DEADLINE_EXCEEDED, "SERVER: The rest of the call did not come in time"
                )
