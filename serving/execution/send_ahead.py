"""How many batches are sent to a worker process before it has answered the first of them. Pure."""

from __future__ import annotations

# A worker that answers within this long gets batches sent ahead, so that it need not wait for the server in
# between; a slower one does not, because a batch sent ahead can't go to a neighbour that comes free earlier.
QUICK_S = 0.002
AHEAD_S = 0.008  # of work inside a quick worker, at most
MOST_AHEAD = 8  # from 4 to 8 the quickest handlers took 4 % less processor time for a request


def depth(mean_run_s: float) -> int:
    """How many batches may be inside a worker that takes so long for each, the running one included."""
    if mean_run_s >= QUICK_S:
        return 1
    return min(MOST_AHEAD, int(AHEAD_S / max(mean_run_s, AHEAD_S / MOST_AHEAD)))
