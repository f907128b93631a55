"""Refusals of built-in handlers: an answer with an error's status, and the error as its body. Pure."""

from __future__ import annotations

import msgspec

from torchere.handlers.tensors.codec import NO_JSON
from torchere.serving.errors import HandlerFailed
from torchere.serving.types import InferResponse

FIRST_ERROR_STATUS = 400
MAX_ERROR_BYTES = 65_536  # of a body that is taken for an error


class _Refusal(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an error in the server's own form, as built-in handlers answer one request of a batch."""

    code: int
    type: str
    message: str


_refusals = msgspec.json.Decoder(_Refusal)


def check_refusal(response: InferResponse) -> None:
    """Raise the error that a built-in handler answered, where its body alone would be a success.

    Other bodies with a status of the handler's own are answers, as with TorchServe.

    Raises:
        HandlerFailed: the response has an error's status, and its body is an error in the server's own form.
    """
    if response.status < FIRST_ERROR_STATUS or len(response.body) > MAX_ERROR_BYTES:
        return
    try:
        found = _refusals.decode(response.body)
    except NO_JSON:
        return
    if found.code == response.status:
        raise HandlerFailed(found.message, found.code)
