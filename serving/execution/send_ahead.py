"""How many batches are sent to lanes before they have answered the ones they are at. Pure."""

from __future__ import annotations

# A lane that answers within this long gets batches sent ahead, so that it need not wait for the server in
# between; a slower one does not, because a batch sent ahead can't go to another process that is free earlier.
QUICK_S = 0.002
# Lanes of one process take batches from one socket, so one sent ahead goes to whichever lane is free first:
# with batches of 1 to 7 ms, two lanes did 5 to 8 % more of them. With longer ones the wait for the server in
# between is little, and a request of higher priority should not find one before it.
QUICK_IN_LANES_S = 0.01
AHEAD_S = 0.008  # of work inside a quick lane, at most
MOST_INSIDE = 8  # from 4 to 8 the quickest handlers took 4 % less processor time for a request
# Full batches of several requests, however long they take. Between two batches a lane waits for the server,
# which has just got the answers of a whole one: of MiniLM's 16 rows, 2 ms in 120. One is enough for all lanes
# of a process, because the lane that takes it lets the next one in.
FULL_AHEAD = 1


def inside_a_lane(mean_run_s: float, lanes: int) -> int:
    """How many batches may be inside for each lane, the running one included.

    Args:
        mean_run_s: how long a lane takes for a batch.
        lanes: of the process.

    >>> inside_a_lane(0.0001, 1), inside_a_lane(0.004, 1), inside_a_lane(0.004, 2), inside_a_lane(0.02, 2)
    (8, 1, 2, 1)
    """
    if mean_run_s < QUICK_S:
        return min(MOST_INSIDE, int(AHEAD_S / max(mean_run_s, AHEAD_S / MOST_INSIDE)))
    return 2 if lanes > 1 and mean_run_s < QUICK_IN_LANES_S else 1
