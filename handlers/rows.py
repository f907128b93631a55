"""Rows of a batch: their values, names for error texts, refusals; and settings under `handler.<name>`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from torchere.handlers.context import Context
from torchere.handlers.errors import PredictionException, bad_request
from torchere.handlers.tensors import shown
from torchere.handlers.tensors.answer import OPEN_INFERENCE

first_row: ContextVar[int] = ContextVar("first_row", default=0)
"""Index in the batch of the first row of the calling stage; above 0 in the later parts of a batch."""
_MAX_FIELDS_SHOWN = 20
_AS_FORM = (
    "{} of a form: {} that came as application/x-www-form-urlencoded, which is what curl -d says of it; "
    "send it with -H 'Content-Type: {}'"
)
_FILE_AS_FORM = (
    "a file that came as application/x-www-form-urlencoded, which is what curl --data-binary says of it "
    "(send it with curl -T FILE)"
)


def value_of(row: Any) -> Any:
    """Return the value under `data`, else `body`; or, under any name, the only value if it is a tensor.

    An empty `data` is returned only if there is no `body`; None if the row has none of these. A row without
    `get`, such as an envelope makes, is itself the value; users' tests pass a Mock that has only `get`.
    """
    if not hasattr(row, "get"):
        return row
    data = row.get("data")
    if _is_tensor(data) or data:
        return data
    body = row.get("body")
    if body is None and isinstance(row, dict) and len(row) == 1:
        (sole,) = row.values()
        return sole if _is_tensor(sole) else data
    return data if body is None else body


def fields_of(row: Mapping[str, Any], *, takes_text: bool = False) -> str:
    """Return the names of a row's fields for an error text, limited in number and length.

    If a body was sent as a form by mistake, the text says how to send it instead. JSON then looks like a name
    that begins with `{` or `[`; a text, for a handler that `takes_text`, like a name without a value; a file
    like names with NUL bytes, which are not shown.
    """
    if any("\0" in name for name in row):
        return _FILE_AS_FORM
    names = list(row)[:_MAX_FIELDS_SHOWN]
    found = f"the fields {', '.join(map(shown, names)) or 'none'}"
    if names and names[0].lstrip().startswith(("{", "[")):
        return _AS_FORM.format(found, "JSON", "application/json")
    # Values of a JSON body are not bytes; those of a form are.
    if takes_text and names and isinstance(row[names[0]], (bytes, bytearray)) and not row[names[0]]:
        return _AS_FORM.format(found, "a text", "text/plain")
    return found


def sole_element(array: Any, what: str) -> bytes:
    """Return the only element of a tensor of BYTES.

    Raises:
        PredictionException: 400, the number of elements is not one; `what` names one in the text: "an image".
    """
    elements: Sequence[Any] = array.ravel().tolist()
    if len(elements) != 1:
        raise bad_request(
            f"The request has {len(elements)} elements of BYTES, shape {list(array.shape)}; expected one, "
            f"{what}. Send a request for each: the server puts them into one batch"
        )
    element = elements[0]
    return element if isinstance(element, bytes) else str(element).encode()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")  # the latter is torch's


T = TypeVar("T")
_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
_TYPES = {400: "BadRequestException", 413: "RequestEntityTooLargeException"}


def rows_of(data: Any) -> Any:
    """Return the rows of a batch: `data`, for handlers that read it row by row.

    Raises:
        PredictionException: 400, the `kserve` envelope handed on a value that is no list, as a text, whose
            letters would be the rows.
    """
    if isinstance(data, (str, int, float, dict)):
        raise bad_request(f"The request has the instances {shown(data)}; expected a list")
    return data


def read_each(rows: Sequence[Any], read: Callable[[Any], T]) -> list[T | PredictionException]:
    """Return for each row the result of `read`, or the PredictionException that it raised.

    Raises:
        PredictionException: there are no rows; see `rows_of`.
    """
    results: list[T | PredictionException] = []
    for row in rows_of(rows):
        try:
            results.append(read(row))
        except PredictionException as err:
            results.append(err)
    return results


def request_of(context: Context, row: int) -> int | None:
    """Return the index of the request that a row of the calling stage belongs to.

    None if an envelope made the rows: there may be several for one request.
    """
    return first_row.get() + row if getattr(context, "rows_are_requests", True) else None


def refusal(context: Context, row: int, err: PredictionException) -> dict[str, object]:
    """Set the status of a row's request, and return its answer in the form of the server's own errors.

    Raises:
        PredictionException: `err`, if an envelope made the rows: one row is not the whole request.
    """
    index = request_of(context, row)
    if index is None:
        raise err
    context.set_response_status(err.error_code, idx=index)
    context.set_response_content_type(index, "application/json")  # tells clients how to parse the error
    kind = _TYPES.get(err.error_code, "PredictionException")
    return {"code": err.error_code, "type": kind, "message": err.message}


def came_as_tensors(context: Context, row: int) -> bool:
    """Return whether the client uses the Open Inference Protocol, and so expects arrays."""
    index = request_of(context, row)
    return index is not None and context.get_request_header(index, OPEN_INFERENCE) is not None


def config_of(context: Context) -> Mapping[str, Any]:
    """Return model-config.yaml of a context; empty for one of a user's test, which has none, or a Mock."""
    config = getattr(context, "model_yaml_config", None)
    return config if isinstance(config, Mapping) else {}


def block_of(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of `handler.<name>` in model-config.yaml; None if it has no such block."""
    handler = config.get("handler")
    return handler.get(name) if isinstance(handler, Mapping) else None


def wrong_setting(name: str, value: object, expected: str) -> ValueError:
    """Return the error for a wrong value of `handler.<name>` in model-config.yaml."""
    return ValueError(f"handler.{name} in model-config.yaml is {value!r}; expected {expected}")


def known_block_of(config: Mapping[str, Any], name: str, known: Collection[str]) -> dict[str, Any]:
    """Return the block `handler.<name>` of model-config.yaml, or an empty dict.

    Raises:
        ValueError: it is no mapping, or has a key that is not one of `known`.
    """
    block = block_of(config, name) or {}
    if not isinstance(block, dict):
        raise wrong_setting(name, block, "keys and values")
    for key in block:
        if key not in known:
            expected = ", ".join(known)
            raise ValueError(
                f"handler.{name}.{key} in model-config.yaml is unknown; expected one of {expected}"
            )
    return block


def settings_of(config: Mapping[str, Any], name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the block `handler.<name>` of model-config.yaml, merged over its defaults.

    Raises:
        ValueError: it has a key without a default, or a value of another kind than the default.
    """
    block = known_block_of(config, name, defaults)
    for key, value in block.items():
        if not _is_alike(value, defaults[key]):
            raise wrong_setting(f"{name}.{key}", value, _KINDS[type(defaults[key])])
    return {**defaults, **block}


def _is_alike(value: object, default: object) -> bool:
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)
