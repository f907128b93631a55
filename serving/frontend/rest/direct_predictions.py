"""Which requests are answered on the connection itself, and by what; see `direct.py`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httptools

from torchere.serving.errors import InvalidRequest, Unauthorized
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.rest.authorisation import Surfaces, required_key
from torchere.serving.frontend.rest.body import WholeBody
from torchere.serving.frontend.rest.codec import Head, read_head, takes_long, text_headers
from torchere.serving.frontend.rest.direct import DirectCall, Shared
from torchere.serving.frontend.rest.direct_tensors import DirectTensorCall
from torchere.serving.frontend.rest.known_heads import DirectHead, DirectTarget, KnownHeads
from torchere.serving.frontend.rest.open_inference_wire import Wire, read_wire
from torchere.serving.frontend.rest.targets import prediction_target
from torchere.serving.frontend.rest.tensor_exchange import INLINE_JSON_BYTES, TensorExchange
from torchere.serving.frontend.services import Services
from torchere.serving.telemetry.trace_context import trace_of_headers

# Of a longer body the key is looked at before it is taken in, to where it can be read without another copy.
SMALL_BODY_BYTES = 65_536
_METHODS = frozenset({b"POST", b"PUT", b"GET"})


class DirectPredictions:
    """Those of one listener. Used on its event loop only.

    Args:
        surfaces: what the listener answers.
        services: its own.
        dataplane: who answers.
        exchange: None: the Open Inference Protocol is switched off.
    """

    def __init__(
        self, surfaces: Surfaces, services: Services, dataplane: DataPlane, exchange: TensorExchange | None
    ) -> None:
        self.heads = KnownHeads()
        self._shared = Shared(services, dataplane)
        self._exchange = exchange
        self._max_body_bytes = services.settings.limits.max_request_bytes
        self._surfaces = surfaces
        # The same few request lines come again and again.
        self._target_of = lru_cache(maxsize=1024)(self._find_target)

    def read(
        self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]], keep_alive: bool
    ) -> DirectHead | None:
        """What a head of HTTP/1.1 says; None when its request is not for this place.

        Args:
            method: of the request line.
            url: its target.
            headers: in the client's spelling.
            keep_alive: whether the client means to send more.
        """
        place = self._target_of(method, url)
        if place is None:
            return None
        head = read_head(headers)
        if not head.plain or head.length > self._max_body_bytes or takes_long(head.content_type, head.length):
            return None
        wire = _wire_of(place, head, headers)
        if wire is None:
            return None
        texts = text_headers(headers) + place.target.headers
        line = b"%b %b HTTP/1.1" % (method, url)
        return DirectHead(place, head, wire, texts, trace_of_headers(headers), line, keep_alive)

    def begin(self, connection: Any, head: DirectHead) -> DirectCall | None:
        """As `call`, when the body is still to come; None when it may not be that long without a key."""
        call = self.call(connection, head)
        if head.head.length > SMALL_BODY_BYTES:
            try:
                self._shared.authorize(head)
            except Unauthorized:  # refused the long way, which does not keep what it reads
                return None
            call.incoming = WholeBody(head.head.length)
        return call

    def call(self, connection: Any, head: DirectHead) -> DirectCall:
        """The call that a request of this head is."""
        if head.place.target.verb and self._exchange is not None:
            return DirectTensorCall(self._shared, connection, head, self._exchange)
        return DirectCall(self._shared, connection, head)

    def _find_target(self, method: bytes, url: bytes) -> DirectTarget | None:
        if method not in _METHODS:
            return None
        try:
            path = unquote(httptools.parse_url(url).path.decode("ascii")).rstrip("/")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError, AttributeError):
            return None  # uvicorn refuses it in its own words
        target = prediction_target(path)
        if target is None or target.model is None or target.takes_query:
            return None
        if target.verb and (target.verb != "infer" or self._exchange is None):
            return None
        return DirectTarget(target, target.model, required_key(self._surfaces, method.decode(), path))


def _wire_of(place: DirectTarget, head: Head, headers: list[tuple[bytes, bytes]]) -> Wire | None:
    """What the Open Inference Protocol's headers say; None where it takes more than a moment to do it."""
    if not place.target.verb:
        return Wire()
    try:
        wire = read_wire(headers)
    except InvalidRequest:
        return None
    json_bytes = head.length if wire.json_bytes is None else wire.json_bytes
    return wire if wire.plain and json_bytes <= INLINE_JSON_BYTES else None
