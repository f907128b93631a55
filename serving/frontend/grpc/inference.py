"""The gRPC inference service of TorchServe."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial

from google.protobuf import any_pb2, empty_pb2
from google.rpc import error_details_pb2, status_pb2

from torchere.serving.batching.stateful import SEQUENCE_ID
from torchere.serving.errors import InvalidRequest, ServingError
from torchere.serving.frontend import wording
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.call import Asked, Call, GrpcPrediction
from torchere.serving.frontend.grpc.errors import INFERENCE, failure
from torchere.serving.frontend.grpc.protos.inference_pb2 import (
    PredictionResponse,
    PredictionsRequest,
    TorchServeHealthResponse,
)
from torchere.serving.frontend.grpc.service import Callback, Implementation
from torchere.serving.frontend.http2.messages import MessageFailed
from torchere.serving.frontend.open_inference.tensor_request import MAX_NAME_LENGTH, check_length
from torchere.serving.frontend.priority import prioritised
from torchere.serving.frontend.refusals import check_refusal
from torchere.serving.frontend.request_id import new_request_id
from torchere.serving.frontend.wording import pretty
from torchere.serving.logs.trace_context import trace_headers
from torchere.serving.types import InferRequest, InferResponse, Parameter, StreamedResponse


class InferenceService:
    """Translates between gRPC messages and the data plane; used on the event loop of the data plane only."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def methods(self) -> Mapping[str, Implementation]:
        """Return the methods by their names in the .proto file."""
        return {
            "Ping": self.ping,
            "Predictions": Callback(partial(_Predictions, self._dataplane)),
            "StreamPredictions": self.predict_stream,
            "StreamPredictions2": self.predict_sequences,
        }

    def ping(self, request: empty_pb2.Empty, call: Call) -> TorchServeHealthResponse:
        """Return the JSON of REST's `/ping`; the status is OK even when the JSON says `Unhealthy`."""
        return TorchServeHealthResponse(health=pretty({"status": wording.health(self._dataplane.healthy())}))

    async def predict_stream(
        self, request: PredictionsRequest, call: Call
    ) -> AsyncIterator[PredictionResponse]:
        """Answer one request with one message for each part; without streaming there is one part."""
        async for part in self._parts(request, call):
            yield PredictionResponse(prediction=part)

    async def predict_sequences(
        self, requests: AsyncIterator[PredictionsRequest], call: Call
    ) -> AsyncIterator[PredictionResponse]:
        """Answer requests of sequences one after the other; an error is reported in the response message."""
        async for request in requests:
            size = request.ByteSize()
            call.stream.keep(size)
            try:
                if not request.sequence_id:
                    raise InvalidRequest("Parameter sequenceId is required.")
                check_length("sequence_id", request.sequence_id)
                headers = ((SEQUENCE_ID, request.sequence_id),)
                async for part in self._parts(request, call, headers):
                    response = PredictionResponse(prediction=part, sequence_id=request.sequence_id)
                    call.stream.check(response.ByteSize())
                    yield response
            except (ServingError, MessageFailed) as error:
                name = request.sequence_id[:MAX_NAME_LENGTH]
                yield PredictionResponse(sequence_id=name, status=_status(error))
            finally:
                call.stream.let_go(size)

    async def _parts(
        self, message: PredictionsRequest, call: Call, headers: tuple[tuple[str, str], ...] = ()
    ) -> AsyncIterator[bytes]:
        request = _request(message, call, headers)
        answer = await self._dataplane.infer(message.model_name, message.model_version or None, request)
        if isinstance(answer, StreamedResponse):
            async for chunk in answer.chunks:
                yield chunk
        else:
            check_refusal(answer)
            yield bytes(answer.body)  # a large one is a view, which protobuf does not take


class _Predictions(GrpcPrediction):
    """A prediction with one request and one response message; streamed parts are joined."""

    __slots__ = ()

    def asked(self, message: PredictionsRequest) -> Asked:
        return Asked(message.model_name, message.model_version or None, _request(message, self))

    def message_of(self, response: InferResponse) -> PredictionResponse:
        check_refusal(response)
        return PredictionResponse(prediction=bytes(response.body))


def _request(
    message: PredictionsRequest, call: Call, headers: tuple[tuple[str, str], ...] = ()
) -> InferRequest:
    if not message.model_name:
        raise InvalidRequest("Parameter model_name is required.")
    parameters = tuple([Parameter(name, value) for name, value in message.input.items()])
    trace = tuple(trace_headers(call.metadata))  # passed to handlers, as over REST
    request = InferRequest(new_request_id(), parameters, headers + trace, call.deadline_s)
    return prioritised(request, call.metadata)


def _status(error: ServingError | MessageFailed) -> status_pb2.Status:
    if isinstance(error, MessageFailed):
        return status_pb2.Status(code=error.code, message=str(error))
    ended = failure(error, INFERENCE)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=ended.reason))
    return status_pb2.Status(code=ended.code, message=ended.message, details=[detail])
