"""Answers of a real server agree with the OpenAPI documents it serves, for requests made from these."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if sys.version_info < (3, 11):
    pytest.skip("schemathesis needs Python 3.11", allow_module_level=True)
schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402 - behind the skip
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 30  # for each operation
AGREES = [
    *(status_code_conformance, content_type_conformance),
    *(response_headers_conformance, response_schema_conformance),
]
HANDLER = """
class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return ["ok"] * len(data)
"""
# Hypothesis counts one reference less on Python 3.14, and warns of a generator of its own.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random`:Warning")
WORKERS = {"min_worker", "max_worker", "initial_workers"}  # each is a process
KNOWN = {"model_name": "echo", "model_version": "1.0"}


@pytest.fixture(scope="module")
def server(start_server: Any, pack: Any) -> Any:
    """A server with a model, every API, and no tokens."""
    pack("echo", {"h.py": HANDLER}, handler="h.py")
    running = start_server(
        *("--disable-token-auth", "--enable-model-api", "--models", "echo.mar"),
        properties="open_inference_protocol=true\n",
    )
    while running.call("GET", "/readyz").status != 200:
        continue
    return running


def document_of(server: Any, api: str) -> Any:
    base = f"http://{server.rest[api]}"
    schema = schemathesis.openapi.from_dict(requests.options(f"{base}/", timeout=20).json())
    schema.config.update(base_url=base)
    return schema


def called(server: Any, operation: Any, statuses: Counter[int]) -> None:
    """Call one operation with examples, for any model and for one that exists, and check the answers."""

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(), st.booleans())
    def call(case: Any, is_known: bool) -> None:
        if is_known:
            case.path_parameters |= {
                name: KNOWN[name] for name in case.path_parameters or {} if name in KNOWN
            }
        for name in WORKERS & (case.query or {}).keys():
            case.query[name] = min(case.query[name], 2)
        answer = case.call()
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=AGREES)
        if answer.status_code not in (503, 504):  # documented: a scaled-down model, for example
            case.validate_response(answer, checks=[not_a_server_error])

    call()
    server.register("echo.mar", initial_workers=1, synchronous="true")  # if the operation has removed it


@pytest.mark.parametrize("api", ["inference", "management", "metrics"])
def test_answers_are_as_described(server: Any, api: str) -> None:
    statuses: Counter[int] = Counter()
    for result in document_of(server, api).get_all_operations():
        called(server, result.ok(), statuses)
    assert statuses[200]
    assert server.call("GET", "/ping").status == 200


@pytest.mark.parametrize("api", ["inference", "management"])
def test_every_error_is_described_with_its_form(server: Any, api: str) -> None:
    for path, methods in document_of(server, api).raw_schema["paths"].items():
        for operation in methods.values():
            for status, answer in operation["responses"].items():
                assert int(status) < 400 or "schema" in answer["content"]["application/json"], (path, status)
