"""Routes of workflows: registration on the management port, predictions on the inference port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from torchere.serving.config.server_settings import SnapshotWorkflow
from torchere.serving.errors import Cancelled, InvalidRequest
from torchere.serving.frontend import wording
from torchere.serving.frontend.call_scope import CallScope, current_call
from torchere.serving.frontend.control import flag, integer, text
from torchere.serving.frontend.priority import prioritised
from torchere.serving.frontend.rest.answers import (
    ANY_METHOD,
    handler_answer,
    json_answer,
    no_such_method,
    route,
    status_answer,
)
from torchere.serving.frontend.rest.bodies import read_body
from torchere.serving.frontend.rest.codec import (
    REQUEST_ID,
    body_parameters,
    deadline,
    request_headers,
    takes_long,
    text_values,
)
from torchere.serving.frontend.rest.exchange import status_of
from torchere.serving.frontend.rest.management import page_of, parameters_of
from torchere.serving.frontend.rest.openapi import REGISTER_WORKFLOW
from torchere.serving.frontend.services import Services
from torchere.serving.frontend.wording import page_text, workflow_text
from torchere.serving.frontend.workflows import WorkflowPlane
from torchere.serving.types import NO_DEADLINE, InferRequest, InferResponse


def workflow_routes(workflows: WorkflowPlane, max_request_bytes: int) -> list[Route]:
    """Return the routes of `/workflows`. Like TorchServe, they ignore the rest of a path after the name."""

    async def page(request: Request) -> Response:
        query = text_values(request.scope["query_string"])
        return json_answer(page_text(workflows.list(*page_of(query)), "workflow"))

    async def register(request: Request) -> Response:
        workflows.check_model_api()
        values = await parameters_of(request, max_request_bytes, REGISTER_WORKFLOW)
        if values.get("url") is None:
            raise InvalidRequest("Parameter url is required.")
        wanted = SnapshotWorkflow(
            text(values, "url") or "",
            text(values, "workflow_name"),
            integer(values, "response_timeout"),
            integer(values, "startup_timeout"),
            flag(values, "s3_sse_kms", default=False),
        )
        return status_answer(wording.workflow_registered(await workflows.register(wanted)))

    async def describe(request: Request) -> Response:
        return json_answer(workflow_text(workflows.known.find(request.path_params["workflow"])))

    async def unregister(request: Request) -> Response:
        workflow = request.path_params["workflow"]
        await workflows.unregister(workflow)
        return status_answer(wording.workflow_unregistered(workflow))

    found = []
    for path in ("/workflows", "/workflows/"):
        found += [route(path, page, ["GET"]), route(path, register, ["POST"])]
        found.append(route(path, no_such_method, ANY_METHOD))
    for path in ("/workflows/{workflow}", "/workflows/{workflow}/{rest:path}"):
        found += [route(path, describe, ["GET"]), route(path, unregister, ["DELETE"])]
        found.append(route(path, no_such_method, ANY_METHOD))
    return found


class _AnyCase(StringConvertor):
    """Matches the first segment of the path in any letter case, as TorchServe does."""

    regex = "(?i:wfpredict)"


def workflow_predictions(workflows: WorkflowPlane, services: Services) -> list[Route]:
    """Return the route `/wfpredict/{workflow}`. Like TorchServe, it ignores the path after the name."""
    register_url_convertor("wfpredict", _AnyCase())
    max_bytes = services.settings.limits.max_request_bytes
    decodes = services.budgets.decodes

    async def predict(request: Request) -> Response:
        started_s = time.monotonic()
        workflow = request.path_params["workflow"]
        workflows.check_exists(workflow)
        headers = request_headers(request.scope)
        of_listener = current_call()
        caller = "" if of_listener is None else of_listener.caller
        # A scope other than the listener's, because this call makes several predictions.
        CallScope("rest", started_s, lambda: headers, status_of, caller=caller, many=True)
        timeout_ms = request.headers.get("x-torchere-timeout-ms", "").encode("latin-1", "replace")
        deadline_s = deadline(timeout_ms, started_s) if timeout_ms else NO_DEADLINE
        body = await read_body(request, max_bytes)
        content_type = request.headers.get("content-type", "")
        parse = partial(body_parameters, content_type, body)
        is_long = takes_long(content_type, body)
        parameters = await decodes.run(parse, caller) if is_long else parse()
        asked = prioritised(InferRequest(request.scope[REQUEST_ID], parameters, headers, deadline_s))
        run = workflows.infer(workflow, asked, services.budgets)
        answer = await _unless_gone(request.receive, run)
        return handler_answer(answer, bytes(answer.body))

    paths = ("/{first:wfpredict}/{workflow}", "/{first:wfpredict}/{workflow}/{rest:path}")
    return [route(path, predict, ANY_METHOD) for path in paths]


async def _unless_gone(receive: Receive, run: Coroutine[Any, Any, InferResponse]) -> InferResponse:
    """Return the result of a run; if the client disconnects before, cancel it and raise `Cancelled`."""
    running, gone = asyncio.ensure_future(run), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise Cancelled
    finally:
        gone.cancel()
        running.cancel()  # no effect when it is done
        await asyncio.gather(running, gone, return_exceptions=True)
