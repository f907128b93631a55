import re
import subprocess
import sys

from harness.paths import SCRIPTS


def test_the_book_keeping_of_a_request_is_measured_to_the_last_line():
    # In a process of its own, for it configures logging; few requests, so the goal may be missed.
    command = [sys.executable, str(SCRIPTS.parent / "telemetry.py"), "--requests", "50"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.stderr == ""
    assert [float(each) > 0 for each in re.findall(r" +([\d.]+) us", done.stdout)] == [True] * 6
