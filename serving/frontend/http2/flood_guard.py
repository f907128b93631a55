"""Flood guard: limits a client's frames that move no data (RFC 9113, 10.5)."""

from __future__ import annotations

import time
from collections.abc import Callable

from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode

IDLE_FRAMES = 1000  # allowed within `INTERVAL_S`; keep-alive pings are seconds apart
INTERVAL_S = 10.0


class FloodGuard:
    """Counts the frames of one connection that move no data. Used on the event loop only.

    Args:
        earned: returns the number of additional frames allowed since the start of the connection, because
            clients acknowledge answers, and cancel calls while their answers are on the way.
    """

    __slots__ = ("_allowed", "_count", "_earned", "_earned_before", "_earned_by_then", "_since_s")

    def __init__(self, earned: Callable[[], int]) -> None:
        self._earned = earned
        self._count = 0
        self._allowed = IDLE_FRAMES
        self._since_s = 0.0
        self._earned_before = self._earned_by_then = 0  # when the previous interval began, and this one

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
        self._allowed = IDLE_FRAMES + earned - self._earned_before
        if self._count >= self._allowed:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that move nothing")
