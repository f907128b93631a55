"""How often a client may send frames that move nothing (RFC 9113, 10.5)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode

if TYPE_CHECKING:
    from torchere.serving.frontend.http2.outflow import Outflow

CHATTER = 1000  # frames that move nothing, within `CHATTER_S`; keepalives are one in seconds
CHATTER_S = 10.0
# More that a client may send. It acknowledges what it got, some every 4 KiB, and gives up what crosses with
# its answer.
EARNED_BY_ANSWER = 4  # and by each part that it took of a longer one
EARNING_BYTES = 1024  # of longer answers


class Chatter:
    """Counts the frames of one connection that move nothing. Lives on the event loop.

    Attributes:
        answers: how many calls were answered, from the connection's beginning on.
    """

    __slots__ = ("_allowed", "_count", "_earned_before", "_earned_by_then", "_outflow", "_since_s", "answers")

    def __init__(self, outflow: Outflow) -> None:
        self._outflow = outflow
        self.answers = 0
        self._count = 0
        self._allowed = CHATTER
        self._since_s = 0.0
        self._earned_before = self._earned_by_then = 0  # when the last ten seconds began, and these

    def count(self, frames: int = 1) -> None:
        """So many came.

        Raises:
            ConnectionBroken: it is one too many.
        """
        self._count += frames
        if self._count < self._allowed:
            return
        now_s, earned = time.monotonic(), self._earned()
        if now_s - self._since_s >= CHATTER_S:
            self._count, self._since_s = frames, now_s
            # What was earned just before may come about just now.
            self._earned_before, self._earned_by_then = self._earned_by_then, earned
        self._allowed = CHATTER + earned - self._earned_before
        if self._count >= self._allowed:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that move nothing")

    def _earned(self) -> int:
        outflow = self._outflow
        return EARNED_BY_ANSWER * (self.answers + outflow.sends) + outflow.sent_bytes // EARNING_BYTES
