"""The retry policy. Free of I/O: the remaining time and the random number are arguments."""

from __future__ import annotations

from dataclasses import dataclass

from torchere.client.errors import ClientError, ConnectionFailed, Unavailable


@dataclass(frozen=True, slots=True)
class Retries:
    """The number of retries of a call and the pauses between them.

    A request is sent again only if it can't have run: after a refused connection, or a 429 or 503 that does
    not come from the model's handler. The pause before attempt n + 1 is the time in `Retry-After`, or else
    doubles from `first_pause_s`; it is at most `longest_pause_s`, and jittered. If a pause would end after
    the deadline of the call, the last error is raised instead.

    Args:
        most: attempts after the first; 0 disables retries.
        first_pause_s: seconds before the second attempt.
        longest_pause_s: the longest pause in seconds. A longer `Retry-After` ends the retries.
    """

    most: int = 3
    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0

    def __post_init__(self) -> None:
        if self.most < 0 or self.first_pause_s <= 0 or self.longest_pause_s < self.first_pause_s:
            raise ValueError(f"found {self}; expected most >= 0 and 0 < first_pause_s <= longest_pause_s")

    def pause_s(self, error: ClientError, attempt: int, remaining_s: float, dice: float) -> float | None:
        """Return the seconds to wait before the next attempt; None if there must be none.

        Args:
            error: the error of the last attempt.
            attempt: the number of attempts so far, from 1.
            remaining_s: seconds until the deadline.
            dice: a random number from 0 to 1, for the jitter.
        """
        if attempt > self.most or not _may_be_sent_again(error):
            return None
        asked_s = error.retry_after_s if isinstance(error, Unavailable) else None
        if asked_s is not None:
            # Wait at least the time that the server asks for; the jitter spreads the retries of its clients.
            pause = asked_s * (1 + dice / 4)
            if asked_s > self.longest_pause_s:
                return None
        else:
            pause = min(self.first_pause_s * 2 ** (attempt - 1), self.longest_pause_s) * (0.5 + dice / 2)
        return pause if pause < remaining_s else None


def _may_be_sent_again(error: ClientError) -> bool:
    return isinstance(error, Unavailable) or (isinstance(error, ConnectionFailed) and error.refused)
