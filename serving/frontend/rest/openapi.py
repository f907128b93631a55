"""The OpenAPI 3.0.1 documents of the listeners, as plain dicts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from torchere.handlers.tensors.codec import NO_JSON
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.authorisation import Surfaces

Document = dict[str, Any]
Parameters = tuple[tuple[str, str], ...]  # of a query: name, JSON type

TITLE = "TorchServe APIs"  # clients and gateways identify the API by it
DESCRIPTION = "TorchServe is a flexible and easy to use tool for serving deep learning models"
_STATUSES = {
    200: "OK",
    202: "Accepted: the change is on its way",
    206: "Fewer executors than asked for are up",
    400: "The request is wrong",
    403: "The default version can't be removed",
    404: "There is no such model or version",
    405: "The method or the model API is off",
    408: "Requests were still running when the time was over",
    413: "The body is too long",
    415: "The body is compressed in an unknown way",
    409: "This version is registered already",
    500: "Internal server error",
    503: "The server can't take the request now",
    504: "The deadline passed",
}
# TorchServe's errors, and those of the Open Inference Protocol.
_ERROR = {
    "anyOf": [
        {
            "type": "object",
            "required": ["code", "type", "message"],
            "properties": {
                "code": {"type": "integer"},
                "type": {"type": "string"},
                "message": {"type": "string"},
            },
        },
        {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    ]
}


class Operation(NamedTuple):
    """One operation of an API: path, method, id, summary, statuses, query parameters and body."""

    path: str
    method: str
    operation_id: str
    summary: str
    statuses: tuple[int, ...] = (200, 500)
    query: Parameters = ()
    has_body: bool = False


def _post(path: str, operation_id: str, summary: str, statuses: tuple[int, ...]) -> Operation:
    """Return an operation whose request has a body."""
    return Operation(path, "post", operation_id, summary, statuses, has_body=True)


_PREDICT = (200, 400, 404, 500, 503, 504)
_SCALED = (200, 202, 206, 400, 404, 500)
_REGISTERED = (200, 202, 206, 400, 404, 405, 409, 500)
_UNREGISTERED = (200, 403, 404, 405, 408)
SCALE: Parameters = (("min_worker", "integer"), ("max_worker", "integer"), ("synchronous", "boolean"))
REGISTER: Parameters = (
    ("url", "string"),
    ("model_name", "string"),
    ("handler", "string"),
    ("runtime", "string"),
    ("batch_size", "integer"),
    ("max_batch_delay", "integer"),
    ("initial_workers", "integer"),
    ("synchronous", "boolean"),
    ("response_timeout", "integer"),
    ("startup_timeout", "integer"),
    ("s3_sse_kms", "boolean"),
)
_CUSTOMIZED = (("customized", "boolean"),)
_MODEL, _VERSION = "/models/{model_name}", "/models/{model_name}/{model_version}"
_PREDICTIONS = "/predictions/{model_name}"
_V1_PREDICT, _V2_INFER = "/v1/models/{model_name}:predict", "/v2/models/{model_name}/infer"

SHARED = (
    Operation("/", "options", "apiDescription", "Describe this API"),
    Operation("/api-description", "get", "api-description", "Describe this API"),
)
# Every document has them, as in TorchServe; listeners that don't serve them answer 404.
METRICS = (Operation("/metrics", "get", "metrics", "Metrics as text", (200, 404), (("name[]", "string"),)),)
INFERENCE = (
    Operation("/ping", "get", "ping", "Whether the models are healthy"),
    _post(_V1_PREDICT, "predictions_v1", "Predict", _PREDICT),
    _post(_V2_INFER, "predictions_v2", "Predict", _PREDICT),
    _post(_PREDICTIONS, "predictions", "Predict", _PREDICT),
    _post(
        f"{_PREDICTIONS}/{{model_version}}", "version_predictions", "Predict with a named version", _PREDICT
    ),
)
_LIST_QUERY = (("limit", "integer"), ("next_page_token", "integer"))
_QUARANTINE = f"{_VERSION}/quarantine"
_MODEL_OPERATIONS = (
    Operation(_MODEL, "get", "describeModel", "Describe a model", (200, 404, 500), _CUSTOMIZED),
    Operation(_MODEL, "put", "setAutoScale", "Scale a model", _SCALED, SCALE),
    Operation(_MODEL, "delete", "unregisterModel", "Unregister a model", _UNREGISTERED),
    Operation(_VERSION, "get", "version_describeModel", "Describe a version", (200, 404, 500), _CUSTOMIZED),
    Operation(_VERSION, "put", "version_setAutoScale", "Scale a version", _SCALED, SCALE),
    Operation(_VERSION, "delete", "version_unregisterModel", "Unregister a version", _UNREGISTERED),
    Operation(f"{_VERSION}/set-default", "put", "setDefault", "Make a version the default one", (200, 404)),
    Operation(_QUARANTINE, "get", "quarantine", "List the quarantined requests of a version", (200, 404)),
    Operation(_QUARANTINE, "delete", "liftQuarantine", "Lift the quarantine of them all", (200, 404)),
    Operation(
        f"{_QUARANTINE}/{{digest}}",
        "delete",
        "liftQuarantineOfRequest",
        "Lift the quarantine of one request",
        (200, 404),
    ),
)
MANAGEMENT = (
    Operation("/models", "get", "listModels", "List the models", (200,), _LIST_QUERY),
    Operation("/models", "post", "registerModel", "Register a model", _REGISTERED, REGISTER),
    *_MODEL_OPERATIONS,
)

_ASK = (200, 400, 404, 413, 415, 500, 503, 504)
_WORKFLOW = "/workflows/{workflow_name}"
REGISTER_WORKFLOW: Parameters = (
    ("url", "string"),
    ("workflow_name", "string"),
    ("response_timeout", "integer"),
    ("startup_timeout", "integer"),
    ("s3_sse_kms", "boolean"),
)
_REGISTERED_WORKFLOW = (200, 400, 404, 405, 409, 500)
# Predictions of workflows, and SageMaker's.
_OTHER_PREDICTIONS = (
    _post("/wfpredict/{workflow_name}", "wfpredict", "Run a workflow", _ASK),
    _post("/invocations", "invocations", "Predict, as SageMaker does", _ASK)._replace(
        query=(("model_name", "string"),)
    ),
    _post(f"{_MODEL}/invoke", "invoke", "Predict, as SageMaker does", _ASK),
)
_WORKFLOWS = (
    Operation("/workflows", "get", "listWorkflows", "List the workflows", (200,), _LIST_QUERY),
    Operation(
        "/workflows",
        "post",
        "registerWorkflow",
        "Register a workflow",
        _REGISTERED_WORKFLOW,
        REGISTER_WORKFLOW,
    ),
    Operation(_WORKFLOW, "get", "describeWorkflow", "Describe a workflow", (200, 404)),
    Operation(_WORKFLOW, "delete", "unregisterWorkflow", "Unregister a workflow", (200, 404, 405, 408)),
)

_READ = (200, 404, 503)
_LOADED = (200, 400, 404, 409, 500)
# End of the path, name of the operation, summary.
_READERS = (
    ("", "metadata", "Inputs and outputs"),
    ("/ready", "ready", "Whether it is ready"),
    ("/config", "config", "Configuration, as Triton has it"),
    ("/stats", "stats", "Statistics"),
)
_ASKERS = (
    ("/infer", "infer", "Predict with tensors"),
    ("/generate", "generate", "Predict with plain members of an object"),
    ("/generate_stream", "generate_stream", "Predict; each part of the answer is an event"),
)


def _of_model(base: str, prefix: str, whose: str) -> Iterator[Operation]:
    for end, name, what in _READERS:
        yield Operation(base + end, "get", f"{prefix}_{name}", f"{what}, {whose}", _READ)
    for end, name, what in _ASKERS:
        if base + end != _V2_INFER:  # that one is in TorchServe's part
            yield _post(base + end, f"{prefix}_{name}", f"{what}, {whose}", _ASK)


_OPEN_INFERENCE = (
    Operation("/v1/models", "get", "v1_models", "Names of the models", (200,)),
    Operation("/v1/models/{model_name}", "get", "v1_model_ready", "Whether a model is ready", _READ),
    Operation("/v2", "get", "v2_server_metadata", "Name, version and extensions of the server", (200,)),
    Operation("/v2/health/live", "get", "v2_live", "Whether the server is alive", (200,)),
    Operation("/v2/health/ready", "get", "v2_ready", "Whether the models are ready", (200, 503)),
    Operation("/v2/models", "get", "v2_models", "Names of the models", (200,)),
    Operation("/v2/models/stats", "get", "v2_statistics", "Statistics of all models", (200,)),
    *_of_model("/v2/models/{model_name}", "v2_model", "of a model"),
    *_of_model("/v2/models/{model_name}/versions/{model_version}", "v2_version", "of a version"),
)
_REPOSITORY = (
    _post("/v2/repository/index", "v2_repository_index", "List the models", (200, 400, 500)),
    _post("/v2/repository/models/{model_name}/load", "v2_load", "Load a model", _LOADED),
    Operation("/v2/repository/models/{model_name}/unload", "post", "v2_unload", "Unload a model", _LOADED),
)


def listener_document(surfaces: Surfaces, server_version: str, *, open_inference: bool = False) -> Document:
    """Return the document of one listener; `open_inference`: with the Open Inference Protocol.

    As in TorchServe, every document includes the metrics, because clients look for them there.
    """

    def served(of_inference: Sequence[Operation], of_management: Sequence[Operation]) -> list[Operation]:
        found = [*of_inference] if "inference" in surfaces else []
        return [*found, *of_management] if "management" in surfaces else found

    parts = [*SHARED, *served(INFERENCE, MANAGEMENT), *METRICS, *served(_OTHER_PREDICTIONS, _WORKFLOWS)]
    if open_inference:
        parts += served(_OPEN_INFERENCE, _REPOSITORY)
    return _document(TITLE, server_version, parts, DESCRIPTION)


def management_document(model: str) -> Document:
    """Return the document of the management operations on one model."""
    return _document(f"RESTful Management API for: {model}", "1.0.0", _MODEL_OPERATIONS)


def prediction_document(model: str, signature_text: str | None) -> Document:
    """Return the document of predictions with one model, as declared by its archive's `signature.json`.

    Raises:
        InvalidRequest: the signature is not a JSON object.
    """
    paths = (f"/prediction/{model}", _V1_PREDICT, _V2_INFER)
    rows = [_post(path, model, "Predict", (200, 500)) for path in paths]
    document = _document(f"RESTful API for: {model}", "1.0.0", rows)
    if signature_text is not None:
        _merge_signature(document, signature_text)
    return document


def _document(title: str, version: str, rows: Iterable[Operation], description: str = "") -> Document:
    paths: dict[str, dict[str, Any]] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method] = _operation(row)
    info = {"title": title, "description": description, "version": version}
    return {"openapi": "3.0.1", "info": {k: v for k, v in info.items() if v}, "paths": paths}


def _operation(row: Operation) -> dict[str, Any]:
    names = [part.partition("}")[0] for part in row.path.split("{")[1:]]
    parameters = [_parameter("path", name, "string") for name in names]
    parameters += [_parameter("query", name, kind) for name, kind in row.query]
    operation: dict[str, Any] = {"summary": row.summary, "operationId": row.operation_id}
    if parameters:
        operation["parameters"] = parameters
    if row.has_body:
        operation["requestBody"] = {"content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}}
    operation["responses"] = {str(status): _response(status) for status in row.statuses}
    return operation


def _response(status: int) -> dict[str, Any]:
    described: dict[str, Any] = {"description": _STATUSES[status]}
    if status >= 400:
        described["content"] = {"application/json": {"schema": _ERROR}}
    return described


def _parameter(place: str, name: str, kind: str) -> dict[str, Any]:
    required = place == "path" or name == "url"
    return {"in": place, "name": name, "required": required, "schema": {"type": kind}}


def _merge_signature(document: Document, signature_text: str) -> None:
    try:
        signature = msgspec.json.decode(signature_text)
    except NO_JSON as err:
        raise InvalidRequest("Failed to parse signature.json") from err
    if not isinstance(signature, dict):
        raise InvalidRequest("Failed to parse signature.json")
    for path in document["paths"].values():
        operation = path["post"]
        if "inputs" in signature:
            operation["requestBody"] = {"content": _json_content(signature["inputs"])}
        if "outputs" in signature:
            operation["responses"]["200"]["content"] = _json_content(signature["outputs"])


def _json_content(declared: object) -> dict[str, Any]:
    # The format of the file is not specified, so its content is passed on unchanged.
    return {"application/json": {"schema": {"type": "object"}, "example": declared}}
