"""Converts the values that a handler sets or raises to plain texts and numbers.

A handler may set anything: an exception as the reason phrase, a NumPy integer as the status, a message with
half of a surrogate pair from a client's JSON. A value that can't be encoded in a frame would crash the worker
that has to send it, and fail its requests.
"""

from __future__ import annotations

import functools
import logging
import operator
import traceback
from typing import Any

import torch

from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.errors import PredictionException
from torchere.serving.errors import HandlerFailed
from torchere.serving.types import MAX_RESPONSE_HEADER_BYTES, MAX_RESPONSE_HEADERS, InferResponse

logger = logging.getLogger(__name__)


def plain_text(value: object) -> str:
    """Return any value as text, with characters that UTF-8 can't encode replaced."""
    if type(value) is str and value.isascii():
        return value
    try:
        return str(value).encode(errors="replace").decode()
    except BaseException:  # an exception of user code whose __str__ raises, or exits
        return f"<{type(value).__name__}: it cannot be printed>"


def response_of(body: bytes, processor: RequestProcessor) -> InferResponse:
    """Return an answer with the status, reason and headers that the handler has set.

    Raises:
        TypeError, ValueError: the status is not an integer from 0 to 999, a header is not text, or the
            headers are too many or too long.
    """
    status, reason, headers = processor.status_code, processor.reason_phrase, processor.response_headers
    pairs = []
    for name, value in headers.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"the handler set the response header {name!r} to {value!r}; expected texts")
        pairs.append((plain_text(name), plain_text(value)))
    if pairs:
        length = sum(len(name) + len(value) for name, value in pairs)
        if len(pairs) > MAX_RESPONSE_HEADERS or length > MAX_RESPONSE_HEADER_BYTES:
            raise ValueError(
                f"the handler set {len(pairs)} response headers of {length} characters, expected at most "
                f"{MAX_RESPONSE_HEADERS} of {MAX_RESPONSE_HEADER_BYTES}"
            )
    if not 0 <= (number := int(operator.index(status))) <= 999:
        raise ValueError(f"the handler set the status {status}; a final HTTP status is from 200 to 599")
    return InferResponse(body, tuple(pairs), number, plain_text(reason) if reason else "")


def refusal_of(err: PredictionException) -> HandlerFailed:
    """Return the error of a `PredictionException`; its status is 500 if not an integer from 0 to 999."""
    status: Any = err.error_code
    try:
        status = int(status)
    except (TypeError, ValueError, OverflowError):
        status = 500
    return HandlerFailed(plain_text(err.message), status if 0 <= status <= 999 else 500)


def stages_of(context: Context) -> tuple[float, float, float]:
    """Return the seconds of the stages that the handler has set; zeros if they are not three numbers."""
    try:
        preprocess_s, inference_s, postprocess_s = map(float, context.stages_s)
    except Exception:  # the handler's values may raise any exception
        return 0.0, 0.0, 0.0
    return preprocess_s, inference_s, postprocess_s


def goes_on(context: Context, place: int, answer: object) -> bool:
    """Return whether the stopping criterion at this index gives the answer a false value other than None.

    An answer without a criterion is finished. In TorchServe it ends the worker, so the whole batch fails.
    """
    assert context.stopping_criteria is not None
    try:
        criterion = context.stopping_criteria[place]
    except LookupError:
        _warn_of_missing_criteria(context.model_name)
        return False
    is_over = criterion(answer)
    return is_over is not None and not is_over


@functools.cache  # once for each model, not with each batch
def _warn_of_missing_criteria(model_name: str) -> None:
    logger.warning(
        "model %s: context.stopping_criteria has fewer criteria than its batch has requests; the answers "
        "without one are taken as finished",
        model_name,
    )


def line_of(err: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(err).__name__}: {plain_text(err)}".splitlines()[0]


def trace_of(err: BaseException) -> str:
    """Return an exception with its traceback."""
    try:
        return plain_text("".join(traceback.format_exception(err)))
    except BaseException:  # as in `plain_text`
        return line_of(err)


# Detection of errors for lack of memory: by the exception's type, or by its text.
#
# torch has a type for it only where its GPU allocator ran out, and TorchScript turns every error into a
# text. Other errors of a GPU, such as an invalid kernel launch, do not mention memory.

_WORDS = (
    "out of memory",  # "CUDA out of memory", "CUDA error: out of memory", and of other vendors
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN and similar libraries, for their workspace
    "_ALLOCATION_FAILED",  # cuDNN from 9 on
    "RESOURCE_EXHAUSTED",  # XLA
    "PT_DEVMEM Allocation failed",  # Gaudi
    "DefaultCPUAllocator: ",  # its only error, in two wordings
    "Failed to allocate memory for requested buffer",  # onnxruntime, on any device
    " is smaller than requested bytes of ",  # onnxruntime, with a limit on its GPU memory
)


# Errors of Python's own functions, whose texts quote the client's input; torch and others raise RuntimeError.
_QUOTING = (ValueError, LookupError, TypeError, ArithmeticError, AssertionError)


def lacks_memory(err: BaseException) -> bool:
    """Whether an error is due to a lack of memory, so that more memory or less input may avoid it."""
    if isinstance(err, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(err, _QUOTING):
        return False
    text = plain_text(err)
    return any(words in text for words in _WORDS)
