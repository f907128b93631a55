"""What the server process is and does: build, event loop, garbage collector, container, certificate."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable

import psutil
from prometheus_client import Metric, ProcessCollector

from torchere.serving.telemetry import catalogue as names
from torchere.serving.telemetry.cgroup import sample_cgroup
from torchere.serving.telemetry.distributions import Distributions, add_histogram

LAG_PERIOD_S = 0.5
FAMILIES = (
    *(names.BUILD_INFO, names.CERTIFICATE_EXPIRY, names.LOOP_LAG, names.GC_PAUSE, names.THREADS),
    *(names.CGROUP_CPU_LIMIT, names.CGROUP_THROTTLED, names.CGROUP_MEMORY_LIMIT, names.CGROUP_MEMORY),
)


class GcPauses:
    """Adds up how long the garbage collector held everything up, while it is among `gc.callbacks`."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._started_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Called at the start and at the end of a collection, in whatever thread runs it."""
        now_s = time.perf_counter()
        if phase == "start":
            self._started_s = now_s
        elif self._started_s:
            self.total_s += now_s - self._started_s


class ProcessMetrics:
    """The families of `FAMILIES`, and the library's `process_` ones. Collecting is thread-safe.

    `watch_loop` runs on the event loop it watches.
    """

    def __init__(self) -> None:
        self._lags = Distributions(1)
        self._lock = threading.Lock()  # guards _lags: the loop writes, a scrape reads
        self._pauses = GcPauses()
        self._certificate_expiry_s: Callable[[], float | None] = lambda: None
        self._library = ProcessCollector(registry=None)

    def watch_certificate(self, expires_at_s: Callable[[], float | None]) -> None:
        """Show when the certificate in force expires (seconds since the epoch), whatever its file holds."""
        self._certificate_expiry_s = expires_at_s

    async def watch_loop(self) -> None:
        """Measure the event loop and the garbage collector until cancelled."""
        gc.callbacks.append(self._pauses)
        try:
            while True:
                wanted_s = time.monotonic() + LAG_PERIOD_S
                await asyncio.sleep(LAG_PERIOD_S)
                with self._lock:
                    self._lags.add((max(0.0, time.monotonic() - wanted_s),))
        finally:
            gc.callbacks.remove(self._pauses)

    def collect(self) -> Iterable[Metric]:
        """The families as they are now; reads /proc."""
        families = names.families(FAMILIES)
        families[names.BUILD_INFO].add_sample(names.BUILD_INFO, build_labels(), 1)
        with self._lock:
            (lags,) = self._lags.histograms()
        add_histogram(families[names.LOOP_LAG], {}, lags)
        cgroup = sample_cgroup()
        values = {
            names.GC_PAUSE: self._pauses.total_s,
            names.THREADS: psutil.Process().num_threads(),
            names.CERTIFICATE_EXPIRY: self._certificate_expiry_s(),
            names.CGROUP_CPU_LIMIT: cgroup.cpu_limit_cores,
            names.CGROUP_THROTTLED: cgroup.throttled_s,
            names.CGROUP_MEMORY_LIMIT: cgroup.memory_limit_bytes,
            names.CGROUP_MEMORY: cgroup.memory_bytes,
        }
        for name, value in values.items():
            if value is not None:
                families[name].add_sample(name, {}, value)
        return (*families.values(), *self._library.collect())


def build_labels() -> dict[str, str]:
    """What runs: versions of torchere, PyTorch and Python, and whether Python has its global lock."""
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)  # from Python 3.13 on
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
