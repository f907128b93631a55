"""How many batches are sent to executors before they have answered those they are at. Pure."""

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


# Threads take from one inbox, so a batch sent ahead goes to whichever comes free first, and a longer one may
# be sent, too: with batches of 1 to 7 ms, two threads did 5 to 8 % more of them. With longer ones the wait
# for the loop in between is little, and a request of higher priority should not find one before it.
QUICK_IN_THREAD_S = 0.01


def ahead_of_threads(threads: int, mean_wall_s: float) -> int:
    """How many more batches than there are threads may be in their inbox."""
    return threads if mean_wall_s < QUICK_IN_THREAD_S else 0


# Full batches of several requests, however long they take. Between two batches a thread waits for the loop,
# which has just got the answers of a whole one: of MiniLM's 16 rows, 2 ms in 120. One is enough for all
# threads, because whoever takes it lets the next one in.
FULL_AHEAD = 1
