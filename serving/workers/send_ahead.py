"""Decides how many batches are sent to a lane before it has answered the last one, by measured times."""

from __future__ import annotations

# A lane with a shorter batch time gets batches sent ahead, so that it need not wait for the server in
# between. A slower one does not, because a batch sent ahead can't move to a process that is free earlier.
QUICK_S = 0.002
# With batches of 1 to 7 ms and one sent ahead for each, two lanes did 5 to 8 % more of them (measured when
# lanes shared a socket). With longer batches the wait for the server in between matters less, and a request
# of higher priority should not have to wait for a batch that was sent ahead.
QUICK_IN_LANES_S = 0.01
AHEAD_S = 0.008  # at most this much work inside a quick lane
MOST_INSIDE = 8  # with 8 instead of 4, the quickest handlers took 4 % less processor time for a request
# Full batches of several requests sent ahead, at any batch time. Between two batches a lane waits for the
# server, which handles the answers of a whole batch first: 2 ms in 120 for 16 rows of MiniLM. One batch is
# enough for all lanes of a process, because another can be sent as soon as a lane takes it.
FULL_AHEAD = 1


def inside_a_lane(mean_run_s: float, lanes: int) -> int:
    """Return how many batches each lane may have inside, including the running one.

    Args:
        mean_run_s: mean seconds of a batch in a lane.
        lanes: the number of lanes of the process.

    >>> inside_a_lane(0.0001, 1), inside_a_lane(0.004, 1), inside_a_lane(0.004, 2), inside_a_lane(0.02, 2)
    (8, 1, 2, 1)
    """
    if mean_run_s < QUICK_S:
        return min(MOST_INSIDE, int(AHEAD_S / max(mean_run_s, AHEAD_S / MOST_INSIDE)))
    return 2 if lanes > 1 and mean_run_s < QUICK_IN_LANES_S else 1
