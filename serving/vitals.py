"""What a supervised server tells its supervisor while it lives; see `crash_journal.py`."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
from collections.abc import Sequence

from torchere.serving.crash_journal import Journal
from torchere.serving.execution.parent import die_with_parent

BEAT_EVERY_S = 1.0


def supervised_command(command: Sequence[str], as_json: bool, name: str | None = None) -> list[str]:
    """The command that runs `command` under a supervisor; exec it, so that process id and signals stay.

    The `name` that tools look for, which follows `--process-name`, is then the supervisor's alone.
    """
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    words = ["json" if as_json else "text", *([name] if name else [])]
    server = [word for word in command if not name or word not in ("--process-name", name)]
    return [sys.executable, *safe_path, "-m", "torchere.serving.supervisor", *words, "--", *server]


def open_journal(descriptors: str) -> Journal:
    """Take over what the supervisor handed down: "JOURNAL,TRACE,PID", two numbers of open files and its own.

    From now on this process ends with its supervisor, and writes the trace of a native crash to the second.

    Raises:
        ValueError, OSError: nothing of the kind was handed down, or the supervisor has ended already.
    """
    journal, trace, supervisor = (int(number) for number in descriptors.split(","))
    opened = Journal(journal)
    for descriptor in (journal, trace):
        os.set_inheritable(descriptor, False)  # workers have no business there
    die_with_parent()
    if os.getppid() != supervisor:  # it was ended in the moment before, and nobody would end this one
        raise ProcessLookupError(f"the supervisor, process {supervisor}, has ended")
    faulthandler.enable(file=trace)
    return opened


async def beat(journal: Journal) -> None:
    """Say again and again that the event loop turns. Runs until it is cancelled."""
    while True:
        journal.beat()
        await asyncio.sleep(BEAT_EVERY_S)
