"""Send an answer in parts, while the handler still works on the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torchere.handlers.context import Context


def send_intermediate_predict_response(
    ret: Sequence[Any] | Mapping[int, Any],
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Context,
) -> None:
    """Send the next part of answers of the batch; the handler's return value is the last part.

    In a group of ranks only the one with `LOCAL_RANK` 0 sends; the others return at once.

    Args:
        ret: the parts by the indices of `req_id_map`, encoded like a final answer; others are left out.
        req_id_map: the request of each part: usually `context.request_ids`, or some of these under other
            indices, as for a part of a batch.
        message: kept for TorchServe's signature; no client sees it.
        code: status of the answer; only that of the first part reaches the client.
        context: the context of the current batch.

    Raises:
        ValueError: a part is missing, or a request is not in this batch; then nothing is sent.
        UnsupportedOutput: an element can't be encoded.
        RuntimeError: the client's API can't take an answer in parts.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    places = {request_id: place for place, request_id in (context.request_ids or {}).items()}
    try:
        parts = [(places[request_id], ret[index]) for index, request_id in req_id_map.items()]
    except LookupError as err:
        raise ValueError(
            f"{len(ret)} partial answers for a batch of {len(req_id_map)}: send one for each request of "
            f"req_id_map, under its index ({type(err).__name__}: {err})"
        ) from err
    if code != 200:
        context.set_all_response_status(code, message)
    for place, chunk in [(place, context.encode_part(place, part)) for place, part in parts]:
        context.send_partial(place, chunk)
