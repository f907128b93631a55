"""What a start does on a second core while the server's own modules are imported on the first.

Importing torch keeps one core busy for one to two seconds, with the GIL held. Meanwhile threads that need no
GIL unpack the archives of the start-up models and map torch's libraries (`torch_mapping.py`), and the fork
server, if a model will need it, imports torch for itself. What predictions can do without (the framework
behind the other REST calls) is imported when the start is over: `frontend/rest/deferred.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress

from torchere.serving.errors import ServingError
from torchere.serving.execution.fork_client import Spawned, spawn
from torchere.serving.execution.isolation import choose_isolation
from torchere.serving.execution.launch import worker_environment
from torchere.serving.registry.ahead import Prepared, UnpackedAhead
from torchere.serving.registry.allowed_urls import is_remote
from torchere.serving.registry.startup import Wanted, startup_models
from torchere.serving.registry.store import Store, store_of
from torchere.serving.settings import ServerSettings

# How long a thread may keep the GIL that another waits for; CPython's default is 5 ms. Unpacking 400 MB asks
# for it some three hundred times, and the main thread, which imports, has it nearly always.
START_SWITCH_INTERVAL_S = 5e-5
# Imported while torch's libraries are mapped: torch's own import would wait for that, with the GIL held.
# All of it is needed to begin to serve.
WITHOUT_TORCH = (
    "google.protobuf.json_format",
    "torchere.serving.observation",
    "torchere.serving.ports",
)


@contextmanager
def preparation(settings: ServerSettings) -> Iterator[Prepared]:
    """Begin all that; at the end of the block what nobody took over is ended, and deleted."""
    sys.setswitchinterval(START_SWITCH_INTERVAL_S)
    store = store_of(settings)
    try:
        wanted = [each for each in startup_models(settings, store.names) if not is_remote(each.url)]
        fork_server = _fork_server(settings, store, wanted)
        try:
            for name in WITHOUT_TORCH:
                importlib.import_module(name)
            # Now, because until now the mapping of torch kept the second core busy.
            with closing(UnpackedAhead(store, [each.url for each in wanted])) as ahead:
                yield Prepared(store, ahead, fork_server)
        finally:
            if fork_server is not None:
                fork_server.end()
    finally:
        store.close()


def _fork_server(settings: ServerSettings, store: Store, wanted: Sequence[Wanted]) -> Spawned | None:
    """Start the fork server when one of the models will run in processes; a failure shows when it is used."""
    if any(_in_processes(settings, store, each) for each in wanted):
        with suppress(OSError):
            return spawn(worker_environment(settings.hidden_env_vars))
    return None


def _in_processes(settings: ServerSettings, store: Store, wanted: Wanted) -> bool:
    """Whether the model will run in processes, by its manifest and configuration alone: a guess."""
    try:
        archive = store.open(wanted.url, trusted=True)
        config = store.config_of(archive)
    except ServingError:
        return False
    handler = wanted.handler or archive.manifest.handler or settings.default_handler or ""
    model = {"serializedFile": archive.manifest.serialized_file or ""}
    if archive.manifest.model_file:
        model["modelFile"] = archive.manifest.model_file
    return choose_isolation(config.isolation, handler, model) == "process"
