"""The basics of the management API, and health. Pure."""

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

    None leaves an option out.
    """
    return _changing("POST", "/models", {"url": url, **options})


def unregister(model: str, version: str | None = None) -> Operation[str]:
    """Remove a version, None: the default one."""
    return _changing("DELETE", path("models", model, version or ""), {})


def scale(
    model: str, min_workers: int, max_workers: int | None, version: str | None, synchronous: bool
) -> Operation[str]:
    """Change how many executors a version has."""
    options = {"min_worker": min_workers, "max_worker": max_workers, "synchronous": synchronous}
    return _changing("PUT", path("models", model, version or ""), options)


def set_default(model: str, version: str) -> Operation[str]:
    """Make a version the one that requests without a version get."""
    return _changing("PUT", path("models", model, version, "set-default"), {})


def list_page(token: str | None = None) -> Operation[ModelPage]:
    """One page of the models, by name."""
    return Operation(_request("GET", "/models", {"next_page_token": token}), reading(_page))


def describe(model: str, version: str | None = None) -> Operation[list[dict[str, Any]]]:
    """Everything about a version (None: the default one; "all": each)."""
    return Operation(_request("GET", path("models", model, version or ""), {}), _list)


def healthy() -> Operation[bool]:
    """TorchServe's `/ping`: 500 says unhealthy."""
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
