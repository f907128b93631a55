"""Models that keep something between requests: sequences, and answers that are made part by part."""

from __future__ import annotations

from collections.abc import Iterator

from conformity.rest import Case
from conformity.store import STATEFUL

JSON = {"Content-Type": "application/json"}


def stateful_cases() -> Iterator[Case]:
    """All are registered before one is asked; each request relies on those before it."""
    for name in STATEFUL:
        path = f"/models?url={name}.mar"
        yield Case(f"stateful: register {name}", "POST", path, "management")
    for name in STATEFUL:
        yield Case(f"stateful: describe {name}", "GET", f"/models/{name}", "management")
    for model in ("sequence", "ending"):
        for sequence, value in (("a", 1), ("b", 10), ("a", 2), ("b", 0), ("b", 5), ("a", 0), ("a", 7)):
            yield _predict(model, value, {"ts_request_sequence_id": sequence})
        yield _predict(model, 3, {})
        yield _predict(model, 0, {"ts_request_sequence_id": ""})
    yield _predict("no_idle", 1, {"ts_request_sequence_id": "a"})
    for parts in (0, 2, 3):  # a stream of one part hangs in TorchServe
        yield _predict("continuous", parts, {})
        yield _predict("continuous", parts, {"ts_request_sequence_id": "a"})


def _predict(model: str, value: int, headers: dict[str, str]) -> Case:
    title = f"stateful: {model} {value} {' '.join(headers.values())}".rstrip()
    path = f"/predictions/{model}"
    return Case(title, "POST", path, headers={**JSON, **headers}, body=str(value).encode())
