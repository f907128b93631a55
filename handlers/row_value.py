"""The one value of a request that the handlers of pictures and of texts read, however it came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchere.handlers.errors import PredictionException


def value_of(row: Any) -> Any:
    """What a row holds under `data` or else `body`; or its tensor, when that is all there is, by any name.

    None when it holds none of these. A row that is no dict, as an envelope may make it, is the value itself.
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


def sole_element(array: Any, what: str) -> bytes:
    """The element of a tensor of BYTES.

    Raises:
        PredictionException: 400, it has another number of them; `what` is what one stands for: "an image".
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
