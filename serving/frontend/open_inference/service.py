"""Asking a model with tensors, for the REST and the gRPC frontend alike."""

from __future__ import annotations

from typing import TypeAlias

from torchere.serving.errors import InvalidRequest, ServingError
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.errors import as_client_knows
from torchere.serving.frontend.open_inference.json_form import BytesAs, request_json
from torchere.serving.frontend.open_inference.signature_check import check_signature
from torchere.serving.frontend.open_inference.tensor_request import (
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
    """Prepares requests of the Open Inference Protocol, and asks; for the event loop of its data plane only.

    Args:
        dataplane: whom it asks.
        envelope: the server's `service_envelope`. Where there is one, handlers get the JSON that it takes
            off, as TorchServe has it, and not tensors.
    """

    def __init__(self, dataplane: DataPlane, envelope: str | None) -> None:
        self._dataplane = dataplane
        self._envelope = envelope

    def enveloped(self, facts: ModelFacts) -> bool:
        """Whether an envelope stands before the handler of a version, so that it is asked with JSON."""
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
        """A request as the data plane takes it, for the version that `facts` are of.

        Raises:
            ServingError: it is none, or none that the version can be asked.
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
        """Have what `prepared` gave answered: by the executor, or behind an envelope by the handler.

        Raises:
            ServingError: with the status that clients of this protocol know.
        """
        try:
            return await self._dataplane.infer(model, version, asked)
        except ServingError as error:
            raise as_client_knows(error) from error


def whole(outcome: Outcome) -> InferResponse:
    """An answer that is in one piece.

    Raises:
        InvalidRequest: the model answers in parts.
    """
    if isinstance(outcome, StreamedResponse):
        raise InvalidRequest(STREAMS)
    return outcome
