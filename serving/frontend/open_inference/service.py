"""Tensor inference for the REST and the gRPC frontend."""

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
            raise as_client_knows(error) from error


def whole(outcome: Outcome) -> InferResponse:
    """Return `outcome` if it is a single response.

    Raises:
        InvalidRequest: the outcome is a streamed response.
    """
    if isinstance(outcome, StreamedResponse):
        raise InvalidRequest(STREAMS)
    return outcome
