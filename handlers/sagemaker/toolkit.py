"""Formats, errors, variables and small functions of SageMaker's inference toolkit.

Scripts (`inference.py`) import helpers from `sagemaker_inference`. Where that package is not installed,
`ts_compat/alias.py` provides the modules that scripts use. Reading and writing have the same results as in
the toolkit, except that NumPy files with pickled objects are refused.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
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

BASE_PATH_ENV = "SAGEMAKER_BASE_DIR"
USER_PROGRAM_ENV = "SAGEMAKER_PROGRAM"
LOG_LEVEL_ENV = "SAGEMAKER_CONTAINER_LOG_LEVEL"
DEFAULT_INVOCATIONS_ACCEPT_ENV = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
MODEL_SERVER_WORKERS_ENV = "SAGEMAKER_MODEL_SERVER_WORKERS"
MODEL_SERVER_TIMEOUT_ENV = "SAGEMAKER_MODEL_SERVER_TIMEOUT"
MODEL_SERVER_TIMEOUT_SECONDS_ENV = "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS"
STARTUP_TIMEOUT_ENV = "SAGEMAKER_STARTUP_TIMEOUT"
BIND_TO_PORT_ENV = "SAGEMAKER_BIND_TO_PORT"
SAFE_PORT_RANGE_ENV = "SAGEMAKER_SAFE_PORT_RANGE"
MULTI_MODEL_ENV = "SAGEMAKER_MULTI_MODEL"
MAX_REQUEST_SIZE = "SAGEMAKER_MAX_PAYLOAD_IN_MB"

base_dir = os.environ.get(BASE_PATH_ENV) or "/opt/ml"
model_dir = f"{base_dir}/models" if os.environ.get(MULTI_MODEL_ENV) == "true" else f"{base_dir}/model"
code_dir = f"{model_dir}/code"


class Environment:
    """The container's variables under the toolkit's names, with their values when the object is made."""

    def __init__(self) -> None:
        get = os.environ.get
        seconds, megabytes = get(MODEL_SERVER_TIMEOUT_SECONDS_ENV), get(MAX_REQUEST_SIZE)
        self.module_name = (get(USER_PROGRAM_ENV) or "inference.py").removesuffix(".py")
        self.default_accept = get(DEFAULT_INVOCATIONS_ACCEPT_ENV) or JSON
        self.model_server_workers = get(MODEL_SERVER_WORKERS_ENV)
        self.model_server_timeout = int(get(MODEL_SERVER_TIMEOUT_ENV) or 60)
        self.model_server_timeout_seconds = int(seconds) if seconds else None
        self.startup_timeout = int(get(STARTUP_TIMEOUT_ENV) or 600)
        self.inference_http_port = self.management_http_port = get(BIND_TO_PORT_ENV) or "8080"
        self.safe_port_range = get(SAFE_PORT_RANGE_ENV)
        self.max_request_size = int(megabytes) * 1024 * 1024 if megabytes else None


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
    """The model can't be loaded: its file is not TorchScript, and the script has no `model_fn`."""


class BaseInferenceToolkitError(Exception):
    """An error with an HTTP status of its own; scripts raise it or derive from it."""

    def __init__(self, status_code: int, message: str, phrase: str) -> None:
        self.status_code = status_code
        self.message = message
        self.phrase = phrase
        super().__init__(status_code, message, phrase)


class GenericInferenceToolkitError(BaseInferenceToolkitError):
    """The toolkit's generic error, for failures that have no class of their own."""

    def __init__(self, status_code: int, message: str | None = None, phrase: str | None = None) -> None:
        message = message or "Invalid Request"
        super().__init__(status_code, message, phrase or message)


def _npz_to_sparse(data: bytes) -> Any:
    import scipy.sparse  # type: ignore[import-untyped]  # noqa: PLC0415  # rarely needed, not a dependency

    return scipy.sparse.load_npz(io.BytesIO(data))


def _npy_to_numpy(data: bytes) -> Any:
    return read_npy(data, "the body", as_numpy=True)  # refuses pickles, which the toolkit runs


def _csv_to_numpy(text: str, dtype: Any = None) -> Any:
    return np.genfromtxt(io.StringIO(text), dtype=dtype, delimiter=",")


def _json_to_numpy(text: str, dtype: Any = None) -> Any:
    return np.array(json.loads(text), dtype=dtype)


_decoder_map: dict[str, Callable[[Any], Any]] = {
    NPY: _npy_to_numpy,
    CSV: _csv_to_numpy,
    JSON: _json_to_numpy,
    NPZ: _npz_to_sparse,
}


def plain_type(content_type: str | None) -> str:
    """Return a content type without its parameters."""
    return (content_type or "").partition(";")[0].strip()


def decode(obj: Any, content_type: str | None) -> Any:
    """Return the NumPy array (a sparse matrix for npz) that a request body holds.

    Args:
        obj: text or bytes for JSON and CSV, else bytes.
        content_type: one of JSON, CSV, NPY and NPZ; parameters after a semicolon are ignored.

    Raises:
        UnsupportedFormatError: the content type is not one of these.
        ValueError: the body is not of that type; TensorError for a NumPy file.
    """
    plain = plain_type(content_type)
    decoder = _decoder_map.get(plain)
    if decoder is None:
        raise UnsupportedFormatError(content_type)
    return decoder(obj if isinstance(obj, str) or plain not in UTF8_TYPES else bytes(obj).decode("utf-8"))


def _as_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return json.JSONEncoder().default(value)


def _array_to_json(array_like: Any) -> str:
    return json.dumps(array_like, default=_as_list)


def _array_to_npy(array_like: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array_like)  # like the toolkit, it pickles a dictionary; only the client reads that
    return buffer.getvalue()


def _array_to_csv(array_like: Any) -> str:
    stream = io.StringIO()
    np.savetxt(stream, array_like, delimiter=",", fmt="%s")
    return stream.getvalue()


_encoder_map: dict[str, Callable[[Any], Any]] = {
    NPY: _array_to_npy,
    CSV: _array_to_csv,
    JSON: _array_to_json,
}
SUPPORTED_CONTENT_TYPES = set(_encoder_map)


def encode(array_like: Any, content_type: str) -> Any:
    """Return an array or a list as text (JSON, CSV) or bytes (NPY).

    Raises:
        UnsupportedFormatError: the content type is not one of these.
    """
    encoder = _encoder_map.get(content_type)
    if encoder is None:
        raise UnsupportedFormatError(content_type)
    return encoder(array_like)


def parse_accept(accept: str) -> list[str]:
    """Return the content types of an `Accept` header."""
    return accept.replace(" ", "").split(",")


def retrieve_content_type_header(request_property: Mapping[str, Any]) -> Any:
    """Return the value of the request's first `Content-Type` header, in any spelling; None without one."""
    found = (name for name in request_property if re.match("[Cc]ontent-?[Tt]ype", name))
    name = next(found, None)
    return None if name is None else request_property[name]


def read_file(path: str, mode: str = "r") -> Any:
    """Return the contents of a file: text, or bytes for the mode `rb`."""
    with Path(path).open(mode) as file:
        return file.read()


def write_file(path: str, data: Any, mode: str = "w") -> None:
    """Write text to a file, or bytes if the mode is `wb`."""
    with Path(path).open(mode) as file:
        file.write(data)


def remove_crlf(illegal_string: str) -> str:
    """Return a text with spaces in place of its line breaks."""
    return illegal_string.replace("\r", " ").replace("\n", " ")


def get_logger() -> logging.Logger:
    """Return the toolkit's logger."""
    return logging.getLogger("sagemaker-inference")


def configure_logger() -> None:
    """Do nothing: the server writes the records of every logger."""
