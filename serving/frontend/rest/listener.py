"""The outermost ASGI app of every REST port: authorise, dispatch, frame, and answer whatever goes wrong."""

from __future__ import annotations

import logging
import time

from starlette.types import Receive, Scope, Send

from torchere.serving.errors import NotFound, ServingError, Unauthorized
from torchere.serving.frontend import wording
from torchere.serving.frontend.access_log import access_log
from torchere.serving.frontend.keys import Keys
from torchere.serving.frontend.rest.authorisation import Surfaces, required_key
from torchere.serving.frontend.rest.body import BodyTooLarge, ClientGone, discard_rest
from torchere.serving.frontend.rest.call import Call, cors_headers
from torchere.serving.frontend.rest.codec import read_head
from torchere.serving.frontend.rest.deferred import DeferredApp
from torchere.serving.frontend.rest.direct_predictions import DirectPredictions
from torchere.serving.frontend.rest.predict import Predictor
from torchere.serving.frontend.rest.targets import prediction_target
from torchere.serving.frontend.services import Services
from torchere.serving.telemetry.access_lines import Client
from torchere.serving.telemetry.timeline import fields_of

BAD_REQUEST = "GET /bad-request HTTP/1.1"  # how TorchServe's access log calls what is no request

logger = logging.getLogger(__name__)


class Listener:
    """Predictions take the short way through `predictor`; everything else goes to `routes`.

    Serves one event loop. Every request is authorised here, before anything looks at its path or body.
    """

    def __init__(
        self,
        surfaces: Surfaces,
        services: Services,
        routes: DeferredApp,
        predictor: Predictor | None,
        direct: DirectPredictions | None = None,
    ) -> None:
        self.routes = routes
        self.direct = direct  # `protocol.py` looks here for what need not come this way at all
        self._surfaces = surfaces
        self._keys = services.keys
        self._metrics = services.metrics
        self._cors = cors_headers(services.cors)
        self._predictor = predictor
        # Where predictions are answered clients listen, and details are not for them.
        self._show_detail = surfaces == {"management"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever goes wrong with it."""
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        call = Call(scope, send, self._metrics, self._cors, show_detail=self._show_detail)
        try:
            await self._dispatch(call, receive)
        except ServingError as error:
            await self._fail(call, error)
        except BodyTooLarge:
            await self._refuse_body(call, receive)
        except ClientGone:
            call.client_gone()
        except Exception as error:  # the top of every request: a bug is logged, and the client gets a 500
            fields = fields_of(call.request_id, call.telemetry.timeline)
            logger.exception("request %s failed unexpectedly", call.request_id, extra=fields)
            await self._fail(call, ServingError("Internal server error", repr(error)))

    def refused(self, client: Client, status: int) -> None:
        """The connection itself has answered what is no request."""
        self._metrics.request_finished(status)
        if access_log.enabled:
            access_log.add(client, BAD_REQUEST, status, time.monotonic())

    async def _dispatch(self, call: Call, receive: Receive) -> None:
        scope = call.scope
        path = scope["path"].rstrip("/") or "/"
        if self._keys is not None:
            await self._authorise(self._keys, scope, path, receive)
        if self._predictor is not None and scope["method"] != "OPTIONS":
            target = prediction_target(path)
            if target is not None:
                await self._predictor.predict(call, target, receive)
                return
        if path.endswith("\n"):  # the framework would take it for the path without, whose key may be another
            raise NotFound(wording.NO_SUCH_RESOURCE)
        scope["path"] = path
        await self.routes(scope, receive, call.framed_send)

    async def _authorise(self, keys: Keys, scope: Scope, path: str, receive: Receive) -> None:
        kind = required_key(self._surfaces, scope["method"], path)
        if kind is None:
            return
        try:
            keys.authorize(kind, read_head(scope["headers"]).authorization)
        except Unauthorized as error:
            self._metrics.refused(error)
            await discard_rest(receive)
            raise

    async def _fail(self, call: Call, error: ServingError) -> None:
        if call.status == 0:
            await call.answer_error(error)
        else:
            call.break_off(error)

    async def _refuse_body(self, call: Call, receive: Receive) -> None:
        """Answer 413 with nothing in it, as TorchServe does, and read on so that the client can see it."""
        self._metrics.refused_body()
        await call.start(413, [(b"content-length", b"0")])
        await discard_rest(receive)
        await call.body_part(b"", last=True)
