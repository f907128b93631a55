"""Tensor inference for REST and gRPC: checks the tensors against the signature, and predicts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from torchere.archiver.signature import ANY, Signature, TensorSpec
from torchere.handlers.tensors import BYTES, TensorError, shown
from torchere.handlers.tensors.codec import array_from_bytes, json_from_tensor, split_elements
from torchere.serving.errors import InvalidRequest, ServingError
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.tensor_answer import as_client_knows, in_plain_words
from torchere.serving.frontend.open_inference.tensor_request import (
    InputTensor,
    Pairs,
    TensorRequest,
    infer_request,
    sequence_headers,
)
from torchere.serving.frontend.priority import prioritised
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse, Parameter, StreamedResponse

Outcome: TypeAlias = InferResponse | StreamedResponse
STREAMS = (
    "The model answers in parts: ask for a stream (over REST with the header Accept: text/event-stream, "
    "over gRPC with ModelStreamInfer)."
)


class TensorService:
    """Prepares and submits requests of the Open Inference Protocol.

    Used on the data plane's event loop only.

    Args:
        dataplane: answers the requests.
        envelope: the server's `service_envelope`. With an envelope, handlers get JSON for it to unwrap, as in
            TorchServe, instead of tensors.
    """

    def __init__(self, dataplane: DataPlane, envelope: str | None) -> None:
        self._dataplane = dataplane
        self._envelope = envelope

    def enveloped(self, facts: ModelFacts) -> bool:
        """Tell whether a version's handler is behind an envelope, so that requests are sent to it as JSON."""
        return self._envelope is not None and not facts.reads_tensors

    def prepared(
        self,
        facts: ModelFacts,
        request: TensorRequest,
        *,
        request_id: str,
        headers: Pairs = (),
        deadline_s: float = NO_DEADLINE,
        bytes_as: BytesAs = "text",
    ) -> InferRequest:
        """Check a request, and translate it to an `InferRequest` for the version that `facts` describe.

        Raises:
            ServingError: the request is invalid, or does not fit the version.
        """
        request.check()
        if self.enveloped(facts):
            body = Parameter("body", request_json(facts.key.name, request, bytes_as), "application/json")
            with_sequence = (*headers, *sequence_headers(request.parameters))
            return prioritised(InferRequest(request_id, (body,), with_sequence, deadline_s))
        if facts.signature is not None:
            check_signature(request, facts.signature)
        return prioritised(infer_request(request, request_id, headers, deadline_s))

    async def ask(self, model: str, version: str | None, asked: InferRequest) -> Outcome:
        """Submit a request made by `prepared`, and return its outcome.

        The executor encodes the response, or, behind an envelope, the handler does.

        Raises:
            ServingError: the prediction failed; with the status that clients of this protocol expect.
        """
        try:
            return await self._dataplane.infer(model, version, asked)
        except ServingError as error:
            raise in_plain_words(as_client_knows(error)) from error


def whole(outcome: Outcome) -> InferResponse:
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


BytesAs = Literal["text", "base64"]


def request_json(model: str, request: TensorRequest, bytes_as: BytesAs) -> bytes:
    """Return the body `{"id", "model_name", "inputs": [{"name", "shape", "datatype", "data"}]}`.

    Raises:
        InvalidRequest: BYTES are not valid text, with `bytes_as="text"`, or have an invalid layout.
    """
    inputs = [_input(tensor, index, bytes_as) for index, tensor in enumerate(request.inputs)]
    return msgspec.json.encode({"id": request.id, "model_name": model, "inputs": inputs})


def _input(tensor: InputTensor, index: int, bytes_as: BytesAs) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "datatype": tensor.datatype.name,
        "data": _data(tensor, f"inputs[{index}]", bytes_as),
    }


def _data(tensor: InputTensor, where: str, bytes_as: BytesAs) -> Any:
    try:
        if tensor.datatype is BYTES and bytes_as == "base64":
            return [base64.b64encode(element).decode() for element in split_elements(tensor.raw, where)]
        array = array_from_bytes(tensor.raw, tensor.datatype, tensor.shape, where)
        return json_from_tensor(array, tensor.datatype, where)
    except TensorError as err:
        raise InvalidRequest(str(err)) from err
