"""The basic operations of the management API, and the health check, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from torchere.client.errors import UnreadableAnswer
from torchere.client.exchange import Answer, Operation, Request, path, reading


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the list: its name and the archive of its default version."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class ModelPage:
    """One page of the list; `next_token` is None on the last one."""

    models: tuple[ModelEntry, ...]
    next_token: str | None


def register(url: str, **options: object) -> Operation[str]:
    """Register an archive; options are the API's parameters (`model_name`, `initial_workers` ...).

    Options that are None are not sent.
    """
    return _changing("POST", "/models", {"url": url, **options})


def unregister(model: str, version: str | None = None) -> Operation[str]:
    """Remove a version; None is the default version."""
    return _changing("DELETE", path("models", model, version or ""), {})


def scale(
    model: str, min_workers: int, max_workers: int | None, version: str | None, synchronous: bool
) -> Operation[str]:
    """Set the number of executors of a version."""
    options = {"min_worker": min_workers, "max_worker": max_workers, "synchronous": synchronous}
    return _changing("PUT", path("models", model, version or ""), options)


def set_default(model: str, version: str) -> Operation[str]:
    """Make a version the default for requests that name no version."""
    return _changing("PUT", path("models", model, version, "set-default"), {})


def list_page(token: str | None = None) -> Operation[ModelPage]:
    """Build the request for one page of the list of models."""
    return Operation(_request("GET", "/models", {"next_page_token": token}), reading(_page))


def describe(model: str, version: str | None = None) -> Operation[list[dict[str, Any]]]:
    """Build the request for the description of a version (None: the default; "all": every version)."""
    return Operation(_request("GET", path("models", model, version or ""), {}), _list)


def healthy() -> Operation[bool]:
    """Build a request for TorchServe's `/ping`; status 500 means unhealthy."""
    return Operation(Request("GET", "/ping"), lambda answer: answer.status == 200, frozenset({500}))


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


def _page(value: Any) -> ModelPage:
    models = value.get("models", [])
    entries = tuple(ModelEntry(str(one["modelName"]), str(one.get("modelUrl", ""))) for one in models)
    return ModelPage(entries, value.get("nextPageToken"))
