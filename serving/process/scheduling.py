"""The kernel's scheduling policy of the ranks of a group."""

from __future__ import annotations

import contextlib
import os
import sys


def use_batch_policy() -> None:
    """Let a thread of this process that wakes up wait for its turn, and not preempt the one that computes.

    The threads of a collective wake each other many times in each run. With the default policy (sched(7):
    SCHED_OTHER) one that wakes takes the core from a rank that all others wait for. The server keeps that
    policy, so it still preempts a rank.

    Threads and child processes that are started later inherit it. A policy that an operator chose, by
    `chrt` or systemd's `CPUSchedulingPolicy`, stays. Does nothing on other systems than Linux.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
