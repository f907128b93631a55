"""The handler of archives whose handler is a class in a shared library."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchere.handlers.context import Context
from torchere.handlers.cpp import CppHandlerName
from torchere.handlers.cpp.library import Session, library_of
from torchere.handlers.encode import encode_answer
from torchere.handlers.errors import HandlerLoadError
from torchere.handlers.rows import sole_element

MAX_BATCH_SIZE = 256  # handlers in C++ number the requests of a batch with one byte
_PAYLOADS = {"data": "data_dtype", "body": "body_dtype"}  # the headers that say how a payload is encoded


class CppHandler:
    """Hands the requests of a batch to a handler in C++, and its responses back. One thread at a time.

    A response whose code is not 200 is an error, as in TorchServe; here of its request, there of the batch.
    An exception fails the batch; for a request that is alone, the response that the handler left with an
    error code is the answer.
    """

    takes_bytes = True  # the values of requests are not decoded
    reads_envelopes = True  # TorchServe's C++ backend has no envelopes

    def __init__(self, name: CppHandlerName) -> None:
        self._name = name
        self._session: Session | None = None

    def initialize(self, context: Context) -> None:
        """Open the library, create the handler and load its model.

        Raises:
            HandlerLoadError: one of these failed, or `batchSize` is above 256; the text names the remedy.
        """
        system = context.system_properties
        batch_size = int(system.get("batch_size") or 1)
        if batch_size > MAX_BATCH_SIZE:
            raise HandlerLoadError(
                f"batchSize is {batch_size}; handlers in C++ take {MAX_BATCH_SIZE} requests at most: lower it"
            )
        library = library_of(system["model_dir"], self._name)
        library.metrics = context.metrics
        gpu = system.get("gpu_id")
        facts = (
            system["model_dir"],
            context.model_name,
            "-1" if gpu is None else str(gpu),
            f"{self._name.file}:{self._name.class_name}",
            str(batch_size),
            "1" if system.get("limit_max_image_pixels") else "0",
            json.dumps(_texts_of(context.manifest or {})),
        )
        self._session = Session(library, [fact.encode() for fact in facts])

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer one batch.

        Raises:
            RuntimeError: the handler raised an exception, or gave no response to a request.
        """
        assert self._session is not None
        started_s = time.perf_counter()
        pieces: list[bytes | bytearray] = [str(len(data)).encode()]
        for place, row in enumerate(data):
            pieces += _request_pieces(context, place, row)
        result = self._session.run(pieces)
        error = next(result).decode(errors="replace")
        preprocess_s, inference_s, postprocess_s = (float(next(result)) for _ in range(3))
        context.stages_s = (preprocess_s, inference_s, postprocess_s)
        answers = [_answer(context, place, result) for place in range(len(data))]
        if error and (len(data) > 1 or context.get_response_status(0)[0] == 200):
            raise RuntimeError(f"{self._name.class_name}: {error}")
        if context.metrics is not None:
            elapsed_ms = round((time.perf_counter() - started_s) * 1000, 2)
            context.metrics.add_time("HandlerTime", elapsed_ms, None, "ms")
        if None in answers:
            request_id = context.get_request_id(answers.index(None))
            raise RuntimeError(f"{self._name.class_name} gave no response to request {request_id}")
        return answers


def _texts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's values as texts, which is how handlers in C++ read them."""
    return {
        key: _texts_of(value) if isinstance(value, Mapping) else str(value)
        for key, value in manifest.items()
        if value is not None
    }


def _request_pieces(context: Context, place: int, row: Mapping[str, Any]) -> Iterator[bytes | bytearray]:
    """Yield one request in the order that `interface.hh` reads: id, headers, parameters."""
    headers: dict[str, str] = {}
    for name, value in context.get_all_request_header(place).items():
        if isinstance(value, Mapping):  # the content type of a parameter
            headers[f"{name}:contentType"] = value.get("content-type") or ""
        else:
            headers[name] = value
    for name in _PAYLOADS.keys() & row.keys():
        headers.setdefault(_PAYLOADS[name], "bytes")
    yield (context.get_request_id(place) or "").encode()
    yield str(len(headers)).encode()
    for name, value in headers.items():
        yield name.encode()
        yield str(value).encode()
    yield str(len(row)).encode()
    for name, value in row.items():
        yield name.encode()
        yield value if isinstance(value, (bytes, bytearray)) else _bytes_of(value)


def _bytes_of(value: Any) -> bytes:
    """Return a tensor of the Open Inference Protocol as a file of torch.save, and its BYTES as they are.

    Raises:
        PredictionException: 400, there are several elements of BYTES.
    """
    if isinstance(value, np.ndarray):
        return (
            sole_element(value, "a body") if value.dtype == object else encode_answer(torch.from_numpy(value))
        )
    return encode_answer(value)


def _answer(context: Context, place: int, result: Iterator[bytes]) -> Any:
    """Return the answer to one request, and set its status and headers; None if there is no response."""
    code = next(result)
    if not code:
        return None
    body = next(result)
    names_and_values = [next(result).decode("latin-1") for _ in range(2 * int(next(result)))]
    if code == b"200":
        for name, value in zip(names_and_values[::2], names_and_values[1::2], strict=True):
            context.set_response_header(place, name, value)
        return body
    # TorchServe turns 413 into 507 here.
    status = 507 if code == b"413" else int(code)
    context.set_response_status(status, idx=place)
    context.set_response_content_type(place, "application/json")
    return {"code": status, "type": "InternalServerException", "message": body.decode(errors="replace")}
