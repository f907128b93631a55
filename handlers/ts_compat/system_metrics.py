"""`ts.metrics.system_metrics` and the like: samples of the host, for handlers and `system_metrics_cmd`."""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
from types import FunctionType, ModuleType
from typing import IO

import psutil

from torchere.handlers.metrics import Dimension
from torchere.handlers.ts_compat.legacy import Metric

__all__ = [
    "check_process_mem_usage",
    "collect_all",
    "cpu_utilization",
    "dimension",
    "disk_available",
    "disk_used",
    "disk_utilization",
    "get_cpu_usage",
    "gpu_utilization",
    "main",
    "memory_available",
    "memory_used",
    "memory_utilization",
    "system_metrics",
]
_MEGABYTE, _GIGABYTE = 2**20, 2**30

system_metrics: list[Metric] = []
dimension = [Dimension("Level", "Host")]


def cpu_utilization() -> None:
    """Sample how busy the CPU cores are."""
    system_metrics.append(Metric("CPUUtilization", psutil.cpu_percent(), "percent", dimension))


def memory_used() -> None:
    """Sample the memory in use."""
    used = psutil.virtual_memory().used / _MEGABYTE
    system_metrics.append(Metric("MemoryUsed", used, "MB", dimension))


def memory_available() -> None:
    """Sample the available memory."""
    available = psutil.virtual_memory().available / _MEGABYTE
    system_metrics.append(Metric("MemoryAvailable", available, "MB", dimension))


def memory_utilization() -> None:
    """Sample the percentage of the memory in use."""
    system_metrics.append(Metric("MemoryUtilization", psutil.virtual_memory().percent, "percent", dimension))


def disk_used() -> None:
    """Sample the used space of the file system `/`."""
    system_metrics.append(Metric("DiskUsage", psutil.disk_usage("/").used / _GIGABYTE, "GB", dimension))


def disk_utilization() -> None:
    """Sample the percentage of used space of the file system `/`."""
    system_metrics.append(Metric("DiskUtilization", psutil.disk_usage("/").percent, "percent", dimension))


def disk_available() -> None:
    """Sample the free space of the file system `/`."""
    system_metrics.append(Metric("DiskAvailable", psutil.disk_usage("/").free / _GIGABYTE, "GB", dimension))


def gpu_utilization(num_of_gpu: int) -> None:
    """Sample NVIDIA GPUs with `nvidia-smi`, as far as it reports values; without it, sample nothing."""
    program = shutil.which("nvidia-smi")
    if num_of_gpu <= 0 or program is None:
        return
    fields = "index,utilization.gpu,memory.used,memory.total"
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as err:
        logging.warning("GPUs can't be sampled: %s", err)
        return
    for line in listed.splitlines():
        index, *numbers = (part.strip() for part in line.split(","))
        busy, used, total = (float(text) if text.replace(".", "").isdigit() else None for text in numbers)
        share = 100 * used / total if used is not None and total else None
        labels = [*dimension, Dimension("DeviceId", index)]
        for name, unit, value in (
            ("GPUMemoryUtilization", "percent", share),
            ("GPUMemoryUsed", "MB", used),
            ("GPUUtilization", "percent", busy),
        ):
            if value is not None:
                system_metrics.append(Metric(name, value, unit, labels))


def collect_all(mod: ModuleType, num_of_gpu: int) -> None:
    """Call every sampler function of a module, and log the samples in the format that TorchServe reads."""
    samplers = [each for each in vars(mod).values() if isinstance(each, FunctionType)]
    for sampler in samplers:
        if sampler.__name__ in _NO_SAMPLERS or sampler.__name__.startswith("_"):
            continue
        if sampler.__name__ == "gpu_utilization":
            sampler(num_of_gpu)
        else:
            sampler()
    for metric in system_metrics:
        logging.info(str(metric))
    logging.info("")


def get_cpu_usage(pid: str | int) -> int:
    """Return the memory of a process in bytes; 0 if there is no such process."""
    try:
        return int(psutil.Process(int(pid)).memory_info().rss)
    except psutil.Error:
        logging.exception("Failed get process for pid: %s", pid)
        return 0


def check_process_mem_usage(stdin: IO[str]) -> None:
    """Log the memory of the processes whose ids are on the first line."""
    for process in filter(None, stdin.readline().strip().split(",")):
        logging.info("%s:%d", process, get_cpu_usage(process))


def main() -> None:
    """Print the samples of the host: `python -m ts.metrics.metric_collector --gpu N`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", type=int, default=0, help="number of GPU")
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    collect_all(sys.modules[__name__], arguments.gpu)
    check_process_mem_usage(sys.stdin)


_NO_SAMPLERS = ("collect_all", "check_process_mem_usage", "get_cpu_usage", "main", "log_msg")
