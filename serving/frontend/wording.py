"""The sentences of the management API as TorchServe's clients know them; REST and gRPC share them."""

from __future__ import annotations

from torchere.serving.frontend.control import Progress, Registered
from torchere.serving.types import ModelKey

PROCESSING = "Processing worker updates..."
IN_PROGRESS = "Workers scaling in progress..."
NO_SUCH_RESOURCE = "Requested resource is not found, please refer to API document."
NO_SUCH_METHOD = "Requested method is not allowed, please refer to API document."
NO_MODEL_NAMED = "Parameter model_name is required."


def health(healthy: bool) -> str:
    """The word of `/ping`."""
    return "Healthy" if healthy else "Unhealthy"


def registered(result: Registered) -> str:
    """What registering came to."""
    if result.progress is Progress.STARTED:
        return PROCESSING
    if result.progress is Progress.PARTIAL:
        return IN_PROGRESS
    head = f'Model "{result.key.name}" Version: {result.key.version} registered with {result.executors}'
    if result.executors == 0:
        return f"{head} initial workers. Use scale workers API to add workers for the model."
    return f"{head} initial workers"


def scaled(progress: Progress, model: str, version: str | None, min_executors: int) -> str:
    """What scaling came to."""
    if progress is Progress.STARTED:
        return PROCESSING
    if progress is Progress.PARTIAL:
        return IN_PROGRESS
    named = f", version: {version}" if version else ""
    return f"Workers scaled to {min_executors} for model: {model}{named}"


def unregistered(model: str) -> str:
    """The answer after a version is gone."""
    return f'Model "{model}" unregistered'


def default_set(key: ModelKey) -> str:
    """The answer after the default version changed."""
    return f'Default version successfully updated for model "{key.name}" to "{key.version}"'
