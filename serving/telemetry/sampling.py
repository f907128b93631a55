"""Metrics of the process and its host: build, event loop, GC, container, certificate, CPU, GPUs."""

from __future__ import annotations

import asyncio
import csv
import gc
import importlib.metadata
import logging
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import psutil
from prometheus_client import ProcessCollector

from torchere.handlers.cgroup import sample_cgroup
from torchere.handlers.metrics import MetricSample
from torchere.handlers.ts_compat import main
from torchere.serving.logs.worker_lines import metric_of
from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry.distributions import Distributions, add_histogram
from torchere.serving.telemetry.exposition import OwnFamily
from torchere.serving.telemetry.torchserve import ServerMetrics

# Utilisation of the GPUs, by `nvidia-smi`.
# torch could report it, too, but would create a CUDA context in the server process, which uses hundreds of
# megabytes on every device and makes it impossible to fork workers.

_FIELDS = "index,utilization.gpu,memory.used,memory.total"
_TIMEOUT_S = 10.0  # nvidia-smi ends within a second or, if the driver hangs, never
_SCRIPT_TIMEOUT_S = 60.0

_hung: list[subprocess.Popen[str]] = []  # killed after a timeout, without effect if a driver hangs
_asked: list[subprocess.Popen[str]] = []  # still running


class GpuSample(NamedTuple):
    """One sample of a GPU; a value is None if the device does not report it (utilisation under MIG)."""

    device_id: int
    percent: float | None
    memory_used_mib: float | None
    memory_total_mib: float | None

    @property
    def memory_percent(self) -> float | None:
        """Percentage of the memory in use."""
        if self.memory_used_mib is None or not self.memory_total_mib:
            return None
        return 100 * self.memory_used_mib / self.memory_total_mib


def sample_gpus() -> tuple[GpuSample, ...]:
    """Return a sample of each GPU, by index. Blocks up to 10 s.

    The result is empty if there is no driver, or if the driver fails, which is logged.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        output, status = _ask(command, _TIMEOUT_S)
        samples = tuple(parse_gpus(output))
        # The exit status may be a warning (14: the infoROM of one GPU is corrupted) although the output is
        # complete.
        if status and not samples:
            raise subprocess.CalledProcessError(status, command)
    except (OSError, subprocess.SubprocessError) as err:
        logger.warning("GPUs can't be sampled: %s", err)
        return ()
    return samples


def give_up() -> None:
    """Kill the running commands, whose output is no longer needed. Thread-safe."""
    while _asked:
        _asked.pop().kill()


def _ask(command: list[str], timeout_s: float, errors: int | None = subprocess.DEVNULL) -> tuple[str, int]:
    """Run a command; return its output and exit status, or ("", 0) if `give_up` was called.

    Unlike `subprocess.run`, this does not wait for a process that can't be killed.
    """
    if any(process.poll() is None for process in _hung):
        raise subprocess.SubprocessError("the last run still hangs and can't be killed: a driver hangs?")
    _hung.clear()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
    )
    _asked.append(process)
    try:
        # TorchServe's scripts read the ids of workers from standard input; they get a blank line instead.
        output, _ = process.communicate("\n", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        _hung.append(process)
        raise
    finally:
        is_wanted = process in _asked
        if is_wanted:
            _asked.remove(process)
    return (output, process.returncode) if is_wanted else ("", 0)


def sample_by_script(arguments: str) -> tuple[MetricSample, ...]:
    """Run Python with these arguments, as TorchServe does for `system_metrics_cmd`, and return its samples.

    Blocks up to `_SCRIPT_TIMEOUT_S`. The script writes to the server's standard error, and may import `ts`.
    """
    # Options of Python, as `-m`, are left to Python: such a module is an installed one.
    runner = [] if arguments.lstrip().startswith("-") else [main.__file__]
    command = [sys.executable, *runner, *arguments.split()]
    try:
        output, status = _ask(command, _SCRIPT_TIMEOUT_S, None)
    except (OSError, subprocess.SubprocessError) as err:
        logger.warning("system_metrics_cmd: %s", err)
        return ()
    if status:
        logger.warning("system_metrics_cmd: %s ended with exit code %d", arguments, status)
    return tuple(parse_samples(output))


def parse_samples(text: str) -> Iterator[MetricSample]:
    """Yield the samples of TorchServe's metric lines, up to a blank line; malformed lines are logged."""
    for line in text.splitlines():
        if not line:
            return
        sample = metric_of(line)
        if sample is None:
            logger.warning("Parse metrics failed: %.500s", line)
        else:
            yield sample


def parse_gpus(text: str) -> Iterator[GpuSample]:
    """Yield the samples in the CSV that `nvidia-smi` prints; skip other lines."""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_FIELDS.split(",")) and row[0].isdigit():
            percent, used, total = map(_number, row[1:])
            yield GpuSample(int(row[0]), percent, used, total)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None


LAG_PERIOD_S = 0.5


class ProcessMetrics:
    """The families about the process, and the library's `process_` families. Collecting is thread-safe.

    Run `watch_loop` on the event loop to be measured.
    """

    def __init__(self) -> None:
        self._lags = Distributions(1)
        self._lock = threading.Lock()  # guards _lags: the event loop writes, a scrape reads
        self._gc_s = 0.0  # all pauses of the garbage collector while the event loop is watched
        self._gc_began_s = 0.0
        self._certificate_expiry_s: Callable[[], float | None] = lambda: None
        self.library = ProcessCollector(registry=None)

    def watch_certificate(self, expires_at_s: Callable[[], float | None]) -> None:
        """Set a function that returns the expiry, in seconds since the epoch, of the certificate in use."""
        self._certificate_expiry_s = expires_at_s

    async def watch_loop(self) -> None:
        """Measure the event loop and the garbage collector until cancelled."""
        gc.callbacks.append(self._collecting)
        try:
            while True:
                wanted_s = time.monotonic() + LAG_PERIOD_S
                await asyncio.sleep(LAG_PERIOD_S)
                with self._lock:
                    self._lags.add((max(0.0, time.monotonic() - wanted_s),))
        finally:
            gc.callbacks.remove(self._collecting)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        """Record the start or the end of a garbage collection; called in the thread that runs it."""
        now_s = time.perf_counter()
        if phase == "start":
            self._gc_began_s = now_s
        elif self._gc_began_s:
            self._gc_s += now_s - self._gc_began_s

    def add_to(self, families: Mapping[str, OwnFamily]) -> None:
        """Add the current values; reads /proc."""
        families["torchere_build_info"].add(1, **_build())
        with self._lock:
            (lags,) = self._lags.histograms()
        add_histogram(families["torchere_event_loop_lag_seconds"], {}, lags)
        cgroup = sample_cgroup()
        values: dict[str, float | None] = {
            "torchere_gc_pause_seconds_total": self._gc_s,
            "torchere_process_threads": psutil.Process().num_threads(),
            "torchere_certificate_expiry_timestamp_seconds": self._certificate_expiry_s(),
            "torchere_cgroup_cpu_limit_cores": cgroup.cpu_limit_cores,
            "torchere_cgroup_cpu_throttled_seconds_total": cgroup.throttled_s,
            "torchere_cgroup_memory_limit_bytes": cgroup.memory_limit_bytes,
            "torchere_cgroup_memory_bytes": cgroup.memory_bytes,
        }
        catalogue.add_values(families, values, {})


def _build() -> dict[str, str]:
    """Return the versions of torchere, PyTorch and Python, and whether the GIL is on, as labels."""
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)  # since Python 3.13
    return {
        "version": _version_of("torchere"),
        "torch": _version_of("torch"),
        "python": platform.python_version(),
        "gil": "on" if has_gil() else "off",
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


logger = logging.getLogger(__name__)

MEGABYTE = 2**20
GIGABYTE = 2**30


class SystemMetrics:
    """Samples the host for `server`; `gpus` samples the GPUs, and may block for a while."""

    def __init__(self, server: ServerMetrics, gpus: Callable[[], Sequence[GpuSample]] = sample_gpus) -> None:
        self._server = server
        self._gpus = gpus
        self.command = ""  # `system_metrics_cmd`, whose script samples the host instead; "": no script
        self._cpu_times = psutil.cpu_times()

    async def sample_every(self, period_s: float, max_gpus: int | None = None) -> None:
        """Sample immediately and then every `period_s`, until cancelled.

        `max_gpus` 0 skips the GPUs. Each sample is taken in a thread, one at a time.
        """
        try:
            while True:
                try:
                    await _beside(partial(self.sample, max_gpus))
                except Exception as err:  # for example, no thread is available; the next sample may succeed
                    logger.warning("the host can't be sampled: %s", err)
                await asyncio.sleep(period_s)
        finally:
            give_up()

    def sample(self, max_gpus: int | None = None) -> None:
        """Take one sample. Blocks while the GPUs are sampled, or the operator's script runs."""
        if self.command:
            for sample in sample_by_script(self.command):
                labels = [label for _, label in sample.dimensions]
                try:
                    self._server.update(sample.name, sample.value, *labels)
                except ValueError as err:  # other labels than those declared in the metrics configuration
                    logger.warning("system_metrics_cmd: %s of %s: %s", sample.name, ", ".join(labels), err)
            return
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage("/")
        values = {
            "CPUUtilization": self._cpu_percent(),
            "MemoryAvailable": memory.available / MEGABYTE,
            "MemoryUsed": memory.used / MEGABYTE,
            "MemoryUtilization": memory.percent,
            "DiskAvailable": disk.free / GIGABYTE,
            "DiskUsage": disk.used / GIGABYTE,
            "DiskUtilization": disk.percent,
        }
        for name, value in values.items():
            self._server.update(name, value, "Host")
        if max_gpus != 0:
            for gpu in self._gpus():
                self._take_gpu(gpu)

    def _cpu_percent(self) -> float:
        """Return the utilisation of the cores since the last sample, in percent.

        `psutil.cpu_percent` can't be used: it compares with the last call in the same thread.
        """
        before, self._cpu_times = self._cpu_times, psutil.cpu_times()
        spent_s = {
            name: max(0.0, getattr(self._cpu_times, name) - getattr(before, name)) for name in before._fields
        }
        # Linux counts the time of guests twice: `user` and `nice` include it.
        whole_s = sum(spent_s.values()) - spent_s.get("guest", 0.0) - spent_s.get("guest_nice", 0.0)
        idle_s = spent_s["idle"] + spent_s.get("iowait", 0.0)
        return round(100 * (whole_s - idle_s) / whole_s, 1) if whole_s > 0 else 0.0

    def _take_gpu(self, gpu: GpuSample) -> None:
        values = {
            "GPUMemoryUtilization": gpu.memory_percent,
            "GPUMemoryUsed": gpu.memory_used_mib,
            "GPUUtilization": gpu.percent,
        }
        for name, value in values.items():
            if value is not None:
                self._server.update(name, value, "Host", str(gpu.device_id))


async def _beside(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread, because a call into a hung driver may never return."""
    done: Future[None] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()  # it can't be cancelled from now on
        try:
            work()
        except BaseException as err:  # passed to the awaiting task
            done.set_exception(err)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="host-sample", daemon=True).start()
    await asyncio.wrap_future(done)
