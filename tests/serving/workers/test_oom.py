"""The kernel's counter of killed processes, in the forms it has."""

from pathlib import Path

import pytest

from torchere.serving.workers.oom import FRESH_S, OomWatch, counter_files, counter_in


class Kernel:
    """A counter and a clock that the test moves."""

    def __init__(self) -> None:
        self.kills: int | None = 3
        self.now_s = 0.0

    def watch(self) -> OomWatch:
        return OomWatch(lambda: self.kills, lambda: self.now_s)


def test_each_kill_of_the_kernel_explains_one_lost_process() -> None:
    kernel = Kernel()
    watch = kernel.watch()
    assert not watch.claim()  # the three were before our time
    kernel.kills = 5
    assert [watch.claim() for _ in range(3)] == [True, True, False]


def test_a_kill_that_nobody_claims_soon_was_of_another_process() -> None:
    kernel = Kernel()
    watch = kernel.watch()
    kernel.kills = 6
    kernel.now_s = 100.0
    assert watch.claim()
    kernel.now_s += FRESH_S
    assert watch.claim()
    kernel.now_s += 0.1
    assert not watch.claim()


def test_without_a_counter_no_kill_is_the_kernels() -> None:
    kernel = Kernel()
    kernel.kills = None
    assert not kernel.watch().claim()


@pytest.mark.parametrize(
    ("group", "file", "text"),
    [
        ("0::/kubepods/pod", "kubepods/pod/memory.events", "low 0\noom 9\noom_kill 4\noom_group_kill 0\n"),
        ("0::/pod:1", "pod:1/memory.events", "oom_kill 4\n"),
        ("0::/outside", "memory.events", "oom_kill 4\n"),  # a container that sees its own group as the root
        ("5:cpu:/\n4:memory:/a", "memory/a/memory.oom_control", "under_oom 0\noom_kill 4\n"),
    ],
)
def test_the_counter_is_found_in_either_generation_of_control_groups(
    tmp_path: Path, group: str, file: str, text: str
) -> None:
    if group.startswith("0::"):
        (tmp_path / "cgroup.controllers").touch()
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    own = tmp_path / "cgroup"
    own.write_text(group + "\n")
    assert counter_in(counter_files(own, tmp_path))() == 4


def test_a_system_without_counters_has_none(tmp_path: Path) -> None:
    assert counter_in([tmp_path / "missing"])() is None
