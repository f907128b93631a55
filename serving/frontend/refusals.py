"""Refusals of built-in handlers: answers with an error status, whose body is the error. Pure."""

from __future__ import annotations

import msgspec

from torchere.handlers.tensors.codec import NO_JSON
from torchere.serving.errors import HandlerFailed
from torchere.serving.types import InferResponse

FIRST_ERROR_STATUS = 400
MAX_ERROR_BYTES = 65_536  # of a body that is taken for an error


class _Refusal(msgspec.Struct, forbid_unknown_fields=True):
    """An error body in the server's own form, with which built-in handlers refuse one request of a batch."""

    code: int
    type: str
    message: str


_refusals = msgspec.json.Decoder(_Refusal)


def check_refusal(response: InferResponse) -> None:
    """Raise the error in a built-in handler's answer, for callers that use only the body of answers.

    A body in any other form is an answer even with an error status, as in TorchServe.

    Raises:
        HandlerFailed: the response has an error's status, and its body is an error in the server's own form.
    """
    if response.status < FIRST_ERROR_STATUS or len(response.body) > MAX_ERROR_BYTES:
        return
    try:
        found = _refusals.decode(bytes(response.body))  # a worker could change a view of shared memory
    except NO_JSON:
        return
    if found.code == response.status:
        raise HandlerFailed(found.message, found.code)
