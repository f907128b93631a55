"""Sending an answer in parts, while the handler still works on the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torchere.handlers.context import Context


def send_intermediate_predict_response(
    ret: Sequence[object], req_id_map: Mapping[int, str], message: str, code: int, context: Context
) -> None:
    """Send the next part of every answer of the batch; what the handler returns in the end is the last part.

    In a group of ranks only the one with `LOCAL_RANK` 0 sends; the others return at once.

    Args:
        ret: one element per request, encoded like a final answer.
        req_id_map: usually `context.request_ids`.
        message: kept for TorchServe's signature; no client sees it.
        code: status of the answer; only that of the first part reaches the client.
        context: the context of the current batch.

    Raises:
        ValueError: the number of parts differs from the number of requests.
        UnsupportedOutput: an element can't be encoded.
        RuntimeError: the client's API can't take an answer in parts.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if len(ret) != len(req_id_map):
        raise ValueError(
            f"{len(ret)} partial answers for a batch of {len(req_id_map)}: send one per request, in order"
        )
    if code != 200:
        context.set_all_response_status(code, message)
    for index, chunk in enumerate([context.encode_part(index, element) for index, element in enumerate(ret)]):
        context.send_partial(index, chunk)
