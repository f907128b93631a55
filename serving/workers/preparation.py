"""Starts the fork server before the server itself is imported.

The fork server imports torch, which is the slowest part of a start, so it starts first and runs in parallel
with the rest. Modules that predictions do not need (the framework for the other REST calls) are imported
after the start: `frontend/rest/listener.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.workers.fork_client import Spawned, spawn
from torchere.serving.workers.launch import worker_environment


@contextmanager
def fork_server_ahead(settings: ServerSettings) -> Iterator[Spawned | None]:
    """Start the fork server if the settings name models; it ends with the block.

    Yields None if they name no models, or if the process can't be started; a later launch then tries again.
    """
    spawned = None
    if settings.load_models or settings.snapshot_models or settings.snapshot_workflows:
        with suppress(OSError):
            spawned = spawn(worker_environment(settings.env_vars_hidden_from_workers, settings))
    try:
        yield spawned
    finally:
        if spawned is not None:
            spawned.end()
