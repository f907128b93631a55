"""Clients of a torchere (or TorchServe) server's REST APIs; needs httpx, and NumPy for arrays only.

Example:
    from torchere.client import Client

    with Client("http://127.0.0.1:8080", token="...") as client:
        print(client.predict("net", {"x": [1.0, 2.0]}).json())
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
from torchere.client.management import (
    ModelEntry,
    ModelMetadata,
    ModelState,
    ServerMetadata,
    TensorMetadata,
)
from torchere.client.predictions import Part, Prediction
from torchere.client.tensors import Tensor, tensor

if TYPE_CHECKING:
    from torchere.client.async_client import AsyncClient
    from torchere.client.client import Client
    from torchere.client.transport import Retries

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

# The modules of the names that need httpx; imported on first use, because `torchere bench` runs without it.
_HOMES = {"AsyncClient": "async_client", "Client": "client", "Retries": "transport"}


def __getattr__(name: str) -> object:
    """Import the module that defines a public name, if that needs httpx.

    Raises:
        ModuleNotFoundError: httpx is not installed.
        AttributeError: there is no such name.
    """
    if name in _HOMES:
        try:
            return getattr(import_module(f"torchere.client.{_HOMES[name]}"), name)
        except ModuleNotFoundError as err:
            if err.name != "httpx":
                raise
            said = f"{name} of torchere.client needs httpx: pip install 'torchere[client]'"
            raise ModuleNotFoundError(said, name=err.name) from err
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
