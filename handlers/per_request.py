"""Answer an invalid request with 400 on its own, and serve the other requests of its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torchere.handlers.context import Context
from torchere.handlers.errors import PredictionException
from torchere.handlers.tensors_answer import OPEN_INFERENCE

T = TypeVar("T")
_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
_TYPES = {400: "BadRequestException", 413: "RequestEntityTooLargeException"}


def read_each(rows: Sequence[Any], read: Callable[[Any], T]) -> list[T | PredictionException]:
    """Return for each row the result of `read`, or the PredictionException that it raised."""
    results: list[T | PredictionException] = []
    for row in rows:
        try:
            results.append(read(row))
        except PredictionException as err:
            results.append(err)
    return results


def refusal(context: Context, index: int, err: PredictionException) -> dict[str, object]:
    """Set the status of request `index`, and return its answer in the form of the server's own errors."""
    context.set_response_status(err.error_code, idx=index)
    kind = _TYPES.get(err.error_code, "PredictionException")
    return {"code": err.error_code, "type": kind, "message": err.message}


def came_as_tensors(context: Context, index: int) -> bool:
    """Return whether the client uses the Open Inference Protocol, and so expects arrays."""
    return context.get_request_header(index, OPEN_INFERENCE) is not None


def settings_of(config: dict[str, Any], name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the block `handler.<name>` of model-config.yaml, merged over its defaults.

    Raises:
        ValueError: it has a key without a default, or a value of another kind than the default.
    """
    handler = config.get("handler")
    block = (handler.get(name) if isinstance(handler, dict) else None) or {}
    if not isinstance(block, dict):
        raise ValueError(f"handler.{name} in model-config.yaml is {block!r}; expected keys and values")
    for key, value in block.items():
        if key not in defaults:
            known = ", ".join(defaults)
            raise ValueError(f"handler.{name}.{key} in model-config.yaml is unknown; expected one of {known}")
        if not _is_alike(value, defaults[key]):
            kind = _KINDS[type(defaults[key])]
            raise ValueError(f"handler.{name}.{key} in model-config.yaml is {value!r}; expected {kind}")
    return {**defaults, **block}


def _is_alike(value: object, default: object) -> bool:
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)
