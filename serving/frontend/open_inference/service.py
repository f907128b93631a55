"""Tensor inference for REST and gRPC: checks the tensors against the signature, and prepares requests."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

import msgspec

from torchere.archiver.signature import ANY, Signature, TensorSpec
from torchere.handlers.tensors import shown
from torchere.handlers.tensors.enveloped import BytesAs
from torchere.serving.errors import InvalidRequest, NotFound
from torchere.serving.frontend.dataplane import DataPlane, Response
from torchere.serving.frontend.known_heads import Known
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.tensor_request import (
    InputTensor,
    Pairs,
    TensorRequest,
    infer_request,
)
from torchere.serving.frontend.priority import prioritised
from torchere.serving.types import InferRequest, InferResponse, Parameter, StreamedResponse

STREAMS = (
    "The model answers in parts: ask for a stream (over REST with the header Accept: text/event-stream, "
    "over gRPC with ModelStreamInfer)."
)


KNOWN_HEADS = 256
KNOWN_HEAD_BYTES = 2048  # limit on a head whose translation is kept


class Translation(NamedTuple):
    """The translation of a head: a request without its tensors, which have `sizes` bytes."""

    model: str
    version: str | None
    request: InferRequest
    signature: Signature | None  # the signature that the request was checked against
    sizes: list[int]


class TensorService:
    """Prepares requests of the Open Inference Protocol.

    A head is a request without its raw tensors. The requests of a client have few heads, and the translation
    of a head depends on the sizes of the tensors, but not on their bytes. So it serves later requests with
    the same head and sizes, for as long as the version has the same signature. Used on the data plane's event
    loop only.

    Args:
        dataplane: knows the versions.
        envelope: the server's `service_envelope`. With an envelope, handlers get JSON, which it unwraps as in
            TorchServe, instead of tensors; the worker translates the tensors and the answer.
    """

    def __init__(self, dataplane: DataPlane, envelope: str | None) -> None:
        self._dataplane = dataplane
        self._envelope = envelope
        self.known: Known[Hashable, Translation] = Known(KNOWN_HEADS)

    def enveloped(self, facts: ModelFacts) -> bool:
        """Tell whether a version's handler is behind an envelope, so that it gets tensors as JSON."""
        return self._envelope is not None and not facts.reads_tensors

    def prepared(self, facts: ModelFacts, request: TensorRequest, bytes_as: BytesAs = "text") -> InferRequest:
        """Check a request, and translate it for the version that `facts` describe; see `filled`.

        `bytes_as` says how elements of BYTES are written in JSON for a handler behind an envelope.

        Raises:
            ServingError: the request is invalid, or does not fit the version.
        """
        if self.enveloped(facts):
            return infer_request(request, bytes_as)
        if facts.signature is not None:
            check_signature(request, facts.signature)
        return infer_request(request)

    def translated(self, key: Hashable) -> Translation | None:
        """Return the kept translation of a head; None without one, or if its version is not the same."""
        found = self.known.get(key)
        if found is None:
            return None
        try:
            signature = self._dataplane.tensors(found.model, found.version)
        except NotFound:
            return None
        return found if signature is found.signature else None

    def keep(self, key: Hashable, version: str | None, facts: ModelFacts, prepared: InferRequest) -> None:
        """Keep the translation of a head, unless it depends on more than the head and the sizes.

        `key` identifies the head, which has at most `KNOWN_HEAD_BYTES`, the model, and the version as the
        client named it. `prepared` has raw tensors only.
        """
        if self.enveloped(facts):
            return
        sizes = [len(one.value) for one in prepared.parameters]
        emptied = tuple([Parameter(one.name, b"", one.content_type) for one in prepared.parameters])
        bare = msgspec.structs.replace(prepared, parameters=emptied)
        self.known.keep(key, Translation(facts.key.name, version, bare, facts.signature, sizes))


def filled(
    prepared: InferRequest,
    tensors: Sequence[bytes | memoryview],
    request_id: str,
    headers: Pairs,
    deadline_s: float,
) -> InferRequest:
    """Return a prepared request with the tensors, the id, the headers and the deadline of a call.

    `tensors` are raw, input by input; empty: `prepared` has them. `deadline_s` is in monotonic seconds.

    Raises:
        InvalidRequest: the priority among the headers is invalid.
    """
    parameters = prepared.parameters
    if tensors:
        parameters = tuple(
            [
                Parameter(one.name, cast("bytes", raw), one.content_type)
                for one, raw in zip(parameters, tensors, strict=True)
            ]
        )
    request = InferRequest(request_id, parameters, headers + prepared.headers, deadline_s)
    return prioritised(request, headers) if headers else request


def tensors_behind(body: bytes | memoryview, start: int, sizes: Sequence[int]) -> list[bytes | memoryview]:
    """Return slices of a body: the tensors that follow each other from `start`, by their sizes in bytes."""
    tensors = []
    for size in sizes:
        tensors.append(body[start : start + size])
        start += size
    return tensors


def whole(outcome: Response) -> InferResponse:
    """Return `outcome` if it is a single response.

    Raises:
        InvalidRequest: the outcome is a streamed response.
    """
    if isinstance(outcome, StreamedResponse):
        raise InvalidRequest(STREAMS)
    return outcome


def check_signature(request: TensorRequest, signature: Signature) -> None:
    """Refuse a request that does not match the signature, before it takes a place in a batch.

    Raises:
        InvalidRequest: an input is missing, unknown, or of another datatype or shape; or a requested output
            does not exist. The text names the field.
    """
    specs = {spec.name: spec for spec in signature.inputs}
    for index, tensor in enumerate(request.inputs):
        _check_input(f"inputs[{index}]", tensor, specs)
    given = {tensor.name for tensor in request.inputs}
    missing = [name for name in specs if name not in given]
    if missing:
        found = ", ".join(map(shown, sorted(given))) or "none"
        raise InvalidRequest(f"inputs: found {found}, expected {', '.join(map(shown, missing))} too")
    _check_batches(request, signature)
    known = [spec.name for spec in signature.outputs]
    for index, output in enumerate(request.outputs):
        if output.name not in known:
            raise InvalidRequest(
                f"outputs[{index}].name: found {shown(output.name)}, expected {_one_of(known)}"
            )


def _check_input(where: str, tensor: InputTensor, specs: dict[str, TensorSpec]) -> None:
    spec = specs.get(tensor.name)
    if spec is None:
        raise InvalidRequest(f"{where}.name: found {shown(tensor.name)}, expected {_one_of(list(specs))}")
    if tensor.datatype.name != spec.datatype:
        raise InvalidRequest(f"{where}.datatype: found {tensor.datatype.name}, expected {spec.datatype}")
    if len(tensor.shape) != len(spec.shape) or any(
        wanted not in (ANY, size) for size, wanted in zip(tensor.shape, spec.shape, strict=True)
    ):
        raise InvalidRequest(
            f"{where}.shape: found {shown(tensor.shape)}, expected {shown(spec.shape)} (-1 is any size)"
        )
    if spec.limits and (limit := spec.exceeded(tensor.shape)) is not None:
        raise InvalidRequest(f"{where}.shape: found {shown(tensor.shape)}, expected {limit}")


def _check_batches(request: TensorRequest, signature: Signature) -> None:
    """Check that all inputs have the same number of rows, if the model has a batch dimension."""
    if not signature.batched:
        return
    rows = [tensor.shape[0] for tensor in request.inputs]
    for index, count in enumerate(rows):
        if count != rows[0]:
            raise InvalidRequest(
                f"inputs[{index}].shape[0]: found {count}, expected {rows[0]} rows as inputs[0] has"
            )


def _one_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(map(shown, names[:20]))}"
