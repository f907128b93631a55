"""Opens the shared libraries of handlers in C++; its counterpart is `include/torchere/interface.hh`.

ctypes releases the GIL around each call. Values cross as pieces: byte strings in an order that both sides
know; those of the worker lie one behind the other, with their sizes in a list.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from torchere.handlers.cpp import AGAIN, CppHandlerName, problem_of
from torchere.handlers.errors import HandlerLoadError, MetricsCacheKeyError
from torchere.handlers.metric_types import MetricTypes
from torchere.handlers.metrics import MetricsCache

# Not below "torchere": repeated warnings of handlers are logged each time.
logger = logging.getLogger("cpp_handler")

_LEVELS = (*(logging.DEBUG,) * 2, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
_TYPES = (MetricTypes.COUNTER, MetricTypes.GAUGE, MetricTypes.HISTOGRAM)  # in the order of `MetricType`

_TEXT = ctypes.c_char_p
_LogFunction = ctypes.CFUNCTYPE(None, ctypes.c_int, _TEXT, ctypes.c_uint, _TEXT, _TEXT)
_KnowsFunction = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int, _TEXT)
_ReportFunction = ctypes.CFUNCTYPE(
    None, ctypes.c_int, _TEXT, ctypes.POINTER(_TEXT), ctypes.c_size_t, _TEXT, ctypes.c_double
)


class _Piece(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Library:
    """A library in this process, which is never closed: its code may have started threads.

    Args:
        folder: the unpacked archive.
        name: the library's file in it, and its class.

    Raises:
        HandlerLoadError: the file is missing, was compiled for something else, or can't be opened.
    """

    def __init__(self, folder: str, name: CppHandlerName) -> None:
        self.name = name
        self.metrics: MetricsCache | None = None  # those of the handler that was opened last
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


class Session:
    """A handler of a library, with its model. One thread at a time.

    It is closed when it is garbage-collected, and left open when the process ends.

    Args:
        library: the library.
        facts: folder, model, GPU, handler, batch size, whether large pictures are refused, and the manifest.

    Raises:
        HandlerLoadError: the handler, or its `LoadModel`, raised an exception.
    """

    def __init__(self, library: Library, facts: Sequence[bytes]) -> None:
        name = library.name.class_name
        functions = library.function(f"allocator{name}"), library.function(f"deleter{name}")
        self._library = library
        sizes = _sizes(facts)
        self._session = library.open_handler(*functions, b"".join(facts), sizes.buffer_info()[0])
        end = weakref.finalize(self, library.close_handler, self._session)
        end.atexit = False  # threads may still run the library when the process exits
        if error := _text(next(self._result())):
            in_one_line = " ".join(error.split())
            raise HandlerLoadError(f"{name} in {library.name.file} can't load its model: {in_one_line}")

    def run(self, batch: Sequence[bytes | bytearray]) -> Iterator[bytes]:
        """Run one batch; return the pieces of the result, which are copied as they are taken."""
        sizes = _sizes(batch)
        self._library.run(self._session, b"".join(batch), sizes.buffer_info()[0])
        return self._result()

    def _result(self) -> Iterator[bytes]:
        count = ctypes.c_size_t()
        pieces = self._library.result(self._session, ctypes.byref(count))
        return (
            ctypes.string_at(each.data, each.size) if each.size else b"" for each in pieces[: count.value]
        )


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
