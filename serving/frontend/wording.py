"""Texts of the management API, as TorchServe words them: sentences, and the JSON of `describe` and `list`.

REST and gRPC send the same. The memory use of a worker is read from the system here, because only `describe`
reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, Literal

import msgspec
import psutil

from torchere.handlers.encode import indented_json
from torchere.handlers.tensors.codec import NO_JSON
from torchere.serving.batching.quarantine import ConvictedRequest
from torchere.serving.config.kinds import shown_url
from torchere.serving.config.server_settings import ModelSettings
from torchere.serving.errors import HandlerFailed
from torchere.serving.frontend.control import Progress, Registered, VersionDescription
from torchere.serving.frontend.workflows import Page
from torchere.serving.registry.workflows import Workflow
from torchere.serving.types import InferResponse, ModelKey
from torchere.serving.workers.executor import ExecutorState, ExecutorStatus

MAX_METADATA_BYTES = 2**20  # of a handler: decoding and formatting a mebibyte takes the event loop 0.1 s
_UNFINISHED = {
    Progress.STARTED: "Processing worker updates...",
    Progress.PARTIAL: "Workers scaling in progress...",
}
NO_SUCH_RESOURCE = "Requested resource is not found, please refer to API document."
NO_SUCH_METHOD = "Requested method is not allowed, please refer to API document."
NO_MODEL_NAMED = "Parameter model_name is required."


def pretty(value: object) -> str:
    """Format JSON as TorchServe does: two spaces per level, non-ASCII unescaped, no newline at the end.

    A value with half a surrogate pair, which UTF-8 can't encode, is written in ASCII with escapes. It may
    come from a client's JSON, or from a file name that is not UTF-8.
    """
    try:
        return indented_json(value, ascii_only=False).decode()
    except UnicodeEncodeError:
        return indented_json(value).decode()


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


def version_json(version: VersionDescription) -> dict[str, Any]:
    """Return the JSON object of one version: TorchServe's fields in its order, ours under `torchere`."""
    return {
        "modelName": version.key.name,
        "modelVersion": version.key.version,
        "modelUrl": shown_url(version.url),
        "runtime": version.runtime,
        **_settings_json(version),
        "loadedAtStartup": version.loaded_at_startup,
        "workers": [_executor_json(executor) for executor in _with_memory(version)],
        "jobQueueStatus": {
            "remainingCapacity": version.queue_capacity,
            "pendingRequests": version.queue_length,
        },
        "torchere": _own_json(version),
    }


def versions_text(versions: list[VersionDescription]) -> str:
    """Return the JSON array that `describe` responds with."""
    return pretty([version_json(version) for version in versions])


def customized_text(version: VersionDescription, response: InferResponse) -> str:
    """Return `describe` of one version with the metadata from its handler as `customizedMetadata`.

    As in TorchServe, a response that is not a JSON object (`BaseHandler` returns null) becomes `{}`, and only
    an empty response leaves the member out: clients that poll for it (KServe's wrapper) take any value as a
    sign that the handler is loaded.

    Raises:
        HandlerFailed: the metadata has more than `MAX_METADATA_BYTES`.
    """
    if len(response.body) > MAX_METADATA_BYTES:
        flaw = f"metadata of {len(response.body)} bytes, expected at most {MAX_METADATA_BYTES}"
        raise HandlerFailed("Failed to get customized model metadata.", status=500, detail=flaw)
    described = version_json(version)
    try:
        said = msgspec.json.decode(bytes(response.body))  # a worker could change a view of shared memory
    except NO_JSON:
        said = None
    if response.body:
        described["customizedMetadata"] = said if isinstance(said, dict) else {}
    return pretty([described])


def quarantine_text(convicts: Sequence[ConvictedRequest]) -> str:
    """Return the quarantined requests of a version as JSON; times are whole seconds."""
    return pretty({"quarantinedRequests": [_convict_json(convict) for convict in convicts]})


def _convict_json(convict: ConvictedRequest) -> dict[str, Any]:
    described = {
        "digest": convict.digest,
        "bytes": convict.size,
        "causes": list(convict.causes),
        "quarantinedForSec": round(convict.convicted_for_s),
    }
    if convict.expires_in_s is not None:
        described["expiresInSec"] = round(convict.expires_in_s)
    return described


def page_text(page: Page, kind: Literal["model", "workflow"] = "model") -> str:
    """Return one page of the list of models, or of workflows, as JSON."""
    token = {} if page.next_page_token is None else {"nextPageToken": page.next_page_token}
    listed = [{f"{kind}Name": name, f"{kind}Url": shown_url(url)} for name, url in page.entries]
    return pretty({**token, f"{kind}s": listed})


def workflow_text(workflow: Workflow) -> str:
    """Return the description of a workflow as JSON; the graph is in TorchServe's (Java's) notation."""
    defaults = workflow.spec.defaults
    dag = [f"{node}=[{', '.join(below)}]" for node, below in workflow.spec.children.items()]
    described = {
        "workflowName": workflow.name,
        "workflowUrl": shown_url(workflow.url),
        "minWorkers": defaults.min_workers,
        "maxWorkers": defaults.max_workers,
        "batchSize": defaults.batch_size,
        "maxBatchDelay": defaults.max_batch_delay_ms,
        "workflowDag": "{" + ", ".join(dag) + "}",
    }
    return pretty([described])


def _device_type(settings: ModelSettings) -> str:
    """Return TorchServe's word, `gpu` or `cpu`, or the kind of another device."""
    if settings.device_type in ("xpu", "mps", "hpu", "xla"):
        return settings.device_type
    return "gpu" if settings.gpu_ids else "cpu"


def _settings_json(version: VersionDescription) -> dict[str, Any]:
    settings = version.settings
    device_ids = {"deviceIds": list(settings.device_ids)} if settings.device_ids else {}
    return {
        "minWorkers": settings.min_executors,
        "maxWorkers": settings.max_executors,
        "batchSize": settings.batch.max_batch_size,
        "maxBatchDelay": settings.batch.max_queue_delay_ms,
        "responseTimeout": round(settings.response_timeout_s),
        "startupTimeout": round(settings.startup_timeout_s),
        "maxRetryTimeoutInSec": round(settings.max_retry_timeout_s),
        "clientTimeoutInMills": settings.client_timeout_ms,
        "parallelType": settings.parallel.kind if settings.parallel else "",
        "parallelLevel": settings.parallel.level if settings.parallel else 0,
        "deviceType": _device_type(settings),
        **device_ids,
        "continuousBatching": settings.continuous,
        "useJobTicket": settings.batch.use_tickets,
        "useVenv": version.uses_venv,
        **_sequence_json(settings),
    }


def _sequence_json(settings: ModelSettings) -> dict[str, Any]:
    sequences = settings.sequences
    return {
        "stateful": sequences is not None or settings.sequences_unbounded,
        "sequenceMaxIdleMSec": round(sequences.max_idle_s * 1000) if sequences else 0,
        "sequenceTimeoutMSec": round(sequences.timeout_s * 1000) if sequences else 0,
        "maxNumSequence": sequences.max_sequences if sequences else 0,
        "maxSequenceJobQueueSize": sequences.max_queue_size if sequences else 0,
    }


def _own_json(version: VersionDescription) -> dict[str, Any]:
    own: dict[str, Any] = {"state": version.condition, "isolation": version.isolation}
    if version.signer:
        own["signer"] = version.signer
    if version.failure:
        own["failure"] = version.failure
    if lost := [_loss_json(executor) for executor in version.executors if executor.losses]:
        own["losses"] = lost
    if version.quarantined:
        own["quarantinedRequests"] = version.quarantined
    return own


def _with_memory(version: VersionDescription) -> tuple[ExecutorStatus, ...]:
    """Measure the memory of the executors, each with all of its processes."""
    memory: dict[int, int] = {}  # by process id: executors that share a process are measured once
    for pid in {status.pid for status in version.executors}:
        with suppress(psutil.Error):  # the process has ended, or has not started yet
            process = psutil.Process(pid)
            ranks = process.children() if version.settings.parallel else []
            memory[pid] = sum(each.memory_info().rss for each in [process, *ranks])
    return tuple(replace(status, memory_bytes=memory.get(status.pid, 0)) for status in version.executors)


def _executor_json(executor: ExecutorStatus) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": str(executor.executor_id),
        "startTime": _moment(executor.started_at),
        # Clients wait for READY; UNLOADING is the only other status they know.
        "status": "READY" if executor.state is ExecutorState.READY else "UNLOADING",
        "memoryUsage": executor.memory_bytes,
        "pid": executor.pid,
        "gpu": executor.gpu_id is not None,
        "gpuUsage": "N/A" if executor.gpu_id is None else f"gpuId::{executor.gpu_id}",
    }
    if executor.last_failure:
        described["lastFailure"] = executor.last_failure
    return described


def _loss_json(executor: ExecutorStatus) -> dict[str, Any]:
    return {
        "executor": str(executor.executor_id),
        "count": executor.losses,
        "lastCause": executor.last_failure,
        "lastTime": _moment(executor.last_failure_at or executor.started_at),
    }


def _moment(moment: datetime) -> str:
    text = moment.astimezone(timezone.utc).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
