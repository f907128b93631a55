"""The operations of KServe's protocols for the OpenAPI documents. Pure data.

Two of them, `POST /v1/models/{model_name}:predict` and `POST /v2/models/{model_name}/infer`, are in
TorchServe's own documents, so they are defined in `openapi.py`.
"""

from __future__ import annotations

from torchere.serving.frontend.rest.authorisation import Surfaces
from torchere.serving.frontend.rest.openapi import Operation

_MODEL = "/v2/models/{model_name}"
_VERSION = f"{_MODEL}/versions/{{model_version}}"
_READ = (200, 404, 503)
_ASK = (200, 400, 404, 413, 415, 500, 503, 504)
_LOADED = (200, 400, 404, 409, 500)

_SERVER = (
    Operation("/v1/models", "get", "v1_models", "Names of the models", (200,)),
    Operation("/v1/models/{model_name}", "get", "v1_model_ready", "Whether a model is ready", _READ),
    Operation("/v2", "get", "v2_server_metadata", "Name, version and extensions of the server", (200,)),
    Operation("/v2/health/live", "get", "v2_live", "Whether the server is alive", (200,)),
    Operation("/v2/health/ready", "get", "v2_ready", "Whether the models are ready", (200, 503)),
    Operation("/v2/models/stats", "get", "v2_statistics", "Statistics of all models", (200,)),
)
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
_REPOSITORY = (
    Operation("/v2/repository/index", "post", "v2_repository_index", "List the models", has_body=True),
    Operation(
        "/v2/repository/models/{model_name}/load", "post", "v2_load", "Load a model", _LOADED, has_body=True
    ),
    Operation("/v2/repository/models/{model_name}/unload", "post", "v2_unload", "Unload a model", _LOADED),
)


def open_inference_operations(surfaces: Surfaces) -> list[Operation]:
    """Return the operations that a listener has when the protocol is enabled."""
    operations: list[Operation] = []
    if "inference" in surfaces:
        operations += _SERVER
        operations += _of_model(_MODEL, "v2_model", "of a model")
        operations += _of_model(_VERSION, "v2_version", "of a version")
    if "management" in surfaces:
        operations += _REPOSITORY
    return operations


def _of_model(base: str, prefix: str, whose: str) -> list[Operation]:
    rows = [
        Operation(base + end, "get", f"{prefix}_{name}", f"{what}, {whose}", _READ)
        for end, name, what in _READERS
    ]
    for end, name, what in _ASKERS:
        if base != _MODEL or name != "infer":  # that one is in TorchServe's part
            rows.append(
                Operation(base + end, "post", f"{prefix}_{name}", f"{what}, {whose}", _ASK, has_body=True)
            )
    return rows
