"""When a lost executor comes back: a pure function of how often it was lost."""

from __future__ import annotations

BACKOFF_S = (0.0, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 89.0, 144.0)


def restart_delay_s(
    losses: int, first_loss_s: float, now_s: float, max_retry_timeout_s: float
) -> float | None:
    """How long to wait before executor number `losses` + 1 in a row is started; None: give up.

    `losses` counts from the last time an executor answered a batch. The first comes back at once, the others
    after TorchServe's Fibonacci steps; past `max_retry_timeout_s` since the first loss it stays down.
    """
    if now_s - first_loss_s > max_retry_timeout_s:
        return None
    return BACKOFF_S[min(losses, len(BACKOFF_S)) - 1]
