"""The reason of a refused prediction as a label value: a pure function of the error."""

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
    Unauthorized,
    Unavailable,
)

TOO_LARGE = "too_large"  # the body; no `ServingError` class stands for it
# The first class that fits counts, so subclasses come before their bases.
_REASONS: tuple[tuple[type[ServingError], str], ...] = (
    (QueueFull, "queue_full"),
    (OverBudget, "budget"),
    (Restarting, "restarting"),
    (Unavailable, "not_ready"),
    (DeadlineExceeded, "deadline"),
    (Unauthorized, "auth"),
    (NotFound, "not_found"),
    (Quarantined, "quarantined"),
    (InvalidRequest, "invalid"),
)
# Reasons that every version has a counter for from the beginning.
USUAL = ("queue_full", "not_ready", "deadline")


def refusal_reason(error: ServingError) -> str:
    """Return the value of the label `reason`; for an error that is no refusal, its code."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), error.code)
