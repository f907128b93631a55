"""Whether to try again, and after how long. Pure: the clock and the dice are arguments."""

from __future__ import annotations

from dataclasses import dataclass

from torchere.client.errors import ClientError, ConnectionFailed, Unavailable


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how patiently a call is tried again.

    Only what can't have run is sent again: a refused connection, or an answer 429 or 503 that does not come
    from the model's handler. The pause before attempt n + 1 is what `Retry-After` says, or else doubles from
    `first_pause_s`; it is at most `longest_pause_s`, and jittered. No pause ends after the call's deadline:
    the last error is raised instead.

    Args:
        most: attempts after the first; 0 never tries again.
        first_pause_s: seconds before the second attempt.
        longest_pause_s: bound on each pause. A server that asks for more time is not asked again.
    """

    most: int = 3
    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0

    def __post_init__(self) -> None:
        if self.most < 0 or self.first_pause_s <= 0 or self.longest_pause_s < self.first_pause_s:
            raise ValueError(f"found {self}; expected most >= 0 and 0 < first_pause_s <= longest_pause_s")

    def pause_s(self, error: ClientError, attempt: int, remaining_s: float, dice: float) -> float | None:
        """Seconds to wait before the next attempt; None: give up.

        Args:
            error: what the attempt ended with.
            attempt: how many attempts there were, from 1.
            remaining_s: seconds until the deadline.
            dice: a random number from 0 up to 1.
        """
        if attempt > self.most or not _may_be_sent_again(error):
            return None
        asked_s = error.retry_after_s if isinstance(error, Unavailable) else None
        if asked_s is not None:
            # What the server asks for is the least; the jitter keeps its clients from coming all at once.
            pause = asked_s * (1 + dice / 4)
            if asked_s > self.longest_pause_s:
                return None
        else:
            pause = min(self.first_pause_s * 2 ** (attempt - 1), self.longest_pause_s) * (0.5 + dice / 2)
        return pause if pause < remaining_s else None


def _may_be_sent_again(error: ClientError) -> bool:
    return isinstance(error, Unavailable) or (isinstance(error, ConnectionFailed) and error.refused)
