"""Ends incomplete calls whose clients send nothing, or too little."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torchere.serving.frontend.http2.messages import MessageFailed, StatusCode
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.io.watchdog import Stalls

INCOMPLETE_TIMEOUT_S = 60.0  # between two checks; shorter at shutdown
Arrived = tuple[int, int, bool]  # messages and bytes of a call, and whether it waits for its client


class IncompleteCalls(Stalls[int, Arrived]):
    """Watchdog of one connection's calls that may receive more. Used on the event loop only.

    `min_upload_rate`: bytes per second that a client must send of an incomplete message; 0: any byte will do.
    """

    __slots__ = ("_min_upload_rate", "_streams")

    def __init__(self, streams: Mapping[int, Stream], min_upload_rate: float) -> None:
        super().__init__(INCOMPLETE_TIMEOUT_S, self._progress, self._end, self._is_stalled)
        self._streams = streams
        self._min_upload_rate = min_upload_rate

    def _progress(self) -> dict[int, Arrived]:
        """Return the progress of each call that may receive more, by the id of its stream.

        Calls that do not wait for their client are included: a message that begins later starts no check.
        """
        return {
            stream.id: (stream.messages, stream.arrived_bytes, stream.waits_for_client)
            for stream in self._streams.values()
            if stream.remote_open and not stream.ended
        }

    def _is_stalled(self, before: Arrived, now: Arrived) -> bool:
        """Tell whether a call has received no message, and too few bytes, since the last check."""
        least = max(1.0, self._min_upload_rate * self._every_s)
        return before[2] and now[2] and now[0] == before[0] and now[1] - before[1] < least

    def _end(self, stalled: Collection[int]) -> None:
        for stream_id in stalled:
            stream = self._streams.get(stream_id)
            if stream is not None:
                text = "SERVER: The rest of the call did not come in time"
                stream.listener.on_failure(MessageFailed(StatusCode.DEADLINE_EXCEEDED, text))
