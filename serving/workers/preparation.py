"""What a start begins before it imports the server: the process that workers are forked from.

It imports torch, which takes longer than all else of a start, so it goes first and beside everything. What
predictions can do without (the framework behind the other REST calls) comes when the start is over:
`frontend/rest/deferred.py`.
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

    None: they name none, or the system would not start it, which shows again when it is needed.
    """
    spawned = None
    if settings.load_models or settings.snapshot_models:
        with suppress(OSError):
            spawned = spawn(worker_environment(settings.hidden_env_vars))
    try:
        yield spawned
    finally:
        if spawned is not None:
            spawned.end()
