"""The context of a handler: facts about its model, the requests of its batch, and their responses."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from torchere.handlers.encode import encode_answer

if TYPE_CHECKING:
    from torchere.handlers.loading.weights import SharedModels
    from torchere.handlers.metrics import MetricsCache

SendPartial = Callable[[int, bytes], None]
StoppingCriterion = Callable[[Any], bool | None]


class Unwanted(BaseException):
    """Raised between stages and parts when all clients of the batch have left.

    Handlers must not catch it.
    """


def _alias(name: str) -> Any:
    """Return a property that is another name of an attribute."""
    return property(attrgetter(name), lambda self, value: setattr(self, name, value))


class RequestProcessor:
    """One request of a batch as the handler sees it, with the status and headers of its response.

    Args:
        request_header: the client's headers in the client's spelling; looked up with exact case. Each value
            of the request has an entry here too, from its name to `{"content-type": its type}`, as in
            TorchServe.
        request_id: the id the client sees as `x-request-id`.
    """

    __slots__ = ("_request_header", "reason_phrase", "request_id", "response_headers", "status_code")

    def __init__(self, request_header: dict[str, Any], request_id: str = "") -> None:
        self.request_id = request_id
        self.status_code = 200
        self.reason_phrase: str | None = None
        self.response_headers: dict[str, str] = {}
        self._request_header = request_header  # TorchServe's name, which handlers access directly

    # TorchServe's private names for these, which handlers use as well.
    _status_code = _alias("status_code")
    _reason_phrase = _alias("reason_phrase")
    _response_header = _alias("response_headers")

    def get_request_property(self, key: str) -> str | None:
        """Return the request header of exactly that name, or None."""
        return self._request_header.get(key)

    def get_request_properties(self) -> dict[str, str]:
        """Return all request headers; an entry that the caller adds is found as if it were one of them."""
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the HTTP status of the response."""
        self.status_code = code
        self.reason_phrase = reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Set a response header.

        Raises:
            TypeError: the value is not a `str`; headers are text.
        """
        if not isinstance(value, str):
            raise TypeError(
                f"response header {key!r} has a value of type {type(value).__name__}; convert it with str()"
            )
        self.response_headers[key] = value

    def get_response_header(self, key: str) -> str | None:
        """Return the response header set so far under that name, or None."""
        return self.response_headers.get(key)

    def get_response_headers(self) -> dict[str, str]:
        """Return all response headers set so far."""
        return self.response_headers

    def get_response_status_code(self) -> int:
        """Return the status set so far; 200 unless the handler set another."""
        return self.status_code

    def get_response_status_phrase(self) -> str | None:
        """Return the reason phrase set so far, or None."""
        return self.reason_phrase


class Encoder(Protocol):
    """Encodes the answers of one handler (`tensors/answer.py`)."""

    def encode(self, answer: object, processor: RequestProcessor) -> bytes:
        """Encode one answer in the form that the request wants; may set the response's status and headers."""


class Context:
    """One handler instance's interface to the server: facts about the model, and the current batch.

    An executor makes one context, gives it to `initialize`, and calls `begin_batch` before every call of the
    handler. Not thread-safe across batches: one batch at a time. Threads a handler starts itself may read it
    while their batch runs. The constructor's arguments are TorchServe's, for scripts and tests of handlers.
    """

    def __init__(  # noqa: PLR0917  # TorchServe's signature
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        batch_size: int | None,
        gpu: int | None,
        mms_version: str,
        limit_max_image_pixels: bool = True,
        metrics: MetricsCache | None = None,
        model_yaml_config: dict[str, Any] | None = None,
        *,
        shared_models: SharedModels | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self.system_properties: dict[str, Any] = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",  # the name TorchServe always gave, from the server it was forked from
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.model_yaml_config: dict[str, Any] = model_yaml_config if model_yaml_config is not None else {}
        self.metrics = metrics
        self.shared_models = shared_models
        self.request_ids: dict[int, str] | None = None
        self.request_processor: Sequence[RequestProcessor] | None = None
        # Indexed by the place in a batch. As in TorchServe they stay until the handler sets others.
        self.stopping_criteria: Sequence[StoppingCriterion] | Mapping[int, StoppingCriterion] | None = None
        # Seconds of preprocess, inference, postprocess, for the metrics; set by handlers that measure them.
        self.stages_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self.encoder: Encoder | None = None  # set by the executor
        self.cl_socket: None = None  # TorchServe's worker socket, which handlers do not get here
        # The names of the variables are the ones TorchServe's Python worker reads.
        self.header_key_sequence_id = os.environ.get("TS_REQUEST_SEQUENCE_ID", "ts_request_sequence_id")
        self.header_key_sequence_start = os.environ.get(
            "TS_REQUEST_SEQUENCE_START", "ts_request_sequence_start"
        )
        self.header_key_sequence_end = os.environ.get("TS_REQUEST_SEQUENCE_END", "ts_request_sequence_end")
        self._send_partial: SendPartial | None = None
        self.is_unwanted: Callable[[], bool] | None = None  # set by the executor for each batch
        self.rows_are_requests = True  # False while an envelope's rows are run

    # TorchServe's private names for two of these, which handlers use as well.
    _system_properties = _alias("system_properties")
    _request_processor = _alias("request_processor")

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        """Return a copy for a nested handler, which may change the model's facts in its copy.

        Both share the current batch and the metrics.
        """
        copied = copy.copy(self)
        copied.manifest = copy.deepcopy(self.manifest, memo)
        copied.system_properties = copy.deepcopy(self.system_properties, memo)
        copied.model_yaml_config = copy.deepcopy(self.model_yaml_config, memo)
        return copied

    def begin_batch(self, requests: Sequence[RequestProcessor], send_partial: SendPartial | None) -> None:
        """Switch to the next batch. Called by the executor only.

        Args:
            requests: one per request, in the order of the handler's `data`.
            send_partial: takes (index, bytes) of a part of a streamed answer; None when the client can't
                take an answer in parts.
        """
        self.request_processor = requests
        self.request_ids = dict(enumerate([request.request_id for request in requests]))
        self.stages_s = (0.0, 0.0, 0.0)
        self.rows_are_requests = True
        self._send_partial = send_partial
        if self.metrics is not None:
            self.metrics.begin_batch(self.request_ids)

    def end_batch(self) -> None:
        """Drop the callback for partial answers.

        It refers to the executor, which refers to this context: a reference cycle.
        """
        self._send_partial = None

    def give_up_if_unwanted(self) -> None:
        """Stop the batch if all its clients have left; for long handlers, between two steps.

        Raises:
            Unwanted: all clients have left.
        """
        if self.is_unwanted is not None and self.is_unwanted():
            raise Unwanted

    def send_partial(self, index: int, chunk: bytes) -> None:
        """Send one part of the answer to request `index` now; the handler's returned answer follows it.

        Raises:
            RuntimeError: answers can't be sent in parts here.
        """
        if self._send_partial is None:
            raise RuntimeError(
                "this request can't take an answer in parts: the call came outside a batch, or from a client "
                "of an API without streaming; return the whole answer from the handler instead"
            )
        self.give_up_if_unwanted()
        self._send_partial(index, chunk)

    def encode_part(self, index: int, part: object) -> bytes:
        """Return the bytes of one part of the answer to request `index`, encoded like its final answer.

        Raises:
            UnsupportedOutput: it can't be encoded.
        """
        if self.encoder is None:
            return encode_answer(part)
        return self.encoder.encode(part, self._request(index))

    def _request(self, index: int) -> RequestProcessor:
        if self.request_processor is None:
            raise RuntimeError("there is no request yet: the context holds requests during handle() only")
        return self.request_processor[index]

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of request `idx` of the batch, or None outside the batch."""
        return None if self.request_ids is None else self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> str | None:
        """Return the header of exactly that name (case matters) of request `idx`, or None."""
        return self._request(idx).get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, str]:
        """Return all headers of request `idx`."""
        return self._request(idx).get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the `content-type` of response `idx`."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """Return the `content-type` set so far for response `idx`, or None."""
        return self.get_response_headers(idx).get("content-type")

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of response `idx`; the value must be a `str`."""
        self._request(idx).add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """Return the headers set so far for response `idx`."""
        return self._request(idx).get_response_headers()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set status code and reason phrase of response `idx`; no effect outside a batch."""
        if self.request_processor is not None:
            self.request_processor[idx].report_status(code, reason_phrase=phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set status code and reason phrase of every response of the batch."""
        for request in self.request_processor or ():
            request.report_status(code, reason_phrase=phrase)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        """Return status code and reason phrase of response `idx` so far."""
        request = self._request(idx)
        return request.get_response_status_code(), request.get_response_status_phrase()

    def get_sequence_id(self, idx: int) -> str | None:
        """Return the id of the sequence that request `idx` belongs to, or None."""
        return self.get_request_header(idx, self.header_key_sequence_id)


def send_intermediate_predict_response(
    ret: Sequence[Any] | Mapping[int, Any],
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Context,
) -> None:
    """Send the next part of the answers of a batch; the handler's return value is the last part.

    In a group of ranks only rank 0 sends; the others return at once.

    Args:
        ret: the parts by the indices of `req_id_map`, encoded like a final answer; no others are sent.
        req_id_map: the request of each part: usually `context.request_ids`, or some of these under other
            indices, as for a part of a batch.
        message: kept for TorchServe's signature; no client sees it.
        code: status of the answer; only that of the first part reaches the client.
        context: the context of the current batch.

    Raises:
        ValueError: a part is missing, or a request is not in this batch; then nothing is sent.
        UnsupportedOutput: an element can't be encoded.
        RuntimeError: the client's API can't take an answer in parts.
    """
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) != "0":
        return
    places = {request_id: place for place, request_id in (context.request_ids or {}).items()}
    try:
        parts = [(places[request_id], ret[index]) for index, request_id in req_id_map.items()]
    except LookupError as err:
        raise ValueError(
            f"{len(ret)} partial answers for a batch of {len(req_id_map)}: send one for each request of "
            f"req_id_map, under its index ({type(err).__name__}: {err})"
        ) from err
    if code != 200:
        context.set_all_response_status(code, message)
    for place, chunk in [(place, context.encode_part(place, part)) for place, part in parts]:
        context.send_partial(place, chunk)
