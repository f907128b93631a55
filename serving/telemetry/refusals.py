"""The rejection reason of a prediction as a label value: a pure function of the error."""

from __future__ import annotations

from torchere.serving.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    OverBudget,
    Quarantined,
    QueueFull,
    Restarting,
    ServingError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)

TOO_LARGE = "too_large"  # of a body; there is no `ServingError` class for it
# The first matching class counts, so subclasses come before their base classes.
_REASONS: tuple[tuple[type[ServingError], str], ...] = (
    (QueueFull, "queue_full"),
    (TooManyRequests, "client_limit"),
    (OverBudget, "budget"),
    (Restarting, "restarting"),
    (Unavailable, "not_ready"),
    (DeadlineExceeded, "deadline"),
    (Unauthorized, "auth"),
    (NotFound, "not_found"),
    (Quarantined, "quarantined"),
    (InvalidRequest, "invalid"),
)
# Every version starts with a counter for each of these reasons.
USUAL = ("queue_full", "not_ready", "deadline")


def refusal_reason(error: ServingError) -> str:
    """Return the value of the label `reason`; for an error that is not a rejection, its code."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), error.code)
