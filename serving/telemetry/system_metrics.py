"""Gauges of the host: CPU, memory, disk, and those of GPUs that someone else samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

from torchere.serving.telemetry.families import Families

MEGABYTE = 2**20
GIGABYTE = 2**30
_HOST = ("Level", "Hostname")
_GPU = ("Level", "DeviceId", "Hostname")
# name, unit; in the contract's order
_HOST_GAUGES = (
    ("CPUUtilization", "Percent"),
    ("MemoryUsed", "Megabytes"),
    ("MemoryAvailable", "Megabytes"),
    ("MemoryUtilization", "Percent"),
    ("DiskUsage", "Gigabytes"),
    ("DiskAvailable", "Gigabytes"),
    ("DiskUtilization", "Percent"),
)
_GPU_GAUGES = (
    ("GPUMemoryUtilization", "Percent"),
    ("GPUMemoryUsed", "Megabytes"),
    ("GPUUtilization", "Percent"),
)


class SystemMetrics:
    """Samples the host when asked, at most once a period; so nothing runs while nobody looks. Thread-safe.

    Args:
        families: where to declare the gauges.
        hostname: value of the label.
        period_s: the shortest time between two samples.
        now: monotonic seconds.
    """

    def __init__(
        self, families: Families, hostname: str, period_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = {name: families.gauge(name, unit, _HOST) for name, unit in _HOST_GAUGES}
        self._gpu = {name: families.gauge(name, unit, _GPU) for name, unit in _GPU_GAUGES}
        self._hostname = hostname
        self._period_s = period_s
        self._now = now
        self._lock = threading.Lock()  # guards _due_s
        self._due_s = float("-inf")
        psutil.cpu_percent(None)  # the first call has nothing to compare with and only sets the mark

    def sample_if_due(self) -> None:
        """Take a new sample unless the last one is younger than the period."""
        now_s = self._now()
        with self._lock:
            if now_s < self._due_s:
                return
            self._due_s = now_s + self._period_s
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage("/")
        values = {
            "CPUUtilization": psutil.cpu_percent(None),
            "MemoryUsed": memory.used / MEGABYTE,
            "MemoryAvailable": memory.available / MEGABYTE,
            "MemoryUtilization": memory.percent,
            "DiskUsage": disk.used / GIGABYTE,
            "DiskAvailable": disk.free / GIGABYTE,
            "DiskUtilization": disk.percent,
        }
        for name, value in values.items():
            self._host[name].labels("Host", self._hostname).set(value)

    def gpu_sampled(
        self, device_id: int, *, memory_bytes: int, memory_percent: float, percent: float
    ) -> None:
        """Take over a sample of one GPU."""
        values = {
            "GPUMemoryUtilization": memory_percent,
            "GPUMemoryUsed": memory_bytes / MEGABYTE,
            "GPUUtilization": percent,
        }
        for name, value in values.items():
            self._gpu[name].labels("Host", str(device_id), self._hostname).set(value)
