"""Clients of a torchere (or TorchServe) server's REST APIs; needs httpx, and NumPy for arrays only.

Example:
    from torchere.client import Client

    with Client("http://127.0.0.1:8080", token="...") as client:
        print(client.predict("net", {"x": [1.0, 2.0]}).json())
"""

from torchere.client.async_client import AsyncClient
from torchere.client.client import Client
from torchere.client.errors import (
    AnswerError,
    ClientError,
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    ModelFailed,
    NotFound,
    TooLate,
    Unauthorized,
    Unavailable,
    UnreadableAnswer,
)
from torchere.client.inference import InferOptions, InferResult
from torchere.client.management import ModelEntry, ModelMetadata, ModelState, ServerMetadata, TensorMetadata
from torchere.client.predictions import Part, Prediction
from torchere.client.tensors import Tensor, tensor
from torchere.client.wire import Retries

__all__ = [
    "AnswerError",
    "AsyncClient",
    "Client",
    "ClientError",
    "Conflict",
    "ConnectionFailed",
    "DeadlineExceeded",
    "InferOptions",
    "InferResult",
    "InvalidRequest",
    "ModelEntry",
    "ModelFailed",
    "ModelMetadata",
    "ModelState",
    "NotFound",
    "Part",
    "Prediction",
    "Retries",
    "ServerMetadata",
    "Tensor",
    "TensorMetadata",
    "TooLate",
    "Unauthorized",
    "Unavailable",
    "UnreadableAnswer",
    "tensor",
]
