"""What a handler set or raised, as plain texts and numbers.

Anything may stand there: an exception where a reason belongs, NumPy's integer for a status, half of a
surrogate pair from a client's JSON in a message. What can't be put into a frame would end the worker that
has to send it, and its requests with it.
"""

from __future__ import annotations

import operator
import traceback
from typing import Any

import torch

from torchere.handlers.context import RequestProcessor
from torchere.handlers.errors import PredictionException
from torchere.serving.errors import HandlerFailed
from torchere.serving.types import InferResponse


def plain_text(value: object) -> str:
    """The text of anything, without what UTF-8 has no bytes for."""
    if type(value) is str and value.isascii():
        return value
    try:
        return str(value).encode(errors="replace").decode()
    except BaseException:  # an exception of user code whose __str__ raises, or exits
        return f"<{type(value).__name__}: it cannot be printed>"


def response_of(body: bytes, processor: RequestProcessor) -> InferResponse:
    """An answer with what the handler has set for it.

    Raises:
        TypeError, ValueError: its status is no number of three digits, or a header is no text.
    """
    status, reason, headers = processor.status_code, processor.reason_phrase, processor.response_headers
    pairs = []
    for name, value in headers.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(f"the handler set the response header {name!r} to {value!r}; expected texts")
        pairs.append((plain_text(name), plain_text(value)))
    if not 0 <= (number := int(operator.index(status))) <= 999:
        raise ValueError(f"the handler set the status {status}; a final HTTP status is from 200 to 599")
    return InferResponse(body, tuple(pairs), number, plain_text(reason) if reason else "")


def refusal_of(err: PredictionException) -> HandlerFailed:
    """What a handler answers its batch with; the status is 500 where it is no number of three digits."""
    status: Any = err.error_code
    try:
        status = int(status)
    except (TypeError, ValueError, OverflowError):
        status = 500
    return HandlerFailed(plain_text(err.message), status if 0 <= status <= 999 else 500)


def line_of(err: BaseException) -> str:
    """An exception in one line."""
    return f"{type(err).__name__}: {plain_text(err)}".splitlines()[0]


def trace_of(err: BaseException) -> str:
    """An exception with its traceback."""
    try:
        return plain_text("".join(traceback.format_exception(err)))
    except BaseException:  # as in `plain_text`
        return line_of(err)


_WORDS = (
    "out of memory",  # "CUDA out of memory", "CUDA error: out of memory", and so of other makers
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN and their like, for the memory they work in
    "_ALLOCATION_FAILED",  # cuDNN from 9 on
    "DefaultCPUAllocator: ",  # it has nothing else to say, in two spellings
    "Failed to allocate memory for requested buffer",  # onnxruntime, on whatever device
    " is smaller than requested bytes of ",  # onnxruntime, where it may take so much of a GPU only
)


def lacks_memory(err: BaseException) -> bool:
    """Whether what was to be done may work where there is more memory, or less is asked for."""
    if isinstance(err, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = plain_text(err)
    return any(words in text for words in _WORDS)
