"""Routes of the management API."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from torchere.handlers.tensors import shown
from torchere.handlers.tensors.codec import NO_JSON
from torchere.serving.access.identity import authorization_of
from torchere.serving.access.keys import Keys
from torchere.serving.config.bounded_yaml import read_yaml
from torchere.serving.config.kinds import near
from torchere.serving.errors import InvalidRequest, ServingError
from torchere.serving.frontend import wording
from torchere.serving.frontend.call_scope import sets
from torchere.serving.frontend.control import ControlPlane, Progress, flag, integer, registration
from torchere.serving.frontend.rest.answers import (
    ANY_METHOD,
    handler_answer,
    json_answer,
    no_such_method,
    route,
    status_answer,
)
from torchere.serving.frontend.rest.bodies import read_parameters
from torchere.serving.frontend.rest.codec import REQUEST_ID, request_headers, text_values
from torchere.serving.frontend.rest.openapi import REGISTER, SCALE, Parameters, management_document
from torchere.serving.frontend.wording import pretty
from torchere.serving.logs.levels import LogLevelError, change_level, levels
from torchere.serving.types import InferRequest, ModelKey

logger = logging.getLogger(__name__)

_QUARANTINE = "/models/{model}/{version}/quarantine"  # below a version, because a version may have this name
PAGE_SIZE = 100  # both the default and the maximum
NEARLY_JSON_BYTES = 4096  # PyYAML reads about 100 KB a second
_TOLD = 5  # ignored parameters that one line of the log names
_OF_SIGNED_URL = re.compile("(?i:x-amz-|x-goog-|sig$|signature$)")  # S3, Google, Azure
_ENCODE = "; encode the URL: curl -X POST -G --data-urlencode url=..., or send JSON"
_NUMBERS = (
    *("batch_size", "initial_workers", "max_batch_delay", "max_worker", "min_worker"),
    *("response_timeout", "startup_timeout"),
)
STATUS_OF = {
    Progress.DONE: HTTPStatus.OK,
    Progress.STARTED: HTTPStatus.ACCEPTED,
    Progress.PARTIAL: HTTPStatus.PARTIAL_CONTENT,
}


def management_routes(controlplane: ControlPlane, max_request_bytes: int, *, is_strict: bool) -> list[Route]:
    """Return the routes of models; `is_strict`: `as_torchserve_reads` reads the numbers."""

    async def page(request: Request) -> Response:
        query = text_values(request.scope["query_string"])
        return json_answer(wording.page_text(controlplane.list_models(*page_of(query))))

    async def register(request: Request) -> Response:
        controlplane.check_model_api()
        values = await parameters_of(request, max_request_bytes, REGISTER, is_strict=is_strict)
        wish = registration(values, controlplane.default_executors)
        synchronous = flag(values, "synchronous", default=True)
        result = await controlplane.register(wish, synchronous=synchronous)
        return status_answer(wording.registered(result), STATUS_OF[result.progress])

    async def unregister(request: Request) -> Response:
        model, version = _named(request)
        await controlplane.unregister(model, version)
        return status_answer(wording.unregistered(model))

    async def describe_api(request: Request) -> Response:
        model, version = _named(request)
        controlplane.describe(model, version)
        return json_answer(pretty(management_document(model)))

    async def kserve_ready(request: Request) -> Response:
        model, _ = _named(request)
        return json_answer(pretty({"name": model, "ready": controlplane.has_executors(model)}))

    # The framework takes the first match, so routes with exact methods come first.
    found = [route("/models", page, ["GET"]), route("/models", register, ["POST"])]
    found += _routes_of_versions(controlplane)
    for path in ("/models/{model}", "/models/{model}/{version}"):
        found.append(route(path, partial(_describe, controlplane), ["GET"]))
        found.append(route(path, partial(_scale, controlplane, is_strict), ["PUT"]))
        found.append(route(path, unregister, ["DELETE"]))
        found.append(route(path, describe_api, ["OPTIONS"]))
    found.append(route("/v1/models/{model}", kserve_ready, ["GET"]))
    paths = ["/models", "/models/{model}", "/models/{model}/{version}", "/v1/models/{model}"]
    paths += [_QUARANTINE, f"{_QUARANTINE}/{{digest}}"]
    return found + [route(path, no_such_method, ANY_METHOD) for path in paths]


def _routes_of_versions(controlplane: ControlPlane) -> list[Route]:
    async def set_default(request: Request) -> Response:
        key = _key(request)
        await controlplane.set_default(*key)
        return status_answer(wording.default_set(key))

    async def quarantined(request: Request) -> Response:
        return json_answer(wording.quarantine_text(controlplane.quarantined(*_key(request))))

    async def lift_quarantine(request: Request) -> Response:
        key = _key(request)
        lifted = controlplane.lift_quarantine(*key, request.path_params.get("digest"))
        return status_answer(wording.quarantine_lifted(key, lifted))

    return [
        route("/models/{model}/{version}/set-default", set_default, ["PUT"]),
        route(_QUARANTINE, quarantined, ["GET"]),
        route(_QUARANTINE, lift_quarantine, ["DELETE"]),
        route(f"{_QUARANTINE}/{{digest}}", lift_quarantine, ["DELETE"]),
    ]


async def _describe(controlplane: ControlPlane, request: Request) -> Response:
    """Describe one version or all versions; `customized=true` calls the version's handler too."""
    model, version = _named(request)
    query = text_values(request.scope["query_string"])
    if not flag(query, "customized", default=False) or version == "all":
        return json_answer(wording.versions_text(controlplane.describe(model, version)))
    wish = InferRequest(request.scope[REQUEST_ID], (), request_headers(request.scope))
    described, response = await controlplane.describe_customized(model, version, wish)
    return handler_answer(response, wording.customized_text(described, response).encode() + b"\n")


async def _scale(controlplane: ControlPlane, is_strict: bool, request: Request) -> Response:
    """Change how many executors a version has."""
    query = text_values(request.scope["query_string"])
    model, version = _named(request)
    warn_of_ignored(f"scaling {shown(model)}", query, (*SCALE, ("model_version", "string")))
    version = version or query.get("model_version") or None
    numbers = as_torchserve_reads(query) if is_strict else query
    min_executors = integer(numbers, "min_worker")
    minimum = 1 if min_executors is None else min_executors
    if is_strict and minimum < 0:
        raise ServingError(f"min_worker is below 0: {minimum}")
    max_executors = integer(numbers, "max_worker")
    progress = await controlplane.scale(
        model,
        version,
        min_executors=minimum,
        max_executors=minimum if max_executors is None else max_executors,
        synchronous=flag(query, "synchronous", default=False),
    )
    return status_answer(wording.scaled(progress, model, version, minimum), STATUS_OF[progress])


def _named(request: Request) -> tuple[str, str | None]:
    """Return the model and the version that a path names."""
    return request.path_params["model"], request.path_params.get("version")


def _key(request: Request) -> ModelKey:
    return ModelKey(request.path_params["model"], request.path_params["version"])


async def parameters_of(
    request: Request, max_bytes: int, known: Parameters, *, is_strict: bool = False
) -> Mapping[str, object]:
    """Return the parameters of a registration, from a JSON body or else from the query; log unknown ones.

    Raises:
        InvalidRequest: the body is not a JSON object.
    """
    content_type = request.headers.get("content-type", "")
    values: Mapping[str, object]
    if content_type.partition(";")[0].strip().lower() == "application/json":
        values = await _json_parameters(request, max_bytes)
    else:
        query = text_values(request.scope["query_string"])
        values = as_torchserve_reads(query) if is_strict else query
    warn_of_ignored("a registration", values, known)
    return values


async def _json_parameters(request: Request, max_bytes: int) -> dict[str, object]:
    body = await read_parameters(request, max_bytes)
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except NO_JSON as err:
        if (parameters := _nearly_json(body)) is not None:
            return parameters
        raise InvalidRequest(f"The body must be a JSON object of parameters: {err}") from err


def as_torchserve_reads(query: Mapping[str, str]) -> dict[str, str]:
    """Return a query without numbers that are not a Java int, for which TorchServe uses its default.

    A negative `initial_workers` becomes 0: in TorchServe it registers a model without workers.
    """
    read = {name: text for name, text in query.items() if name not in _NUMBERS or _is_java_int(text)}
    if read.get("initial_workers", "").startswith("-"):
        read["initial_workers"] = "0"
    return read


def _is_java_int(text: str) -> bool:
    return bool(re.fullmatch("[+-]?[0-9]{1,10}", text)) and -(2**31) <= int(text) < 2**31


def _nearly_json(body: bytes) -> dict[str, object] | None:
    """Return the parameters of a body with single quotes, or names without quotes, which TorchServe accepts.

    Such a body is also a mapping in YAML. None: it is not such a mapping, or is so long that reading it would
    block the event loop.
    """
    if len(body) > NEARLY_JSON_BYTES:
        return None
    try:
        text = body.decode().strip()
        found = read_yaml(text) if text.startswith("{") else None
    except ValueError:
        return None
    is_plain = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    return found if is_plain else None


def warn_of_ignored(call: str, given: Iterable[str], known: Parameters) -> None:
    """Log the names that are not among the known parameters of a call, in a line of bounded length.

    A URL whose `&` is not encoded ends there, and the rest of its query comes as further parameters.
    """
    names = [name for name, _ in known]
    # Without a value that came into the name by an encoded "=": it may be a signature.
    ignored = [name.partition("=")[0] for name in given if name not in names]
    if not ignored:
        return
    told = [_with_nearest(name, names) for name in ignored[:_TOLD]]
    if len(ignored) > _TOLD:
        told.append(f"{len(ignored) - _TOLD} more")
    advice = _ENCODE if any(_OF_SIGNED_URL.match(name) for name in ignored) else ""
    logger.warning("%s ignores parameters that it does not know: %s%s", call, ", ".join(told), advice)


def _with_nearest(name: str, known: Sequence[str]) -> str:
    meant = near(name[:80], known)  # comparing long names takes long
    return f"{shown(name)} ({meant})" if meant else shown(name)


def page_of(query: Mapping[str, str]) -> tuple[int, int]:
    """Return the length and the start of the page that a query asks for; invalid numbers are ignored."""
    limit = _natural(query.get("limit"), PAGE_SIZE)
    return min(limit, PAGE_SIZE), _natural(query.get("next_page_token"), 0)


def _natural(text: str | None, default: int) -> int:
    """Parse an integer of 0 or more, with fewer than 10 digits; return `default` for anything else."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else default


PATH = "/log-level"


def log_level_routes() -> list[Route]:
    """Return the routes of `/log-level`: GET shows all levels, PUT sets one until the process ends.

    A level is set with `PUT /log-level?logger=NAME&level=LEVEL`.
    """

    async def show(request: Request) -> Response:
        return json_answer(pretty(levels()))

    async def change(request: Request) -> Response:
        query = text_values(request.scope["query_string"])
        name, level = query.get("logger", ""), query.get("level", "")
        sets(name or "root", level.upper())
        try:
            change_level(name, level)
        except LogLevelError as err:
            raise InvalidRequest(str(err)) from err
        return json_answer(pretty(levels()))

    return [
        route(PATH, show, ["GET"]),
        route(PATH, change, ["PUT"]),
        route(PATH, no_such_method, ANY_METHOD),
    ]


def token_routes(keys: Keys) -> list[Route]:
    """Return the route `/token?type=inference|management`; it writes the new key to the key file only."""

    async def renew(request: Request) -> Response:
        keys.renew(
            request.query_params.get("type"), authorization_of(request.headers.getlist("authorization"))
        )
        return json_answer("")

    return [route("/token", renew, ANY_METHOD)]
