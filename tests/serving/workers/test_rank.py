"""The scheduling policy of the ranks of a group."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")

SHOWN = """
import os, subprocess, sys, threading
from torchere.serving.workers.rank import use_batch_policy
os.sched_setscheduler(0, getattr(os, sys.argv[1]), os.sched_param(0))
use_batch_policy()
def show():
    print(os.sched_getscheduler(0), flush=True)
thread = threading.Thread(target=show)
thread.start()
thread.join()
# Of a child that starts fast even where it gets little time: the 41st field is its policy.
stat = subprocess.run(["cat", "/proc/self/stat"], stdout=subprocess.PIPE, check=True).stdout
print(int(stat.split()[40]))
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")],
    ids=["default", "an operator's own"],
)
def test_threads_and_children_wait_for_their_turn_unless_an_operator_chose(before: str, after: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, before], capture_output=True, text=True, check=True, timeout=280
    )
    assert [int(policy) for policy in done.stdout.split()] == [getattr(os, after)] * 2
