"""Reading and answering requests of the Open Inference Protocol: what the short and the long way share."""

from __future__ import annotations

from torchere.serving.errors import NotFound
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.errors import refused_by_handler
from torchere.serving.frontend.open_inference.json_request import begins_like_request, looks_like_request
from torchere.serving.frontend.open_inference.service import TensorService
from torchere.serving.frontend.open_inference.tensor_answer import encode_answer, read_json
from torchere.serving.frontend.open_inference.tensor_request import TensorRequest
from torchere.serving.frontend.rest.call import RawHeaders, checked_status, handler_headers
from torchere.serving.frontend.rest.open_inference_wire import LENGTH, Wire
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.types import InferResponse

# Parsing more JSON than this holds the loop up for longer than handing it to a thread does.
INLINE_JSON_BYTES = 65_536
JSON = (b"content-type", b"application/json")
_OCTETS = (b"content-type", b"application/octet-stream")


class TensorExchange:
    """One for each event loop, used on it only."""

    def __init__(self, dataplane: DataPlane, envelope: str | None) -> None:
        self._dataplane = dataplane
        self.service = TensorService(dataplane, envelope)

    def meant(self, target: Target, wire: Wire, body: bytes | memoryview) -> ModelFacts | None:
        """The version that is asked with tensors; None: the body is for the handler as it is.

        That is so behind an envelope, and for handlers of archives without a signature, which read the JSON
        themselves.

        Raises:
            NotFound: the version is not there.
        """
        facts = self._facts(target, wire, body)
        if facts is None or target.verb != "infer" or wire.json_bytes is not None:
            return facts
        return None if self._is_for_handler(target, facts) else facts

    def _facts(self, target: Target, wire: Wire, body: bytes | memoryview) -> ModelFacts | None:
        """The version that is meant; None when it is not there, and the client speaks no protocol of ours."""
        try:
            return self._dataplane.facts(str(target.model), target.version)
        except NotFound:
            is_ours = target.verb != "infer" or target.version is not None or wire.json_bytes is not None
            if not is_ours and not _is_request(body):
                return None
            raise

    def _is_for_handler(self, target: Target, facts: ModelFacts) -> bool:
        """Whether JSON at this path is the handler's own affair, as it is with TorchServe.

        TorchServe has no versions in such paths, so what names one was not written for it.
        """
        return self.service.enveloped(facts) or (facts.signature is None and target.version is None)

    def answer(
        self, facts: ModelFacts, request: TensorRequest, response: InferResponse
    ) -> tuple[int, RawHeaders, bytes]:
        """Status, headers and body of the answer to a request for tensors.

        What an envelope wrote is translated into the form that the client asks for.

        Raises:
            ServingError: the handler made an error of it, or its answer is none of the protocol.
        """
        if not self.service.enveloped(facts):
            check_accepted(response)
            return checked_status(response), handler_headers(response.headers), response.body
        encoded = encode_answer(read_json(response), request)
        if encoded.json_bytes is None:
            return 200, [JSON], encoded.body
        return 200, [_OCTETS, (LENGTH, b"%d" % encoded.json_bytes)], encoded.body


def _is_request(body: bytes | memoryview) -> bool:
    return looks_like_request(body) if len(body) <= INLINE_JSON_BYTES else begins_like_request(body)


def check_accepted(response: InferResponse) -> None:
    """Raise what the handler refused, where it did so by the status of its answer."""
    if response.status >= 400:
        raise refused_by_handler(response)
