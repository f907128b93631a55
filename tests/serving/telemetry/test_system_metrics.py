import asyncio
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from torchere.serving.telemetry import sampling as gpu_sampling
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.sampling import (
    GpuSample,
    SystemMetrics,
    parse_gpus,
    sample_by_script,
    sample_gpus,
)
from torchere.serving.telemetry.torchserve import ServerMetrics


class Taken(ServerMetrics):
    """Keeps the values that are set, by metric name and label values."""

    def __init__(self):
        self.values = {}

    def update(self, name, value, *labels):
        self.values |= {(name, *labels): value}


def test_a_sample_fills_the_gauges_of_the_host():
    metrics = Metrics("vm")
    metrics.system.sample()
    samples = [line for line in metrics.exposition().splitlines() if not line.startswith("#")]
    found = {line.split("{")[0]: float(line.split()[-1]) for line in samples}
    assert found["MemoryAvailable"] > 0
    assert found["DiskUsage"] > 0
    assert 0 <= found["MemoryUtilization"] <= 100


def in_a_thread_of_its_own(work):
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def test_how_busy_the_cores_were_counts_from_the_sample_before_in_whatever_thread(monkeypatch):
    some = psutil.cpu_times()
    counted, taken, found = [some], Taken(), []
    monkeypatch.setattr(psutil, "cpu_times", lambda: counted[-1])
    system = SystemMetrics(taken)
    for spent in (
        {"user": 50, "system": 10, "idle": 30, "iowait": 10, "guest": 20},  # the guest's are among the user's
        {"user": 10, "idle": 30, "iowait": -5},  # Linux puts what disks took right now and then
    ):
        before = counted[-1]
        counted.append(before._replace(**{name: getattr(before, name) + s for name, s in spent.items()}))
        in_a_thread_of_its_own(lambda: system.sample(0))
        found.append(taken.values["CPUUtilization", "Host"])
    assert found == [60.0, 25.0]


def test_without_a_sample_the_gauges_of_the_host_have_no_value():
    text = Metrics("vm").exposition()
    assert "# TYPE MemoryUsed gauge" in text
    assert "MemoryUsed{" not in text


def test_gpus_have_their_gauges():
    taken = Taken()
    gpus = (GpuSample(0, 3.0, 500.0, 1000.0), GpuSample(1, None, None, None))
    SystemMetrics(taken, lambda: gpus).sample()
    assert {key: value for key, value in taken.values.items() if "GPU" in key[0]} == {
        ("GPUMemoryUtilization", "Host", "0"): 50.0,
        ("GPUMemoryUsed", "Host", "0"): 500.0,
        ("GPUUtilization", "Host", "0"): 3.0,
    }


@pytest.mark.parametrize(("max_gpus", "seen"), [(None, {"0", "1"}), (1, {"0", "1"}), (0, set())])
def test_the_gpus_of_the_host_are_shown_unless_the_server_may_use_none(max_gpus, seen):
    taken = Taken()
    SystemMetrics(taken, lambda: (GpuSample(0, 1, 1, 1), GpuSample(1, 1, 1, 1))).sample(max_gpus)
    assert {key[2] for key in taken.values if "GPU" in key[0]} == seen


def test_the_host_is_sampled_at_once_and_then_in_every_period():
    taken, looked = Taken(), []

    def gpus():
        looked.append(1)
        return ()

    system = SystemMetrics(taken, gpus)

    async def watch():
        sampling = asyncio.create_task(system.sample_every(0.01))
        while len(looked) < 3:
            await asyncio.sleep(0)
        sampling.cancel()

    asyncio.run(watch())
    assert len(looked) >= 3


def test_a_sample_that_fails_is_logged_and_the_next_one_is_taken(caplog):
    looked = []

    def gpus():
        looked.append(1)
        raise OSError("the driver is gone")

    async def watch():
        sampling = asyncio.create_task(SystemMetrics(Taken(), gpus).sample_every(0.01))
        while len(looked) < 2:
            await asyncio.sleep(0)
        sampling.cancel()

    asyncio.run(watch())
    assert "the driver is gone" in caplog.text


def test_a_sample_without_a_thread_is_logged_and_the_next_one_is_taken(monkeypatch, caplog):
    looked, start = [], threading.Thread.start

    def fail_once(thread):
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    def gpus():
        looked.append(1)
        return ()

    async def watch():
        sampling = asyncio.create_task(SystemMetrics(Taken(), gpus).sample_every(0.01))
        while not (looked or sampling.done()):
            await asyncio.sleep(0)
        sampling.cancel()

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    asyncio.run(watch())
    assert looked
    assert "the host can't be sampled: can't start new thread" in caplog.text


def test_the_csv_of_the_driver_is_read_with_what_a_device_does_not_tell():
    text = "0, 37, 20123, 81559\n1, [N/A], 5, 81559\nNo devices were found\n"
    assert list(parse_gpus(text)) == [GpuSample(0, 37.0, 20123.0, 81559.0), GpuSample(1, None, 5.0, 81559.0)]
    assert GpuSample(1, None, 40.0, 80.0).memory_percent == 50.0
    assert GpuSample(1, None, 40.0, None).memory_percent is None


def fake_driver(folder, monkeypatch, script):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_driver_is_asked_for_what_is_read(tmp_path, monkeypatch):
    fake_driver(tmp_path, monkeypatch, '[ "$2" = "--format=csv,noheader,nounits" ] && echo "0, 1, 2, 4"')
    assert sample_gpus() == (GpuSample(0, 1.0, 2.0, 4.0),)


def test_what_is_no_text_costs_no_sample(tmp_path, monkeypatch):
    fake_driver(tmp_path, monkeypatch, 'printf "\\377\\n0, 1, 2, 4\\n"')
    assert sample_gpus() == (GpuSample(0, 1.0, 2.0, 4.0),)


def test_a_driver_that_fails_for_a_warning_has_told_all(tmp_path, monkeypatch, caplog):
    said = "echo 0, 1, 2, 4; echo WARNING: infoROM is corrupted at gpu 0000:3B:00.0; exit 14"
    fake_driver(tmp_path, monkeypatch, said)
    assert sample_gpus() == (GpuSample(0, 1.0, 2.0, 4.0),)
    assert caplog.text == ""


def test_a_driver_that_fails_means_no_gpus(tmp_path, monkeypatch, caplog):
    fake_driver(tmp_path, monkeypatch, "exit 9")
    assert sample_gpus() == ()
    assert "GPUs can't be sampled" in caplog.text


def test_a_driver_that_hangs_holds_nothing_up_and_is_left_alone(tmp_path, monkeypatch, caplog):
    fake_driver(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(gpu_sampling, "_TIMEOUT_S", 0.01)
    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _: None)  # it takes no signal
    assert sample_gpus() == ()
    assert sample_gpus() == ()
    assert "timed out" in caplog.records[0].getMessage()
    assert "still hangs" in caplog.records[1].getMessage()
    (hung,) = gpu_sampling._hung
    kill(hung)
    hung.communicate()
    fake_driver(tmp_path, monkeypatch, "echo 0, 1, 2, 4")
    monkeypatch.setattr(gpu_sampling, "_TIMEOUT_S", 10.0)
    assert sample_gpus() == (GpuSample(0, 1.0, 2.0, 4.0),)


def test_without_a_driver_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sample_gpus() == ()


SCRIPT = """
import sys
from beside import unit
from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric

if __name__ == "__main__":
    print(Metric("Sessions", int(sys.argv[2]), unit, [Dimension("Level", "Host"), Dimension("device", 0)]))
"""


def test_a_script_imports_the_modules_of_torchserve_and_those_beside_it(tmp_path, caplog, capfd):
    (tmp_path / "beside.py").write_text('unit = "count"')
    (tmp_path / "sample.py").write_text(SCRIPT)
    samples = sample_by_script(f"{tmp_path / 'sample.py'} --gpu 2")
    assert (caplog.text, capfd.readouterr().err) == ("", "")
    (sample,) = samples
    assert (sample.name, sample.value, sample.unit) == ("Sessions", 2.0, "Count")
    assert sample.dimensions == (("Level", "Host"), ("device", "0"))


def test_a_script_that_fails_is_named_and_a_module_is_run_by_python_itself(tmp_path, caplog, capfd):
    (tmp_path / "sample.py").write_text('import ts, sys\nsys.exit(f"no {ts.__name__}")')
    assert sample_by_script(f"{tmp_path / 'sample.py'} --gpu 0") == ()
    assert f"system_metrics_cmd: {tmp_path / 'sample.py'} --gpu 0 ended with exit code 1" in caplog.text
    assert sample_by_script("-m no_such_module") == ()
    errors = capfd.readouterr().err
    assert "no ts" in errors
    assert "No module named no_such_module" in errors


def test_the_end_does_not_wait_for_a_driver_that_hangs():
    begun, goes_on, went_on = threading.Event(), threading.Event(), []

    def gpus():
        begun.set()
        went_on.append(goes_on.wait(10))
        return ()

    async def watch():
        sampling = asyncio.create_task(SystemMetrics(Taken(), gpus).sample_every(0.01))
        while not begun.is_set():
            await asyncio.sleep(0)
        sampling.cancel()

    asyncio.run(watch())
    assert went_on == []
    goes_on.set()


def test_who_stops_to_sample_leaves_no_question_behind(tmp_path, monkeypatch, caplog):
    fake_driver(tmp_path, monkeypatch, "exec sleep 60")
    asked = []

    async def watch():
        sampling = asyncio.create_task(SystemMetrics(Taken()).sample_every(0.01))
        while not gpu_sampling._asked:
            await asyncio.sleep(0)
        asked.extend(gpu_sampling._asked)
        sampling.cancel()

    asyncio.run(watch())
    assert asked[0].wait(60) == -signal.SIGKILL
    assert caplog.text == ""
