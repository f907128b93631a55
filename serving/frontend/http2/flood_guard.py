"""Flood guard: limits a client's frames that move no data, and its cancellations (RFC 9113, 10.5)."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode

IDLE_FRAMES = 1000  # allowed within `INTERVAL_S`; keep-alive pings are seconds apart
INTERVAL_S = 10.0
# Cancellations of calls whose whole request has arrived, allowed in the same interval: a client with 1,000
# open calls (the limit of a connection) whose deadlines of 500 ms all pass sends so many.
CANCELLATIONS = 20_000


class FloodGuard:
    """Counts frames of one connection that cost the server more than the client. Used on the event loop only.

    Args:
        frames: name of the frames in the error.
        idle_frames: how many frames are allowed within `INTERVAL_S`.
        earned: returns the number of additional frames allowed since the start of the connection, because
            clients acknowledge answers, and cancel calls while their answers are on the way.
    """

    __slots__ = (
        *("_allowed", "_count", "_earned", "_earned_before", "_earned_by_then", "_frames", "_idle_frames"),
        "_since_s",
    )

    def __init__(
        self,
        earned: Callable[[], int],
        frames: str = "frames that move nothing",
        idle_frames: int | None = None,
    ) -> None:
        self._earned = earned
        self._frames = frames
        self._count = 0
        self._idle_frames = self._allowed = IDLE_FRAMES if idle_frames is None else idle_frames
        self._since_s = 0.0
        self._earned_before = self._earned_by_then = 0  # at the start of the previous and of this interval

    def count(self, frames: int = 1) -> None:
        """Count frames that arrived.

        Raises:
            ConnectionBroken: the client sent too many of them.
        """
        self._count += frames
        if self._count < self._allowed:
            return
        now_s, earned = time.monotonic(), self._earned()
        if now_s - self._since_s >= INTERVAL_S:
            self._count, self._since_s = frames, now_s
            # Answers of the previous interval may be acknowledged in this one.
            self._earned_before, self._earned_by_then = self._earned_by_then, earned
        self._allowed = self._idle_frames + earned - self._earned_before
        if self._count >= self._allowed:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._frames}")
