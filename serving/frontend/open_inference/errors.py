"""Errors of handlers, with the status and message that Open Inference Protocol clients expect."""

from __future__ import annotations

from typing import Any

import msgspec

from torchere.handlers.tensors.codec import NO_JSON
from torchere.serving.errors import HandlerFailed, ServingError
from torchere.serving.types import InferResponse

# TorchServe answers 503 for these, which clients of this protocol take for "try again". They are bugs: 500.
_BUGS = frozenset(
    {
        "Prediction failed",
        "Invalid model predict output",
        "number of batch response mismatched",
        "Unsupported model output data type.",
    }
)


def as_client_knows(error: ServingError) -> ServingError:
    """Return the error with this protocol's status: 500 for a handler bug; a handler's own 503 stays."""
    if isinstance(error, HandlerFailed) and error.status == 503 and error.message in _BUGS:
        return HandlerFailed(error.message, 500, error.detail)
    return error


def refused_by_handler(response: InferResponse) -> HandlerFailed:
    """Return the error for a response to which the handler gave a status of 400 or more."""
    return HandlerFailed(_message(response.body), response.status)


def _message(body: bytes) -> str:
    text = bytes(body).decode("utf-8", "replace")
    try:
        said: Any = msgspec.json.decode(body)
    except NO_JSON:
        return text
    for name in ("error", "message"):
        if isinstance(said, dict) and isinstance(said.get(name), str):
            return str(said[name])
    return text
