"""Processor time of a process tree."""

import subprocess
import sys

from harness.cpu_time import stat_fields, tree_cpu_s

BURN = "import time\nwhile time.process_time() < 0.2: pass\n"
CHILD = (
    f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\nprint('burnt', flush=True)\n"
)


def test_a_line_is_read_whatever_the_name():
    line = "7 (a b) c) S 3 7 7 0 -1 0 0 0 0 0 10 20 30 40 20 0 1 0 5 0 0"
    assert stat_fields(line) == (3, 100)


def test_children_count_also_when_they_have_ended():
    command = [sys.executable, "-c", f"{CHILD}input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        assert tree_cpu_s(process.pid) >= 0.2
        process.communicate(b"\n")
