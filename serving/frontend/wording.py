"""Response texts of the management API, as TorchServe words them; REST and gRPC share them."""

from __future__ import annotations

from torchere.serving.frontend.control import Progress, Registered
from torchere.serving.types import ModelKey

_UNFINISHED = {
    Progress.STARTED: "Processing worker updates...",
    Progress.PARTIAL: "Workers scaling in progress...",
}
NO_SUCH_RESOURCE = "Requested resource is not found, please refer to API document."
NO_SUCH_METHOD = "Requested method is not allowed, please refer to API document."
NO_MODEL_NAMED = "Parameter model_name is required."


def health(healthy: bool) -> str:
    """Return the status text of `/ping`."""
    return "Healthy" if healthy else "Unhealthy"


def registered(result: Registered) -> str:
    """Return the response text of a registration."""
    if result.progress in _UNFINISHED:
        return _UNFINISHED[result.progress]
    head = f'Model "{result.key.name}" Version: {result.key.version} registered with {result.executors}'
    if result.executors == 0:
        return f"{head} initial workers. Use scale workers API to add workers for the model."
    return f"{head} initial workers"


def scaled(progress: Progress, model: str, version: str | None, min_executors: int) -> str:
    """Return the response text of a scaling call."""
    if progress in _UNFINISHED:
        return _UNFINISHED[progress]
    named = f", version: {version}" if version else ""
    return f"Workers scaled to {min_executors} for model: {model}{named}"


def unregistered(model: str) -> str:
    """Return the response text after a version was unregistered."""
    return f'Model "{model}" unregistered'


def workflow_registered(name: str) -> str:
    """Return the response text after a workflow was registered."""
    return f"Workflow {name} has been registered and scaled successfully."


def workflow_unregistered(name: str) -> str:
    """Return the response text after a workflow was unregistered."""
    return f'Workflow "{name}" unregistered'


def quarantine_lifted(key: ModelKey, lifted: int) -> str:
    """Return the response text after quarantined requests may run again."""
    return f'Quarantine of model "{key.name}" version "{key.version}" lifted for requests: {lifted}'


def default_set(key: ModelKey) -> str:
    """Return the response text after the default version changed."""
    return f'Default version successfully updated for model "{key.name}" to "{key.version}"'
