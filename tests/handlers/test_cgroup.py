import os
import random
import threading

import pytest

from torchere.handlers.cgroup import CgroupSample, available_cores, pin_to_limit, sample_cgroup


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = {
    "cgroup.controllers": "cpu memory\n",
    "cpu.max": "150000 100000\n",
    "cpu.stat": "usage_usec 5\nnr_throttled 2\nthrottled_usec 1500000\n",
    "memory.max": "1000000\n",
    "memory.current": "250000\n",
}
V1 = {
    "cpu/cpu.cfs_quota_us": "150000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
    "cpu/cpu.stat": "nr_periods 9\nthrottled_time 1500000000\n",
    "memory/memory.limit_in_bytes": "1000000\n",
    "memory/memory.usage_in_bytes": "250000\n",
}


@pytest.mark.parametrize("files", [V2, V1])
def test_both_versions_tell_limits_and_use(tmp_path, files):
    write(tmp_path, files)
    assert sample_cgroup(tmp_path) == (1.5, pytest.approx(1.5), 1_000_000, 250_000)


@pytest.mark.parametrize(
    "files",
    [
        V2 | {"cpu.max": "max 100000\n", "memory.max": "max\n"},
        V1 | {"cpu/cpu.cfs_quota_us": "-1\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"},
    ],
)
def test_no_limit_is_none(tmp_path, files):
    write(tmp_path, files)
    sample = sample_cgroup(tmp_path)
    assert (sample.cpu_limit_cores, sample.memory_limit_bytes) == (None, None)
    assert sample.memory_bytes == 250_000


def below(folder, files):
    """The files of a group that is not the root: in `folder`, for version 1 of each controller."""
    return {
        f"{controller}/{folder}/{name}" if name else f"{folder}/{controller}": text
        for controller, _, name, text in ((*path.partition("/"), text) for path, text in files.items())
    }


UNLIMITED_V2 = V2 | {"cpu.max": "max 100000\n", "memory.max": "max\n"}
UNLIMITED_V1 = V1 | {
    "cpu/cpu.cfs_quota_us": "-1\n",
    "memory/memory.limit_in_bytes": "9223372036854771712\n",
}
UNIT = "system.slice/t.service"


@pytest.mark.parametrize(
    ("own", "root", "unit"),
    [
        (f"0::/{UNIT}\n", UNLIMITED_V2, below(UNIT, V2)),
        (f"0::/{UNIT}\n", UNLIMITED_V2, below("system.slice", V2) | below(UNIT, UNLIMITED_V2)),
        (f"0::/{UNIT}/worker\n", UNLIMITED_V2, below(UNIT, V2)),
        (f"0::/{UNIT}\n", V2, {}),  # a container whose own group is mounted as the root
        ("0::/../other\n", V2, below("other", UNLIMITED_V2)),
        (f"5:memory:/{UNIT}\n4:cpu,cpuacct:/{UNIT}\n0::/\n", UNLIMITED_V1, below(UNIT, V1)),
        (f"5:memory:/{UNIT}\n4:cpu,cpuacct:/{UNIT}\n", V1, below(UNIT, UNLIMITED_V1)),
    ],
    ids=["unit", "slice", "no such group", "container", "outside", "v1 unit", "v1 container"],
)
def test_the_least_limit_from_the_own_group_to_the_root_counts(tmp_path, own, root, unit):
    write(tmp_path, root | unit)
    (tmp_path / "own").write_text(own)
    sample = sample_cgroup(tmp_path, tmp_path / "own")
    assert sample == (1.5, pytest.approx(1.5), 1_000_000, 250_000)


def test_a_use_is_that_of_the_group_with_the_limit(tmp_path):
    less = V2 | {"cpu.max": "50000 100000", "memory.max": "900000", "memory.current": "800000"}
    write(tmp_path, V2 | below("a", less) | below("a/b", V2 | {"memory.current": "1"}))
    (tmp_path / "own").write_text("0::/a/b\n")
    sample = sample_cgroup(tmp_path, tmp_path / "own")
    assert sample == (0.5, pytest.approx(1.5), 900_000, 800_000)


def test_without_cgroups_nothing_is_told(tmp_path):
    assert sample_cgroup(tmp_path) == CgroupSample()


def test_files_that_hold_something_else_tell_nothing(tmp_path):
    write(tmp_path, dict.fromkeys(V2, "what?\n"))
    assert sample_cgroup(tmp_path) == CgroupSample()


@pytest.mark.parametrize(
    "files",
    [
        {"cgroup.controllers": "cpu", "cpu.max": "50000 100000\n"},
        {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"},
    ],
    ids=["v2", "v1"],
)
def test_the_quota_of_the_cgroup_counts_for_the_cores(tmp_path, files):
    write(tmp_path, files)
    assert available_cores(tmp_path) == 1


@pytest.mark.parametrize("text", ["max 100000\n", "nonsense", "", "9900000 100000\n"])
def test_without_a_quota_the_affinity_counts(tmp_path, text):
    write(tmp_path, {"cgroup.controllers": "cpu", "cpu.max": text})
    assert available_cores(tmp_path) == available_cores(tmp_path / "absent")


@pytest.mark.parametrize(
    ("quota", "idle", "expected"),
    [
        ("200000", {0: 5, 1: 9, 2: 0, 3: 7}, [1, 3]),  # of four cores those that are idle most
        ("150000", {0: 5, 1: 9, 2: 0, 3: 7}, [1, 3]),
        ("200000", {}, [0, 1]),  # where nobody says how idle they are: any
        ("400000", {0: 5, 1: 9, 2: 0, 3: 7}, []),
        ("max", {0: 5, 1: 9, 2: 0, 3: 7}, []),
    ],
)
def test_pinned_are_as_many_cores_as_the_quota_is_worth(tmp_path, monkeypatch, quota, idle, expected):
    write(tmp_path, V2 | {"cpu.max": f"{quota} 100000\n"})
    pinned = []

    def pass_time(_):
        (tmp_path / "stat").write_text(
            "".join(f"cpu{core} 1 2 3 {100 + ticks} 9\n" for core, ticks in idle.items())
        )

    (tmp_path / "stat").write_text(
        "cpu 4 8 12 400 36\n" + "".join(f"cpu{core} 1 2 3 100 9\n" for core in idle)
    )
    monkeypatch.setattr("torchere.handlers.cgroup.time.sleep", pass_time)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.extend(cores))
    monkeypatch.setattr(random, "sample", lambda cores, _: cores)
    assert pin_to_limit(tmp_path, tmp_path / "stat") == expected == sorted(pinned)


def test_a_pinned_thread_hands_its_cores_on(tmp_path):
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this machine has one core")
    write(tmp_path, V2 | {"cpu.max": "100000 100000\n"})
    seen = []

    def pin():
        seen.append(pin_to_limit(tmp_path))
        inner = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))
        inner.start()
        inner.join()

    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()
    assert len(seen[0]) == 1
    assert seen[0] == seen[1]
    assert os.sched_getaffinity(0) == allowed
