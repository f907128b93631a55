"""Worker pools that tests of several files share; `pythonpath` of pytest's configuration leads here."""

import asyncio
import atexit
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil

from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.fork_client import MAX_MESSAGE_BYTES
from torchere.serving.workers.launch import ForkLauncher, Launcher
from torchere.serving.workers.pool import WorkerPool
from torchere.serving.workers.spawn import Spawned, spawn, worker_environment
from torchere.serving.workers.worker_settings import WorkerSettings

kept: list[
    tuple[Any, Spawned]
] = []  # at most one: the fork server of the last test, and what it was made for


class Borrowed(Spawned):
    """A fork server process that outlives its launcher, because its import of torch takes a second."""

    __slots__ = ()

    def end(self) -> None:
        """Kill the workers that are left, and keep the process for the next launcher, if it is in order."""
        self.control.close()  # a duplicate; the fork server does not see its end
        if self.process.poll() is not None:
            return
        control = kept[0][1].control
        control.settimeout(10)
        try:
            control.send(b"F")  # without descriptors: it is refused behind the answers to all others
            while not control.recv(MAX_MESSAGE_BYTES).startswith(b"E"):
                pass
            for worker in psutil.Process(self.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
        except (OSError, psutil.NoSuchProcess):
            end_kept()


def fork_launcher() -> ForkLauncher:
    """Return a launcher with the fork server of the last test, where environment and folder are equal."""
    environment = {
        name: value for name, value in worker_environment().items() if name != "PYTEST_CURRENT_TEST"
    }
    made_for = (environment, os.getcwd())
    if kept and (kept[0][0] != made_for or kept[0][1].process.poll() is not None):
        end_kept()
    if not kept:
        kept.append((made_for, spawn(environment)))
    spawned = kept[0][1]
    return ForkLauncher(environment, Borrowed(spawned.process, spawned.control.dup()))


@atexit.register
def end_kept() -> None:
    """End the kept fork server."""
    while kept:
        kept.pop()[1].end()


def new_pool(spec: LoadSpec, launcher: Launcher, **changes: Any) -> WorkerPool:
    """Return a pool without executors; its settings are generous where `changes` do not name them."""
    settings: dict[str, Any] = {
        "response_timeout_s": 30.0,
        "startup_timeout_s": 60.0,
        "max_retry_timeout_s": 60.0,
        "on_free": lambda: None,
        "on_loaded": lambda executor_id, load_s: None,
    }
    next_id = changes.pop("next_id", itertools.count(9000).__next__)
    cores = changes.pop("cores", None)
    return WorkerPool(WorkerSettings(spec=spec, launcher=launcher, **{**settings, **changes}), next_id, cores)


@asynccontextmanager
async def pool_in_service(spec: LoadSpec, count: int = 1, **changes: Any) -> AsyncIterator[Any]:
    """Run a pool with `count` warm executors; `pool.freed` is set whenever one may have come free."""
    freed = asyncio.Event()
    launcher = fork_launcher()
    pool: Any = new_pool(spec, launcher, on_free=freed.set, **changes)
    pool.freed = freed
    try:
        await pool.resize(count)
        await pool.warm_up()
        yield pool
    finally:
        await pool.close()
        await launcher.close()


async def until(condition: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Wait until a condition holds, and return before anything else runs.

    Raises:
        TimeoutError: it does not within `limit_s` seconds.
    """
    late_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > late_s:
            raise TimeoutError(f"a condition did not hold within {limit_s} s")
        await asyncio.sleep(0.005)
