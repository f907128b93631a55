"""Sequences on the management API: each step relies on those before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from conformity.rest import Case

# Registered with no executor, so that a wrong value costs no start.
REGISTER_QUERIES = (
    "",
    "?url=",
    "?url=missing.mar",
    "?url=../echo.mar",
    "?url=%2Fetc%2Fpasswd",
    "?url=/echo.mar&model_name=r_slash&initial_workers=0",
    "?url=./echo.mar&model_name=r_dot&initial_workers=0",
    "?url=sub/echo.mar&model_name=r_sub&initial_workers=0",
    "?url=echo&model_name=r_bare",
    "?url=ECHO.MAR&model_name=r_case",
    "?url=not_an_archive.mar&model_name=r_garbage",
    "?url=bad_runtime.mar&initial_workers=0",
    "?url=no_version.mar&model_name=r_version&initial_workers=0",
    "?url=no_model.mar&initial_workers=0",
    "?url=folder_model&initial_workers=0",
    "?url=packed.tar.gz&initial_workers=0",
    "?url=echo.mar&model_name=r_zero&initial_workers=0",
    "?url=echo.mar&model_name=r_zero&initial_workers=0",
    "?url=echo.mar&model_name=r_empty&initial_workers=",
    "?url=echo.mar&model_name=r_batch0&initial_workers=0&batch_size=0",
    "?url=echo.mar&model_name=r_batchn&initial_workers=0&batch_size=-5",
    "?url=echo.mar&model_name=r_batchd&initial_workers=0&batch_size=-1&max_batch_delay=-100",
    "?url=echo.mar&model_name=r_delay0&initial_workers=0&max_batch_delay=0",
    "?url=echo.mar&model_name=r_delayn&initial_workers=0&max_batch_delay=-5",
    "?url=echo.mar&model_name=r_time&initial_workers=0&response_timeout=0",
    "?url=echo.mar&model_name=r_timen&initial_workers=0&response_timeout=-1",
    "?url=echo.mar&model_name=r_start&initial_workers=0&startup_timeout=0",
    "?url=echo.mar&model_name=r_runtime&initial_workers=0&runtime=java",
    "?url=echo.mar&model_name=r_python3&initial_workers=0&runtime=python3",
    "?url=echo.mar&model_name=r_PYTHON&initial_workers=0&runtime=PYTHON",
    "?url=echo.mar&model_name=r_handler&initial_workers=0&handler=nothing",
    "?url=echo.mar&model_name=r_sync&initial_workers=0&synchronous=false",
    "?url=echo.mar&model_name=r_many&initial_workers=0&nonsense=1",
    "?url=echo.mar&model_name=&initial_workers=0",
    "?url=batched.mar&model_name=r_config&initial_workers=0&response_timeout=9&batch_size=2&max_batch_delay=7",
    "?url=echo.mar&url=missing.mar&model_name=r_twice&initial_workers=0",
)
# What one server takes and the other refuses stays apart: it would change the lists and pages of the rest.
ODD_QUERIES = (
    "?url=no_manifest.mar&model_name=r_none&initial_workers=0",
    "?url=no_name.mar&initial_workers=0",
    "?url=echo.mar&model_name=r_negative&initial_workers=-1",
    "?url=echo.mar&model_name=r_words&initial_workers=abc",
    "?url=echo.mar&model_name=r_batch&initial_workers=0&batch_size=abc",
    "?url=echo.mar&model_name=r_delay&initial_workers=0&max_batch_delay=abc",
    "?url=echo.mar&model_name=r_timex&initial_workers=0&response_timeout=abc",
    "?url=echo.mar&model_name=r%20space&initial_workers=0",
    "?url=echo.mar&model_name=..%2Fr_up&initial_workers=0",
    "?url=echo.mar&model_name=n%C3%A9ant&initial_workers=0",
    "?url=http://127.0.0.1:9/echo.mar&model_name=r_ht&initial_workers=0",
    "?url=file:///nowhere/echo.mar&model_name=r_fi&initial_workers=0",
    "?url=s3://bucket/echo.mar&model_name=r_s3&initial_workers=0",
    "?url=ftp://127.0.0.1/echo.mar&model_name=r_ft&initial_workers=0",
    "?url=http://127.0.0.1:9/new.mar",
    "?url=file:///nowhere/new.mar",
)
REGISTER_OBJECTS: tuple[Any, ...] = (
    {"url": "echo.mar", "model_name": "j_plain", "initial_workers": 0, "max_batch_delay": 30},
    {"url": "echo.mar", "model_name": "j_text", "initial_workers": "0", "max_batch_delay": "30"},
    {"url": "echo.mar", "model_name": "j_delay", "initial_workers": 0},
    {"url": None},
    {"model_name": "j_nothing"},
    {},
    [],
    "text",
    None,
)
ODD_OBJECTS: tuple[Any, ...] = (
    {"url": "echo.mar", "model_name": "j_words", "initial_workers": "abc"},
    {"url": "echo.mar", "model_name": "j_bool", "initial_workers": True},
    {"url": "echo.mar", "model_name": "j_float", "initial_workers": 0.5},
    {"url": "echo.mar", "model_name": 5, "initial_workers": 0},
)
SCALE_QUERIES = (
    "/models/probe",
    "/models/probe?min_worker=1&synchronous=true",
    "/models/probe?min_worker=1&max_worker=3&synchronous=true",
    "/models/probe?min_worker=2&max_worker=1",
    "/models/probe?min_worker=2&max_worker=0",
    "/models/probe?max_worker=0",
    "/models/probe?min_worker=-1",
    "/models/probe?max_worker=-1",
    "/models/probe?min_worker=abc&synchronous=true",
    "/models/probe?max_worker=abc&synchronous=true",
    "/models/probe?min_worker=&synchronous=true",
    "/models/probe?min_worker=1&number_gpu=7&timeout=-1&synchronous=true",
    "/models/probe/1.0?min_worker=1&synchronous=true",
    "/models/probe/1.0?min_worker=1&synchronous=TRUE",
    "/models/probe?model_version=1.0&min_worker=1&synchronous=true",
    "/models/probe?model_version=9.9&min_worker=1",
    "/models/probe/9.9?min_worker=1",
    "/models/none?min_worker=1",
    "/models/none?min_worker=2&max_worker=1",
)
LIST_QUERIES = (
    "?limit=3",
    "?limit=3&next_page_token=3",
    "?limit=0",
    "?limit=-1",
    "?limit=abc",
    "?limit=101",
    "?limit=1000000000000",
    "?next_page_token=2",
    "?next_page_token=-1",
    "?next_page_token=abc",
    "?next_page_token=5000",
    "?limit=2&next_page_token=1&nonsense=1",
    "?limit=%2B3",
    "?limit=3.5",
    "?limit=",
)


def management_cases() -> Iterator[Case]:
    """All sequences, one after the other."""
    for query in REGISTER_QUERIES:
        yield _case("POST", f"/models{query}")
    for number, value in enumerate(REGISTER_OBJECTS):
        yield _with_json(f"register object {number}", "/models", value)
    yield _with_json("register object beside a query", "/models?url=missing.mar", REGISTER_OBJECTS[0])
    yield Case(
        "management: register, no JSON",
        "POST",
        "/models",
        "management",
        {"Content-Type": "application/json"},
        b"{",
    )
    yield Case(
        "management: register by form",
        "POST",
        "/models",
        "management",
        {"Content-Type": "application/x-www-form-urlencoded"},
        b"url=echo.mar&model_name=r_form",
    )
    for name in _registered():
        yield _case("GET", f"/models/{name}")
    yield from (_case("GET", f"/models{query}") for query in LIST_QUERIES)
    yield from (_case("PUT", path) for path in SCALE_QUERIES)
    yield _case("POST", "/workflows?url=none.war")
    yield from _versions()
    yield from _ends()


def odd_registrations() -> Iterator[Case]:
    """What TorchServe takes, or fails on, and we refuse; the other way round as well."""
    yield from (_case("POST", f"/models{query}") for query in ODD_QUERIES)
    for number, value in enumerate(ODD_OBJECTS):
        yield _with_json(f"register odd object {number}", "/models", value)
    yield _case("POST", "/models?url=broken.mar&initial_workers=0")
    yield _case("PUT", "/models/broken?min_worker=1&synchronous=true")
    yield Case("management: ping with a model that does not load", "GET", "/ping")


def _registered() -> list[str]:
    queries = [
        query.split("model_name=")[-1].split("&")[0] for query in REGISTER_QUERIES if "model_name=r_" in query
    ]
    objects = [str(value["model_name"]) for value in REGISTER_OBJECTS[:3]]
    return [*dict.fromkeys(queries), *objects, "packed", "folder_model"]


def _versions() -> Iterator[Case]:
    both = "url={}&model_name=twin&initial_workers=1&synchronous=true"
    yield _case("POST", "/models?" + both.format("mlp.mar"))
    yield _case("POST", "/models?" + both.format("mlp_v2.mar"))
    yield _case("POST", "/models?" + both.format("mlp_v2.mar"))
    for path in (
        "/models/twin",
        "/models/twin/all",
        "/models/twin/2.0",
        "/models/twin/ALL",
        "/v1/models/twin",
    ):
        yield _case("GET", path)
    yield _case("PUT", "/models/twin/2.0?min_worker=0&synchronous=true")
    yield _predict("/predictions/twin/2.0")
    yield _predict("/predictions/twin")
    yield _case("GET", "/models/twin/2.0?customized=true")
    yield _case("GET", "/models/probe?customized=true")
    yield _case("GET", "/models/probe/all?customized=true")
    yield _case("GET", "/models/probe?customized=True")
    yield _case("GET", "/models/twin?customized=true")
    for path in (
        "/models/twin/2.0/set-default",
        "/models/twin/7/set-default",
        "/models/none/1.0/set-default",
    ):
        yield _case("PUT", path)
    yield _case("GET", "/models/twin/2.0/set-default")
    yield _predict("/predictions/twin")
    for path in (
        "/models/twin",
        "/models/twin/2.0",
        "/models/twin/7",
        "/models/twin/all",
        "/models/twin/1.0",
    ):
        yield _case("DELETE", path)
    yield _case("GET", "/models/twin/all")
    yield _case("DELETE", "/models/twin?synchronous=false&timeout=1")
    yield _predict("/predictions/twin")
    yield _case("DELETE", "/models/twin")


def _ends() -> Iterator[Case]:
    yield _case("PUT", "/models/probe?min_worker=0&synchronous=true")
    yield _predict("/predictions/probe")
    yield _predict("/predictions/probe/1.0")
    yield _case("GET", "/models/probe?customized=true")
    yield _case("GET", "/v1/models/probe")
    yield Case("management: ping without executors", "GET", "/ping")
    yield _case("PUT", "/models/r_handler?min_worker=1&synchronous=true")
    yield _case("DELETE", "/models/r_handler")
    yield _case("DELETE", "/models/r_zero")
    yield _case("DELETE", "/models/r_zero")
    yield _case("POST", "/models?url=echo.mar&model_name=r_zero&initial_workers=0")


def _case(method: str, path: str) -> Case:
    return Case(f"management: {method} {path}", method, path, "management")


def _with_json(title: str, path: str, value: Any) -> Case:
    body = json.dumps(value).encode()
    return Case(
        f"management: {title}", "POST", path, "management", {"Content-Type": "application/json"}, body
    )


def _predict(path: str) -> Case:
    return Case(
        f"management: then {path}",
        "POST",
        path,
        headers={"Content-Type": "application/json"},
        body=b'{"x": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]}',
    )
