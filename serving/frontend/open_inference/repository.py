"""The protocol's model repository: the index of versions, and loading and unloading of models by name.

In TorchServe's terms, loading registers an archive of the model store, and unloading unregisters it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from torchere.handlers.tensors import shown
from torchere.serving.config.model_settings import Asked
from torchere.serving.errors import Conflict, InvalidRequest, ModelNotFound
from torchere.serving.frontend.control import ControlPlane, VersionDescription
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.version import VersionState

_STATES = {
    VersionState.NEW: "UNAVAILABLE",
    VersionState.LOADING: "LOADING",
    VersionState.WARMING: "LOADING",
    VersionState.READY: "READY",
    VersionState.DRAINING: "UNLOADING",
    VersionState.UNLOADING: "UNLOADING",
    VersionState.GONE: "UNAVAILABLE",
    VersionState.FAILED: "UNAVAILABLE",
}


_EMPTY_CONFIGS: tuple[object, ...] = ("", "{}", {}, None)


class IndexEntry(NamedTuple):
    """One version in the index."""

    name: str
    version: str
    state: str  # READY, LOADING, UNLOADING or UNAVAILABLE
    reason: str  # why it is not ready; "" when it is


class Repository:
    """Endpoints of the protocol over one control plane; used on its event loop."""

    def __init__(self, controlplane: ControlPlane) -> None:
        self._controlplane = controlplane

    def index(self, ready_only: bool) -> list[IndexEntry]:
        """Return all registered versions, sorted by model name, or only those that are ready."""
        names = self._controlplane.list_models(2**31, 0).entries
        entries = [
            _entry(described) for name, _ in names for described in self._controlplane.describe(name, "all")
        ]
        return [entry for entry in entries if entry.state == "READY" or not ready_only]

    async def load(self, model: str, parameters: Mapping[str, object]) -> None:
        """Register a model of the store and wait until it can answer. A ready model is left unchanged.

        A model that is registered but not ready (it failed, has no executors, or is loading) is scaled up.
        If there are several versions, this applies to the one from `url`, or without it to the default one.

        Args:
            model: name of the model.
            parameters: `url`: its archive, by default `<model>.mar`; `initial_workers`: its initial number of
                executors, by default 1. Triton's `config`, unless it is empty, and `file:NAME` are refused.

        Raises:
            NotAllowed: the model API is off.
            InvalidRequest, ModelNotFound, InvalidArchive, DownloadFailed, LoadFailed: it is not loaded.
            Conflict: it was unregistered meanwhile, or another archive has its name and version.
        """
        file = next((name for name in parameters if name.startswith("file:")), None)
        if file is not None:  # the client would take a success for a load of these bytes
            raise InvalidRequest(
                f"parameters.{shown(file)[1:-1]}: found the bytes of a file, "
                "expected none: models come from archives (parameters.url)"
            )
        if parameters.get("config", "") not in _EMPTY_CONFIGS:  # a success would suggest that it applies
            raise InvalidRequest(
                "parameters.config: found a model configuration, expected none: say it in the archive's "
                "model-config.yaml, or with batch_size, max_batch_delay and initial_workers of POST /models"
            )
        url = parameters.get("url")
        if url is not None and not isinstance(url, str):
            raise InvalidRequest(f"parameters.url: found {shown(url)}, expected the name of an archive")
        executors = parameters.get("initial_workers", 1)
        if not isinstance(executors, int) or isinstance(executors, bool):
            raise InvalidRequest(
                f"parameters.initial_workers: found {shown(executors)}, expected a whole number"
            )
        found = self._meant(model, url)
        if found is None:
            archive = f"{model}.mar" if url is None else url
            wish = Wanted(archive, Asked(executors=executors), name=model)
            try:
                await self._controlplane.register(wish)
            except Conflict:
                found = self._meant(model, url)
                if found is None:  # another archive has the name and version, or it was unregistered
                    raise
            else:
                return
        if _entry(found).state == "READY":
            return
        self._controlplane.check_model_api()
        least = max(executors, found.settings.min_executors)
        most = max(least, found.settings.max_executors)
        await self._controlplane.scale(
            model, found.key.version, min_executors=least, max_executors=most, synchronous=True
        )

    def _meant(self, model: str, url: str | None) -> VersionDescription | None:
        """Return the registered version that a load names: the one from `url`, or the default version.

        A version that was restored at start-up has the name of its file instead of the URL of its download.
        """
        try:
            versions = self._controlplane.describe(model, None if url is None else "all")
        except ModelNotFound:
            return None
        if url is None:
            return versions[0]
        file_name = url.partition("?")[0].rpartition("/")[2]
        for one in versions:
            if one.url == url or (one.loaded_at_startup and one.url == file_name):
                return one
        return None

    async def unload(self, model: str) -> None:
        """Unregister every version of a model at once, and wait until their requests are answered.

        Raises:
            NotAllowed: the model API is off.
            ModelNotFound: the model is not registered.
            UnregisterTimeout: its requests were not answered in time.
        """
        default = self._controlplane.describe(model, None)[0].key.version
        versions = [described.key.version for described in self._controlplane.describe(model, "all")]
        others = [version for version in versions if version != default]
        # The default version can only be unregistered last. All are removed before the first await, because
        # clients could register or remove versions during it, and the model would serve with some of them.
        await asyncio.gather(
            *(self._controlplane.unregister(model, version) for version in (*others, default))
        )


def _entry(described: VersionDescription) -> IndexEntry:
    state = _STATES[described.state]
    if described.condition != described.state.value:  # ready, but no executor is in service
        state = "UNAVAILABLE"
    reason = "" if state == "READY" else described.failure or described.condition
    return IndexEntry(*described.key, state, reason)
