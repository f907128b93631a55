import pytest

from torchere.handlers.cgroup import CgroupSample, available_cores, sample_cgroup


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
