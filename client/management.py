"""The operations of the management API and of the v2 model repository, and the health check, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlencode

from torchere.client.errors import Unauthorized, UnreadableAnswer
from torchere.client.exchange import JSON, Answer, Operation, Request, json_body, path, reading, refusal
from torchere.client.inference import model_path

_NOT_READY = frozenset({400, 503})  # Triton and KServe disagree about which one says "not ready"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the list: its name and the archive of its default version."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The server's name, version and protocol extensions."""

    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """One input or output of a model; a dimension of -1 has any size within the limits in `parameters`.

    torchere sends limits over REST, as `dimension_1_least`, for inputs that do not take every size or value.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The versions, platform, inputs and outputs of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(frozen=True, slots=True)
class ModelState:
    """One entry of the repository index; `state` is READY or UNAVAILABLE, `reason` explains it."""

    name: str
    version: str
    state: str
    reason: str


def register(url: str, **options: object) -> Operation[str]:
    """Register an archive; options are the API's parameters (`model_name`, `initial_workers` ...).

    Options that are None are not sent.
    """
    return _changing("POST", "/models", {"url": url, **options})


def unregister(model: str, version: str | None = None) -> Operation[str]:
    """Remove a version; None is the default version."""
    return _changing("DELETE", path("models", model, version), {})


def scale(
    model: str, min_workers: int, max_workers: int | None, version: str | None, synchronous: bool
) -> Operation[str]:
    """Set the number of executors of a version."""
    options = {"min_worker": min_workers, "max_worker": max_workers, "synchronous": synchronous}
    return _changing("PUT", path("models", model, version), options)


def set_default(model: str, version: str) -> Operation[str]:
    """Make a version the default for requests that name no version."""
    return _changing("PUT", path("models", model, version, "set-default"), {})


def list_page(token: str | None) -> Operation[tuple[list[ModelEntry], str | None]]:
    """Build the request for one page of the list of models; the last one has no token of a next page."""
    return Operation(_request("GET", "/models", {"next_page_token": token}), reading(_page))


def describe(model: str, version: str | None = None) -> Operation[list[dict[str, Any]]]:
    """Build the request for the description of a version (None: the default; "all": every version)."""
    return Operation(_request("GET", path("models", model, version), {}), _list)


def _changing(method: str, where: str, options: Mapping[str, object]) -> Operation[str]:
    return Operation(_request(method, where, options), _status)


def _request(method: str, where: str, options: Mapping[str, object]) -> Request:
    said = {name: _text(value) for name, value in options.items() if value is not None}
    query = f"?{urlencode(said)}" if said else ""
    return Request(method, where + query, "management")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _status(answer: Answer) -> str:
    return str(answer.json_object().get("status", ""))


def _list(answer: Answer) -> list[dict[str, Any]]:
    value = answer.json()
    if not isinstance(value, list):
        raise UnreadableAnswer(f"expected a JSON array, found {answer.body[:200]!r}")
    return value


def _page(value: Any) -> tuple[list[ModelEntry], str | None]:
    models = value.get("models", [])
    entries = [ModelEntry(str(one["modelName"]), str(one.get("modelUrl", ""))) for one in models]
    return entries, value.get("nextPageToken")


def model_metadata(model: str, version: str | None = None) -> Operation[ModelMetadata]:
    """Build `GET /v2/models/{model}`."""
    return Operation(Request("GET", model_path(model, version)), reading(_model))


def model_ready(model: str, version: str | None = None) -> Operation[bool]:
    """Build `GET /v2/models/{model}/ready`; an unknown model raises an error instead of returning false."""
    return Operation(Request("GET", model_path(model, version, "ready")), _is_ok, _NOT_READY)


def statistics(model: str, version: str | None = None) -> Operation[list[dict[str, Any]]]:
    """Build `GET /v2/models/{model}/stats`: one object per version, in Triton's format."""
    return Operation(Request("GET", model_path(model, version, "stats")), reading(_statistics))


def index(ready_only: bool = False) -> Operation[tuple[ModelState, ...]]:
    """Build `POST /v2/repository/index`."""
    return Operation(_control("/v2/repository/index", {"ready": ready_only}), reading(_index))


def repository(model: str, verb: Literal["load", "unload"]) -> Operation[None]:
    """Build `POST /v2/repository/models/{model}/{verb}`."""
    return Operation(_control(path("v2", "repository", "models", model, verb), {}), lambda _answer: None)


def _control(where: str, body: object) -> Request:
    return Request("POST", where, "management", {"content-type": JSON}, json_body(body))


def _is_ok(answer: Answer) -> bool:
    if answer.status != 200 and isinstance(error := refusal(answer), Unauthorized):
        raise error  # TorchServe answers 400 to a wrong key; otherwise 400 means "not ready"
    return answer.status == 200


def _server(value: Any) -> ServerMetadata:
    extensions = tuple(str(one) for one in value.get("extensions", ()))
    return ServerMetadata(str(value["name"]), str(value.get("version", "")), extensions)


def _model(value: Any) -> ModelMetadata:
    return ModelMetadata(
        str(value["name"]),
        tuple(str(one) for one in value.get("versions", ())),
        str(value.get("platform", "")),
        tuple(_tensor(one) for one in value.get("inputs", ())),
        tuple(_tensor(one) for one in value.get("outputs", ())),
    )


def _tensor(value: Any) -> TensorMetadata:
    shape = tuple(int(size) for size in value["shape"])
    return TensorMetadata(
        str(value["name"]), str(value["datatype"]), shape, dict(value.get("parameters") or {})
    )


def _statistics(value: Any) -> list[dict[str, Any]]:
    return [dict(one) for one in value["model_stats"]]


def _index(value: Any) -> tuple[ModelState, ...]:
    return tuple(
        ModelState(
            str(one["name"]),
            str(one.get("version", "")),
            str(one.get("state", "")),
            str(one.get("reason", "")),
        )
        for one in value
    )


SERVER_METADATA = Operation(Request("GET", "/v2"), reading(_server))
LIVE = Operation(Request("GET", "/v2/health/live"), _is_ok, _NOT_READY)
READY = Operation(Request("GET", "/v2/health/ready"), _is_ok, _NOT_READY)
HEALTHY = Operation(Request("GET", "/ping"), _is_ok, frozenset({500}))  # 500: not healthy
