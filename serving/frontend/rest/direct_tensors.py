"""Plain requests of the Open Inference Protocol, answered on the connection as other predictions are."""

from __future__ import annotations

from typing import Any

from torchere.serving.errors import ServingError
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.errors import as_client_knows
from torchere.serving.frontend.open_inference.json_request import parse_request
from torchere.serving.frontend.open_inference.service import whole
from torchere.serving.frontend.open_inference.tensor_request import TensorRequest
from torchere.serving.frontend.rest.codec import deadline_of
from torchere.serving.frontend.rest.direct import DirectCall, Shared
from torchere.serving.frontend.rest.known_heads import DirectHead
from torchere.serving.frontend.rest.open_inference_wire import protocol_error
from torchere.serving.frontend.rest.tensor_exchange import TensorExchange
from torchere.serving.types import InferRequest, InferResponse, StreamedResponse


class DirectTensorCall(DirectCall):
    """One request at the path of the protocol; as any other, when its body is for the handler as it is."""

    __slots__ = ("_exchange", "_facts", "_for_handler", "_request")

    def __init__(self, shared: Shared, connection: Any, head: DirectHead, exchange: TensorExchange) -> None:
        super().__init__(shared, connection, head)
        self._exchange = exchange
        self._for_handler = False
        self._facts: ModelFacts | None = None
        self._request: TensorRequest | None = None

    def _asked(self) -> InferRequest:
        head, wire = self._head, self._head.wire
        facts = self._exchange.meant(head.place.target, wire, self.body)
        if facts is None:
            self._for_handler = True
            return super()._asked()
        request = parse_request(self.body, wire.json_bytes)
        self.body = b""
        self._facts, self._request = facts, request
        deadline_s = deadline_of(head.head, self._started_s)
        return self._exchange.service.prepared(
            facts, request, request_id=self.request_id, headers=head.headers, deadline_s=deadline_s
        )

    def reply(self, outcome: InferResponse | StreamedResponse | ServingError) -> None:
        """Answer the client; `Reply` of the prediction."""
        if isinstance(outcome, ServingError) and not self._for_handler:
            outcome = as_client_knows(outcome)
        super().reply(outcome)

    def _succeed(self, outcome: InferResponse | StreamedResponse) -> None:
        if self._facts is None or self._request is None:
            super()._succeed(outcome)
            return
        if isinstance(outcome, StreamedResponse) and self._prediction is not None:
            self._prediction.withdraw()  # nobody will read its parts
        self._answer(*self._exchange.answer(self._facts, self._request, whole(outcome)))

    def _fail(self, error: ServingError) -> None:
        if self._for_handler:
            super()._fail(error)
        else:
            self._answer(*protocol_error(error))

    def _let_go(self) -> None:
        super()._let_go()
        self._facts = self._request = None
