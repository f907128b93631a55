"""Formats and errors of SageMaker's inference toolkit.

Scripts (`inference.py`) import helpers from `sagemaker_inference`. Where that package is not installed,
`ts_compat/alias.py` provides the modules that scripts use. Reading and writing have the same results as in
the toolkit, except that NumPy files with pickled objects are refused.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from torchere.handlers.tensors.npy import read_npy

JSON = "application/json"
CSV = "text/csv"
OCTET_STREAM = "application/octet-stream"
ANY = "*/*"
NPY = "application/x-npy"
NPZ = "application/x-npz"
UTF8_TYPES = [JSON, CSV]


class UnsupportedFormatError(Exception):
    """There is no decoder or encoder for a content type."""

    def __init__(self, content_type: str | None, **kwargs: Any) -> None:
        super().__init__(
            f"Content type {content_type} is not supported by this framework.\n\n"
            "Please implement input_fn to to deserialize the request data or an output_fn to\n"
            "serialize the response. For more information, see the SageMaker Python SDK README.",
            **kwargs,
        )


class ModelLoadError(Exception):
    """The model file is not TorchScript, and the script has no `model_fn`."""


class BaseInferenceToolkitError(Exception):
    """An error with an HTTP status of its own; scripts raise it or derive from it."""

    def __init__(self, status_code: int, message: str, phrase: str) -> None:
        self.status_code = status_code
        self.message = message
        self.phrase = phrase
        super().__init__(status_code, message, phrase)


class GenericInferenceToolkitError(BaseInferenceToolkitError):
    """The toolkit's generic error, for failures without an error class of their own."""

    def __init__(self, status_code: int, message: str | None = None, phrase: str | None = None) -> None:
        message = message or "Invalid Request"
        super().__init__(status_code, message, phrase or message)


def _npz_to_sparse(data: bytes) -> Any:
    import scipy.sparse  # type: ignore[import-untyped]  # noqa: PLC0415  # rarely needed, not a dependency

    return scipy.sparse.load_npz(io.BytesIO(data))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    NPY: lambda data: read_npy(data, "the body"),  # refuses pickles, which the toolkit runs
    CSV: lambda text: np.genfromtxt(io.StringIO(text), dtype=None, delimiter=","),
    JSON: lambda text: np.array(json.loads(text)),
    NPZ: _npz_to_sparse,
}


def plain_type(content_type: str | None) -> str:
    """Return a content type without its parameters."""
    return (content_type or "").partition(";")[0].strip()


def decode(obj: Any, content_type: str | None) -> Any:
    """Return the NumPy array (a sparse matrix for npz) that a request body holds.

    Args:
        obj: text for JSON and CSV, else bytes.
        content_type: one of JSON, CSV, NPY and NPZ; parameters after a semicolon are ignored.

    Raises:
        UnsupportedFormatError: the content type is not one of these.
        ValueError: the body is not of that type; TensorError for a NumPy file.
    """
    decoder = _DECODERS.get(plain_type(content_type))
    if decoder is None:
        raise UnsupportedFormatError(content_type)
    return decoder(obj)


def _as_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return json.JSONEncoder().default(value)


def _array_to_npy(array_like: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array_like)  # pickles a dictionary, as the toolkit does; only the client reads it
    return buffer.getvalue()


def _array_to_csv(array_like: Any) -> str:
    stream = io.StringIO()
    np.savetxt(stream, array_like, delimiter=",", fmt="%s")
    return stream.getvalue()


_ENCODERS: dict[str, Callable[[Any], Any]] = {
    NPY: _array_to_npy,
    CSV: _array_to_csv,
    JSON: lambda array_like: json.dumps(array_like, default=_as_list),
}
SUPPORTED_CONTENT_TYPES = set(_ENCODERS)


def encode(array_like: Any, content_type: str) -> Any:
    """Return an array or a list as text (JSON, CSV) or bytes (NPY).

    Raises:
        UnsupportedFormatError: the content type is not one of these.
    """
    encoder = _ENCODERS.get(content_type)
    if encoder is None:
        raise UnsupportedFormatError(content_type)
    return encoder(array_like)


def parse_accept(accept: str) -> list[str]:
    """Return the content types of an `Accept` header."""
    return accept.replace(" ", "").split(",")
