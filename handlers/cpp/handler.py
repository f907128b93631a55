"""Runs a C++ handler class from a shared library: the Python side of the handler, and its ctypes binding.

The counterpart of `Library` is `include/torchere/interface.hh`. ctypes releases the GIL around each call.
Values cross the interface as pieces: byte strings in an order that both sides know. The worker passes its
pieces concatenated, with a list of their sizes.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchere.handlers.context import Context
from torchere.handlers.cpp import AGAIN, CppHandlerName, problem_of
from torchere.handlers.encode import encode_answer
from torchere.handlers.errors import HandlerLoadError, MetricsCacheKeyError
from torchere.handlers.metrics import MetricsCache, MetricTypes, add_handler_time
from torchere.handlers.rows import sole_element

MAX_BATCH_SIZE = 256  # handlers in C++ number the requests of a batch with one byte
_PAYLOADS = {"data": "data_dtype", "body": "body_dtype"}  # the headers that say how a payload is encoded

# A name outside "torchere": the server drops repeated warnings of loggers below that name.
logger = logging.getLogger("cpp_handler")

_LEVELS = (*(logging.DEBUG,) * 2, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
_TYPES = (MetricTypes.COUNTER, MetricTypes.GAUGE, MetricTypes.HISTOGRAM)  # in the order of `MetricType`

_TEXT = ctypes.c_char_p
_LogFunction = ctypes.CFUNCTYPE(None, ctypes.c_int, _TEXT, ctypes.c_uint, _TEXT, _TEXT)
_KnowsFunction = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int, _TEXT)
_ReportFunction = ctypes.CFUNCTYPE(
    None, ctypes.c_int, _TEXT, ctypes.POINTER(_TEXT), ctypes.c_size_t, _TEXT, ctypes.c_double
)


class CppHandler:
    """Passes the requests of a batch to a C++ handler, and returns its responses. Not thread-safe.

    A response whose code is not 200 fails its request; in TorchServe it fails the batch. An exception fails
    the batch; but if a batch has one request and the handler has set an error response, this is sent.
    """

    takes_bytes = True  # the values of requests are not decoded
    reads_envelopes = True  # TorchServe's C++ backend has no envelopes

    def __init__(self, name: CppHandlerName) -> None:
        self._name = name
        self._library: Any = None
        self._session: int | None = None  # address of the library's handler, which holds the model

    def initialize(self, context: Context) -> None:
        """Open the library, create the handler and load its model.

        The handler is closed when this object is garbage-collected, and left open when the process ends.

        Raises:
            HandlerLoadError: a step failed, or `batchSize` is above 256; the text names the remedy.
        """
        system = context.system_properties
        batch_size = int(system.get("batch_size") or 1)
        if batch_size > MAX_BATCH_SIZE:
            raise HandlerLoadError(
                f"batchSize is {batch_size}; handlers in C++ take {MAX_BATCH_SIZE} requests at most: lower it"
            )
        library = self._library = library_of(system["model_dir"], self._name)
        library.metrics = context.metrics
        gpu = system.get("gpu_id")
        facts = (  # in the order that `interface.hh` reads
            system["model_dir"],
            context.model_name,
            "-1" if gpu is None else str(gpu),
            f"{self._name.file}:{self._name.class_name}",
            str(batch_size),
            "1" if system.get("limit_max_image_pixels") else "0",
            json.dumps(_texts_of(context.manifest or {})),
        )
        pieces = [fact.encode() for fact in facts]
        sizes = _sizes(pieces)
        functions = [library.function(f"{kind}{self._name.class_name}") for kind in ("allocator", "deleter")]
        self._session = library.open_handler(*functions, b"".join(pieces), sizes.buffer_info()[0])
        end = weakref.finalize(self, library.close_handler, self._session)
        end.atexit = False  # threads may still run the library when the process exits
        if error := _text(next(self._result())):
            in_one_line = " ".join(error.split())
            raise HandlerLoadError(
                f"{self._name.class_name} in {self._name.file} can't load its model: {in_one_line}"
            )

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer one batch.

        Raises:
            RuntimeError: the handler raised an exception, or gave no response to a request.
        """
        started_s = time.perf_counter()
        pieces: list[bytes | bytearray] = [str(len(data)).encode()]
        for place, row in enumerate(data):
            pieces += _request_pieces(context, place, row)
        sizes = _sizes(pieces)
        self._library.run(self._session, b"".join(pieces), sizes.buffer_info()[0])
        result = self._result()
        error = next(result).decode(errors="replace")
        preprocess_s, inference_s, postprocess_s = (float(next(result)) for _ in range(3))
        context.stages_s = (preprocess_s, inference_s, postprocess_s)
        answers = [_answer(context, place, result) for place in range(len(data))]
        if error and (len(data) > 1 or context.get_response_status(0)[0] == 200):
            raise RuntimeError(f"{self._name.class_name}: {error}")
        add_handler_time(context, started_s)
        if None in answers:
            request_id = context.get_request_id(answers.index(None))
            raise RuntimeError(f"{self._name.class_name} gave no response to request {request_id}")
        return answers

    def _result(self) -> Iterator[bytes]:
        """Return the pieces of the result of the last call, each copied when it is read."""
        count = ctypes.c_size_t()
        pieces = self._library.result(self._session, ctypes.byref(count))
        return (
            ctypes.string_at(each.data, each.size) if each.size else b"" for each in pieces[: count.value]
        )


def _texts_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest's values as strings, which is how handlers in C++ read them."""
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
    """Return a tensor of the Open Inference Protocol as a file of torch.save, a BYTES element unchanged."""
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


class _Piece(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Library:
    """A library in this process, which is never closed: its code may have started threads.

    Args:
        folder: the unpacked archive.
        name: the file of the library in `folder`, and the handler's class.

    Raises:
        HandlerLoadError: the file is missing, was compiled for something else, or can't be opened.
    """

    def __init__(self, folder: str, name: CppHandlerName) -> None:
        self.metrics: MetricsCache | None = None  # metrics of the handler that was opened last
        path = Path(folder, name.file)
        try:
            problem = problem_of(path.read_bytes(), name, torch.__version__)
        except OSError as err:
            problem = (
                f"the archive's library {name.file} can't be read ({err.strerror}); add it with --handler "
                "and make the archive again"
            )
        if problem:
            raise HandlerLoadError(problem)
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as err:
            raise HandlerLoadError(
                f"{name.file} can't be opened: {err}; install or pack the library that is missing, or "
                f"{AGAIN.format(name.file)}"
            ) from err
        self._callbacks = (_LogFunction(_log), _KnowsFunction(self._knows), _ReportFunction(self._report))
        self._library.torchere_handler_connect(*self._callbacks)
        self.open_handler = self._library.torchere_handler_open
        self.open_handler.restype = ctypes.c_void_p
        self.open_handler.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.run = self._library.torchere_handler_run
        self.run.restype = None
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.result = self._library.torchere_handler_result
        self.result.restype = ctypes.POINTER(_Piece)
        self.result.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
        self.close_handler = self._library.torchere_handler_close
        self.close_handler.restype = None
        self.close_handler.argtypes = [ctypes.c_void_p]

    def function(self, name: str) -> ctypes.c_void_p:
        """Return the address of an exported function."""
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p)

    def _knows(self, kind: int, name: bytes) -> bool:
        try:
            return self.metrics is not None and bool(self.metrics.get_metric(_text(name), _TYPES[kind]))
        except MetricsCacheKeyError:
            return False

    def _report(  # noqa: PLR0917  # the order of `MetricSink::Report`
        self, kind: int, name: bytes, values: Sequence[bytes], count: int, request_ids: bytes, value: float
    ) -> None:
        if self.metrics is not None:
            metric = self.metrics.get_metric(_text(name), _TYPES[kind])
            metric.add_or_update(value, list(map(_text, values[:count])), _text(request_ids).split(","))


_libraries: dict[tuple[str, CppHandlerName], Library] = {}
_lock = threading.Lock()  # guards _libraries


def library_of(folder: str, name: CppHandlerName) -> Library:
    """Return the library, which is opened once for each process. Thread-safe.

    Raises:
        HandlerLoadError: as `Library`.
    """
    with _lock:
        key = (folder, name)
        if key not in _libraries:
            _libraries[key] = Library(folder, name)
        return _libraries[key]


def _sizes(pieces: Sequence[bytes | bytearray]) -> array[int]:
    return array("Q", map(len, pieces))


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _log(level: int, file: bytes, line: int, function: bytes, text: bytes) -> None:
    number = _LEVELS[level]
    if logger.isEnabledFor(number):
        place = f"{os.path.basename(_text(file))}:{line}] {_text(function)}"  # as TorchServe's C++ backend
        logger.log(number, "%s %s", place, _text(text))
