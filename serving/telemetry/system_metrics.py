"""Gauges of the host: CPU, memory, disk and GPUs, sampled every so often."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import psutil

from torchere.serving.telemetry.gpu_sampling import GpuSample, give_up, sample_gpus
from torchere.serving.telemetry.server_metrics import ServerMetrics

logger = logging.getLogger(__name__)

MEGABYTE = 2**20
GIGABYTE = 2**30


class SystemMetrics:
    """Samples the host.

    Args:
        server: takes the values.
        gpus: samples the GPUs; may block for a while.
    """

    def __init__(self, server: ServerMetrics, gpus: Callable[[], Sequence[GpuSample]] = sample_gpus) -> None:
        self._server = server
        self._gpus = gpus
        self._cpu_times = psutil.cpu_times()

    async def sample_every(self, period_s: float, max_gpus: int | None = None) -> None:
        """Sample at once and then every `period_s`, until cancelled.

        With `max_gpus` 0 GPUs are left out. One sample runs in a thread at a time.
        """
        try:
            while True:
                try:
                    await _beside(partial(self.sample, max_gpus))
                except (psutil.Error, OSError) as err:  # the next one may do better
                    logger.warning("the host can't be sampled: %s", err)
                await asyncio.sleep(period_s)
        finally:
            give_up()

    def sample(self, max_gpus: int | None = None) -> None:
        """Take one sample. Blocks while the GPUs are asked."""
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
            self._server.bind(name, "Host")(value)
        if max_gpus != 0:
            for gpu in self._gpus():
                self._take_gpu(gpu)

    def _cpu_percent(self) -> float:
        """How busy the cores were since the last sample; psutil's own compares within one thread only."""
        before, self._cpu_times = self._cpu_times, psutil.cpu_times()
        spent_s = {
            name: max(0.0, getattr(self._cpu_times, name) - getattr(before, name)) for name in before._fields
        }
        # Linux counts what guests take twice: as `user` and `nice`, too.
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
                self._server.bind(name, "Host", str(gpu.device_id))(value)


async def _beside(work: Callable[[], None]) -> None:
    """Do it in a thread that nobody waits for at the end: who asks a hung driver may not come back."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def tell(err: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        if err is None:
            done.set_result(None)
        else:
            done.set_exception(err)

    def run() -> None:
        failure: BaseException | None = None
        try:
            work()
        except BaseException as err:  # the top of a thread: who waits is told
            failure = err
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, failure)

    threading.Thread(target=run, name="host-sample", daemon=True).start()
    await done
