"""Inference of the Open Inference Protocol over gRPC: one request, or many on a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from torchere.serving.errors import InvalidRequest, ServingError
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.errors import OPEN_INFERENCE, failure
from torchere.serving.frontend.grpc.open_inference_messages import infer_response, tensor_request
from torchere.serving.frontend.grpc.open_inference_stream import in_order
from torchere.serving.frontend.grpc.open_inference_wire import (
    TensorMessage,
    TensorReply,
    decode_request,
    encode_response,
)
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelStreamInferResponse,
)
from torchere.serving.frontend.grpc.service import Coded, Implementation
from torchere.serving.frontend.open_inference.json_form import BytesAs
from torchere.serving.frontend.open_inference.service import TensorService, framed_parts
from torchere.serving.frontend.open_inference.tensor_answer import TensorAnswer, read_json
from torchere.serving.frontend.priority import HEADER as PRIORITY_HEADER
from torchere.serving.frontend.request_id import new_request_id
from torchere.serving.telemetry.trace_context import trace_headers
from torchere.serving.types import InferResponse, StreamedResponse

FINAL = "triton_final_response"  # parameter of a part of an answer: whether it is the last one
WANTS_FINAL = (
    "triton_enable_empty_final_response"  # of a request: the last part of a streamed answer is empty
)


class TensorCalls:
    """Translates between messages and the tensor service; used on its event loop only.

    Args:
        dataplane: what `tensors` asks.
        tensors: who answers.
        bytes_as: how elements of BYTES go into the JSON of an envelope: TorchServe's service writes base64.
    """

    def __init__(self, dataplane: DataPlane, tensors: TensorService, bytes_as: BytesAs) -> None:
        self._dataplane = dataplane
        self._tensors = tensors
        self._bytes_as: BytesAs = bytes_as

    def methods(self) -> Mapping[str, Implementation]:
        """The methods by the names of the .proto file."""
        return {
            "ModelInfer": Coded(self.infer, decode_request, encode_response),
            "ModelStreamInfer": Coded(self.infer_stream, decode_request),
        }

    async def infer(self, request: TensorMessage, call: Call) -> TensorReply:
        """One request, one answer, in the form of the request: raw bytes or typed fields."""
        message = request.fields
        _check_named(message)
        answer = await self._tensors.answer(
            message.model_name,
            message.model_version or None,
            tensor_request(request),
            request_id=new_request_id(),
            headers=_headers(call),
            deadline_s=call.deadline_s,
            bytes_as=self._bytes_as,
        )
        return infer_response(answer, raw=_is_raw(request))

    async def infer_stream(
        self, requests: AsyncIterator[TensorMessage], call: Call
    ) -> AsyncIterator[ModelStreamInferResponse]:
        """Requests, answered in their order; what goes wrong with one is told in its place."""

        async def told(request: TensorMessage) -> AsyncIterator[ModelStreamInferResponse]:
            message = request.fields
            try:
                async for response in self._parts(request, call):
                    yield ModelStreamInferResponse(infer_response=response)
            except ServingError as error:
                yield ModelStreamInferResponse(
                    error_message=failure(error, OPEN_INFERENCE).message,
                    infer_response=ModelInferResponse(model_name=message.model_name, id=message.id),
                )

        async for response in in_order(requests, told):
            yield response

    async def _parts(self, asked: TensorMessage, call: Call) -> AsyncIterator[ModelInferResponse]:
        message = asked.fields
        _check_named(message)
        request = tensor_request(asked)
        model, version = message.model_name, message.model_version or None
        response = await self._tensors.ask(
            model,
            version,
            request,
            request_id=new_request_id(),
            headers=_headers(call),
            deadline_s=call.deadline_s,
            bytes_as=self._bytes_as,
        )
        is_stream = isinstance(response, StreamedResponse)
        last: TensorAnswer | None = None
        async for last in self._answers(model, version, response):
            part = infer_response(last, raw=_is_raw(asked)).whole()
            part.parameters[FINAL].bool_param = not is_stream
            yield part
        if is_stream and request.parameters.get(WANTS_FINAL) is True:
            yield _empty_end(message, last)

    async def _answers(
        self, model: str, version: str | None, response: InferResponse | StreamedResponse
    ) -> AsyncIterator[TensorAnswer]:
        if isinstance(response, InferResponse) and self._tensors.enveloped(
            self._dataplane.facts(model, version)
        ):
            yield read_json(response)
            return
        async for answer in framed_parts(response):
            yield answer


def _empty_end(message: ModelInferRequest, last: TensorAnswer | None) -> ModelInferResponse:
    response = ModelInferResponse(
        model_name=message.model_name,
        model_version=message.model_version if last is None else last.model_version,
        id=message.id,
    )
    response.parameters[FINAL].bool_param = True
    return response


def _headers(call: Call) -> tuple[tuple[str, str], ...]:
    """What of the metadata counts for each request: its trace, which handlers pass on, and its priority."""
    priority = [(name, str(value)) for name, value in call.metadata if name == PRIORITY_HEADER]
    return (*trace_headers(call.metadata), *priority)


def _check_named(message: ModelInferRequest) -> None:
    if not message.model_name:
        raise InvalidRequest("Parameter model_name is required.")


def _is_raw(request: TensorMessage) -> bool:
    # No inputs at all say nothing about the form; raw is what most clients read.
    return bool(request.raw) or not request.fields.inputs
