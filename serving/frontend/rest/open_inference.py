"""Routes of KServe's protocols except inference: health, metadata, statistics, repository."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from torchere.handlers.tensors import shown
from torchere.handlers.tensors.codec import NO_JSON
from torchere.serving.errors import InvalidRequest, NotFound, ServingError
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference import metadata
from torchere.serving.frontend.open_inference.repository import Repository
from torchere.serving.frontend.rest.answers import ANY_METHOD, READ, Endpoint, json_answer, raw_answer, route
from torchere.serving.frontend.rest.bodies import read_parameters
from torchere.serving.frontend.rest.wire import protocol_error
from torchere.serving.frontend.wording import pretty

# Endpoints of Triton below `/v2/` that this server lacks, with the text of the 404 response.
_ABSENT = {
    "systemsharedmemory": "There is no shared memory here.",
    "cudasharedmemory": "There is no shared memory here.",
    "trace": "There are no trace settings here.",
    "logging": "There are no log settings of Triton's here.",
}
_ELSEWHERE = {"repository": "The model repository is on the management port."}


def health_routes(dataplane: DataPlane) -> list[Route]:
    """Return the routes `/v2`, `/v2/health/live` and `/v2/health/ready`, for any method as in TorchServe."""

    async def of_server(request: Request) -> Response:
        return json_answer(pretty(metadata.server_metadata()))

    async def live(request: Request) -> Response:
        return json_answer(pretty({"live": True}))

    async def ready(request: Request) -> Response:
        is_ready = dataplane.readiness().ready
        return json_answer(pretty({"ready": is_ready}), 200 if is_ready else 503)

    return [
        route("/v2", of_server, ANY_METHOD),
        route("/v2/health/live", live, ANY_METHOD),
        route("/v2/health/ready", ready, ANY_METHOD),
    ]


def model_routes(dataplane: DataPlane) -> list[Route]:
    """Return the read-only routes of models: names, metadata, configuration, statistics, readiness."""

    def reader(members: Callable[[ModelFacts], dict[str, Any]]) -> Endpoint:
        async def read(request: Request) -> Response:
            named = request.path_params
            said = members(dataplane.facts(named["model"], named.get("version")))
            return json_answer(pretty(said), 503 if said.get("ready") is False else 200)

        return read

    def is_ready(facts: ModelFacts) -> dict[str, Any]:
        return {"name": facts.key.name, "ready": dataplane.model_readiness(*facts.key).ready}

    async def names(request: Request) -> Response:
        once = dict.fromkeys(key.name for key in dataplane.registered())
        return json_answer(pretty({"models": list(once)}))

    async def statistics_of_all(request: Request) -> Response:
        facts = [dataplane.facts(*key) for key in dataplane.registered()]
        return json_answer(pretty(metadata.model_statistics(facts)))

    async def statistics(request: Request) -> Response:
        named = request.path_params
        facts = dataplane.facts_of_versions(named["model"], named.get("version"))
        return json_answer(pretty(metadata.model_statistics(facts)))

    readiness = reader(is_ready)
    found = [
        _route("/v1/models", names, READ),
        _route("/v1/models/{model}", readiness, READ),
        _route("/v2/models", names, READ),
        _route("/v2/models/stats", statistics_of_all, READ),
    ]
    for path, endpoint in (
        ("", reader(metadata.model_metadata)),
        ("/config", reader(metadata.model_config)),
        ("/stats", statistics),
        ("/ready", readiness),
    ):
        found.append(_route(f"/v2/models/{{model}}{path}", endpoint, READ))
        found.append(_route(f"/v2/models/{{model}}/versions/{{version}}{path}", endpoint, READ))
    return found


def repository_routes(controlplane: ControlPlane, max_request_bytes: int) -> list[Route]:
    """Return the routes of the model repository: index, load and unload. They belong to management."""
    repository = Repository(controlplane)

    async def index(request: Request) -> Response:
        said = await _object(request, max_request_bytes)
        ready = said.get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidRequest(f"ready: found {shown(ready)}, expected true or false")
        entries = [entry._asdict() for entry in repository.index(ready)]
        return json_answer(pretty([{name: text for name, text in each.items() if text} for each in entries]))

    async def load(request: Request) -> Response:
        said = await _object(request, max_request_bytes)
        parameters = said.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidRequest(f"parameters: found {shown(parameters)}, expected an object")
        await repository.load(request.path_params["model"], parameters)
        return Response(status_code=200)

    async def unload(request: Request) -> Response:
        await repository.unload(request.path_params["model"])
        return Response(status_code=200)

    return [
        _route("/v2/repository/index", index, ["POST"]),
        _route("/v2/repository/models/{model}/load", load, ["POST"]),
        _route("/v2/repository/models/{model}/unload", unload, ["POST"]),
    ]


def absent_routes(is_management: bool) -> list[Route]:
    """Return routes that answer 404, as a protocol error, for Triton's endpoints that this port lacks.

    Triton's clients can't read the 404 response of other unknown paths.
    """

    def refusing(text: str) -> Endpoint:
        async def refuse(request: Request) -> Response:
            raise NotFound(text)

        return refuse

    texts = {
        f"/v2/{name}": text for name, text in (_ABSENT if is_management else _ABSENT | _ELSEWHERE).items()
    }
    texts |= {f"{path}/{{rest:path}}": text for path, text in texts.items()}
    texts["/v2/models/{model}/trace/setting"] = _ABSENT["trace"]
    return [_route(path, refusing(text), ANY_METHOD) for path, text in texts.items()]


def _route(path: str, endpoint: Endpoint, methods: Sequence[str]) -> Route:
    """Return a route whose errors have the protocol's form."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ServingError as error:
            return raw_answer(*protocol_error(error))

    return route(path, answer, methods)


async def _object(request: Request, max_request_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a request's body; an empty body counts as `{}`."""
    body = await read_parameters(request, max_request_bytes)
    if not body.strip():
        return {}
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except NO_JSON as err:
        raise InvalidRequest(f"the request: {err}; expected a JSON object") from err
