"""The soak's arithmetic, and a soak of some seconds."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from soaking.samples import BOUNDS, Sample, levels, sparkline, svg

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"


def course(**rise: float) -> list[Sample]:
    """A hundred samples of a server at rest, in which the named quantities rise by so much at each."""
    level = {"rss_mb": 300.0, "worker_mb": 250.0, "files": 60.0, "threads": 20.0, "temp_files": 9.0}
    return [
        Sample(at_s, **{name: value + rise.get(name, 0.0) * at_s for name, value in level.items()})
        for at_s in range(100)
    ]


def test_what_stays_is_level() -> None:
    assert all(level.holds for level in levels(course()))


@pytest.mark.parametrize("name", [bound.name for bound in BOUNDS])
def test_a_slow_leak_of_anything_is_seen(name: str) -> None:
    risen = [level.bound.name for level in levels(course(**{name: 2.0})) if not level.holds]
    assert risen == [name]


def test_a_rise_during_the_warm_up_does_not_count() -> None:
    cold = [Sample(at_s, 100.0 + at_s, 250.0, 60.0, 20.0, 9.0) for at_s in range(30)]
    assert all(level.holds for level in levels([*cold, *course()]))


def test_the_course_is_drawn() -> None:
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 7.0]) == "▁█"
    picture = svg(course(files=1.0))
    assert picture.count("<polyline") == 5
    assert "files: 60 to 159, at most 159" in picture


def test_a_short_soak_finds_everything_level_and_every_answer_right(tmp_path: Path) -> None:
    picture = tmp_path / "soak.svg"
    options = ["--minutes", "0.2", "--clients", "3", "--svg", str(picture)]
    command = [sys.executable, str(SOAK), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "level, and every answer as expected" in done.stdout
    assert " kill" in done.stdout
    assert " tiny" in done.stdout
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("whom", "number", "status", "said"),
    [
        ("server", signal.SIGKILL, 1, "the server ended with status -9"),
        ("soak", signal.SIGTERM, 1, "ended by SIGTERM: no verdict"),
    ],
)
def test_a_soak_that_is_cut_short_says_so_and_leaves_no_server(
    whom: str, number: signal.Signals, status: int, said: str
) -> None:
    command = [sys.executable, "-u", str(SOAK), "--minutes", "10", "--clients", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as soak:
        assert soak.stdout is not None
        assert "0 s of 600" in soak.stdout.readline()
        (server,) = [one for one in psutil.Process(soak.pid).children() if "serve" in one.cmdline()]
        (server if whom == "server" else soak).send_signal(number)
        rest = soak.stdout.read()

    assert said in rest
    assert soak.returncode == status
    assert not server.is_running()
