"""What a supervisor does when its server has ended: pure functions of how it ended and what it was at.

Standard library only: the supervisor is small.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from enum import Enum

from torchere.serving.crash_journal import Crash, History, ServerState
from torchere.serving.execution.loss import describe_exit

CRASHES_IN_THREADS = 2  # of one version; then it runs in processes
STABLE_S = 300.0  # a server that served this long ends the count of crashes in a row
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # sent on purpose
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)
_CURRENT_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+)", re.MULTILINE)


class AfterExit(Enum):
    """What to do next."""

    END = "end"  # end likewise
    RESTART = "restart"


def after_exit(code: int, state: ServerState, told_to_end: bool, has_served: bool = False) -> AfterExit:
    """Decide what follows the end of a server.

    Args:
        code: Its exit status; negative the number of a signal.
        state: How far it said it was.
        told_to_end: The supervisor has handed on a signal that ends it.
        has_served: One before it did, by the same command.
    """
    if told_to_end or state is ServerState.ENDING or -code in ENDING_SIGNALS:
        return AfterExit.END
    if code < 0 or state is not ServerState.STARTING:
        return AfterExit.RESTART
    # A server that ends by itself before it serves refuses its configuration; the next would, too. Where one
    # has served, something is lacking that may come back: a disk, a port, memory.
    return AfterExit.RESTART if code and has_served else AfterExit.END


def to_blame(code: int, trace: str, running: Mapping[int, str]) -> tuple[str, ...]:
    """The versions whose executor threads may have caused an end.

    Args:
        code: The exit status, as above.
        trace: What `faulthandler` wrote; "" when nothing.
        running: What each thread was running, by its identity.

    Returns:
        The one whose thread the trace shows, else all that were running; nobody for a kill from outside.
    """
    if code < 0 and -code not in _FAULTS:
        return ()
    found = _CURRENT_THREAD.search(trace)
    if found and (version := running.get(int(found.group(1), 16))):
        return (version,)
    return tuple(sorted(set(running.values())))


def learn(history: History, crash: Crash) -> History:
    """The history after one more crash: a version that crashed too often is not run in threads again."""
    crashes = (*history.crashes, crash)
    isolated = dict(history.isolated)
    for version in crash.models:
        count = sum(version in each.models for each in crashes)
        if count >= CRASHES_IN_THREADS and version not in isolated:
            isolated[version] = f"its executor threads crashed the server {count} times, last: {crash.cause}"
    return History(crashes, isolated)


def cause_of(code: int, hung_s: float) -> str:
    """An end in words; `hung_s` is how long the event loop had stood still when the supervisor ended it."""
    if hung_s:
        return f"hung: its event loop stood still for {hung_s:g} s"
    return describe_exit(code)
