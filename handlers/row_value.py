"""The value of a row for the handlers of images and texts, and the row's fields for error texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchere.handlers.errors import PredictionException
from torchere.handlers.tensors import shown

_MAX_FIELDS_SHOWN = 20
_JSON_AS_FORM = (
    " of a form: JSON that came as application/x-www-form-urlencoded, which is what curl -d says of it; "
    "send it with -H 'Content-Type: application/json'"
)


def value_of(row: Any) -> Any:
    """Return the value under `data`, else `body`; or the row's only value, if it is a tensor, by any name.

    None when the row has none of these. A row that is not a dict, as an envelope may make it, is itself the
    value.
    """
    if not isinstance(row, dict):
        return row
    data = row.get("data")
    if _is_tensor(data) or data:
        return data
    body = row.get("body")
    if body is None and len(row) == 1:
        (sole,) = row.values()
        return sole if _is_tensor(sole) else None
    return body


def fields_of(row: Mapping[str, Any]) -> str:
    """Return the names of a row's fields for an error text, limited in number and length.

    JSON that was sent as a form is parsed as a name up to the first `=`; then the text says how to send JSON.
    """
    names = list(row)[:_MAX_FIELDS_SHOWN]
    found = f"the fields {', '.join(map(shown, names)) or 'none'}"
    return found + _JSON_AS_FORM if names and names[0].lstrip().startswith(("{", "[")) else found


def sole_element(array: Any, what: str) -> bytes:
    """Return the only element of a tensor of BYTES.

    Raises:
        PredictionException: 400, the number of elements is not one; `what` names one in the text: "an image".
    """
    elements: Sequence[Any] = array.ravel().tolist()
    if len(elements) != 1:
        raise PredictionException(
            f"The request has {len(elements)} elements of BYTES, shape {list(array.shape)}; expected one, "
            f"{what}. Send a request for each: the server puts them into one batch",
            400,
        )
    element = elements[0]
    return element if isinstance(element, bytes) else str(element).encode()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")  # the latter is torch's
