"""What a server begins with a second core, before its own modules are imported.

Importing torch, fastapi and grpc keeps one core busy for two to three seconds, with the GIL held. Meanwhile
threads that need no GIL unpack the archives of the start-up models and map torch's libraries, and the fork
server, if a model will need it, imports torch for itself.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torchere.serving.errors import ServingError
from torchere.serving.execution.fork_client import Spawned, spawn
from torchere.serving.execution.isolation import choose_isolation
from torchere.serving.execution.launch import worker_environment
from torchere.serving.registry.ahead import Prepared, UnpackedAhead
from torchere.serving.registry.allowed_urls import is_remote
from torchere.serving.registry.startup import Wanted, startup_models
from torchere.serving.registry.store import Store, store_of
from torchere.serving.settings import ServerSettings

_RTLD_LAZY = 1  # dlfcn.h
# Imported while torch's libraries are mapped: torch's own import would wait for that, with the GIL held.
_WITHOUT_TORCH = ("fastapi", "grpc.aio", "uvicorn", "prometheus_client")


@contextmanager
def preparation(settings: ServerSettings) -> Iterator[Prepared]:
    """Begin; at the end of the block everything that is left of it is taken away."""
    store = store_of(settings)
    try:
        wanted = [each for each in startup_models(settings, store.names()) if not is_remote(each.url)]
        fork_server = _fork_server(settings, store, wanted)
        if sys.platform == "linux":
            threading.Thread(target=map_torch, name="map-torch", daemon=True).start()
        ahead = UnpackedAhead(store, [each.url for each in wanted])
        try:
            for name in _WITHOUT_TORCH:
                importlib.import_module(name)
            yield Prepared(store, ahead, fork_server)
        finally:
            ahead.close()
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
    """Whether the model will run in processes, as far as its archive tells unopened; only a guess."""
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


def map_torch() -> None:
    """Map the libraries of torch, which `import torch` then finds mapped; without effect where it can't.

    Called as a foreign function, because `ctypes.CDLL` keeps the GIL while it maps and links. Left to torch
    where it is built for CUDA: it has rules of its own for finding those libraries.
    """
    found = importlib.util.find_spec("torch")
    for place in (found.submodule_search_locations or ()) if found else ():
        library = Path(place, "lib", "libtorch_python.so")
        if library.is_file() and not library.with_name("libtorch_cuda.so").exists():
            dlopen = ctypes.CDLL(None).dlopen
            dlopen.restype = ctypes.c_void_p
            dlopen(bytes(library), _RTLD_LAZY)
