"""Worker pools that tests of several files share; `pythonpath` of pytest's configuration leads here."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.launch import ForkLauncher, Launcher, worker_environment
from torchere.serving.workers.pool import WorkerPool


def new_pool(spec: LoadSpec, launcher: Launcher, **changes: Any) -> WorkerPool:
    """Return a pool without executors; its settings are generous where `changes` do not name them."""
    settings: dict[str, Any] = {
        "response_timeout_s": 30.0,
        "startup_timeout_s": 60.0,
        "max_retry_timeout_s": 60.0,
        "next_id": itertools.count(9000).__next__,
        "on_free": lambda: None,
        "on_loaded": lambda executor_id, load_s: None,
    }
    return WorkerPool(spec, launcher=launcher, **{**settings, **changes})


@asynccontextmanager
async def pool_in_service(spec: LoadSpec, count: int = 1, **changes: Any) -> AsyncIterator[Any]:
    """Run a pool with `count` warm executors; `pool.freed` is set whenever one may have come free."""
    freed = asyncio.Event()
    launcher = ForkLauncher(worker_environment())
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
    """Wait until a condition holds; raise `TimeoutError` after `limit_s` seconds."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), limit_s)
