"""Requests of raw tensors whose heads came before: each is what it would be the first time."""

import asyncio
import json
from dataclasses import replace

import pytest

from torchere.archiver.signature import Signature, TensorSpec
from torchere.handlers.tensors.answer import IN_JSON, read_wish
from torchere.serving.frontend.open_inference.json_request import parse_request
from torchere.serving.frontend.open_inference.service import KNOWN_HEAD_BYTES
from torchere.serving.frontend.rest import tensors
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.types import InferResponse, ModelKey

PATH = "/v2/models/echo/infer"
SIGNATURE = Signature((TensorSpec("x", "INT8", (-1,)),), (TensorSpec("y", "INT8", (-1,)),))


def head_of(size=2, **members):
    parameters = {"binary_data_size": size}
    inputs = [{"name": "x", "shape": [size], "datatype": "INT8", "parameters": parameters}]
    return json.dumps({"inputs": inputs, **members}).encode()


def call(raw=b"\1\2", *, path=PATH, head=None, **headers):
    head = head_of() if head is None else head
    return path, head + raw, {"inference-header-content-length": str(len(head)), **headers}


@pytest.fixture
def ask(planes, ask_listener):
    """`ask(calls)`: the calls on one listener; a status, a body, and what the model was asked for each."""
    planes.data.known = replace(planes.data.known, signature=SIGNATURE)

    async def asked(listener, path, body, headers):
        planes.data.asked.clear()
        answer = await ask_listener(listener, "POST", path, body, **headers)
        seen = []
        for model, version, request in planes.data.asked:
            values = [(one.name, bytes(one.value), one.content_type) for one in request.parameters]
            seen.append((model, version, values, request.headers, request.priority, request.deadline_s))
        return answer.status, answer.body, seen

    def listener():
        return listener_of(
            frozenset({"inference"}), planes.data, planes.control, planes.services(max_request_bytes=200_000)
        )

    async def all_of(calls, one):
        shared = listener()
        return [await asked(shared if one else listener(), *each) for each in calls]

    return lambda calls, one=True: asyncio.run(all_of(calls, one))


@pytest.fixture
def parsed(monkeypatch):
    """The lengths of the heads that were parsed."""
    lengths: list[int] = []

    def parse(body, length):
        lengths.append(length)
        return parse_request(body, length)

    monkeypatch.setattr(tensors, "parse_request", parse)
    return lengths


CALLS = {
    "other bytes": call(b"\3\4"),
    "bytes behind": call(b"\1\2\3"),
    "bytes too few": call(b"\1"),
    "an id": call(head=head_of(id="7")),
    "a priority": call(**{"x-torchere-priority": "3"}),
    "no priority": call(**{"x-torchere-priority": "much"}),
    "events": call(accept="text/event-stream"),
    "a version": call(path="/v2/models/echo/versions/1.0/infer"),
    "another version": call(path="/v2/models/echo/versions/9/infer"),
    "another model": call(path="/v2/models/nosuch/infer"),
    "generate": call(path="/v2/models/echo/generate"),
    "a wrong datatype": call(head=head_of().replace(b"INT8", b"FP16")),
    "a sequence": call(head=head_of(parameters={"sequence_id": 5, "sequence_start": True})),
    "binary outputs": call(head=head_of(parameters={"binary_data_output": True})),
    "JSON": (PATH, b'{"inputs": [{"name": "x", "shape": [1], "datatype": "INT8", "data": [5]}]}', {}),
}


def test_a_repeated_request_is_what_it_was_the_first_time(ask, planes):
    calls = [call(), *CALLS.values(), call(), *reversed(CALLS.values()), call()]
    found, wanted = ask(calls), ask(calls, one=False)
    for each, first, (path, body, more) in zip(found, wanted, calls, strict=True):
        assert each == first, (path, body, more)
    assert {status for status, _, _ in found} == {200, 400, 404}


def test_a_repeated_request_is_not_parsed_again(ask, parsed):
    found = ask([call(), call(b"\3\4"), call(accept="text/event-stream"), call(accept="text/event-stream")])
    assert [seen[0][2][0][1] for _, _, seen in found] == [b"\1\2", b"\3\4", b"\1\2", b"\1\2"]
    assert len(parsed) == 2


def test_another_signature_is_checked_anew(ask, planes):
    def change(asked):
        other = Signature((TensorSpec("x", "INT8", (3,)),), SIGNATURE.outputs)
        planes.data.known = replace(planes.data.known, signature=other)

    async def behave(asked):
        change(asked)
        return InferResponse(b"{}")

    planes.data.behave = behave
    (first, _, _), (second, text, seen) = ask([call(), call()])
    assert (first, second, seen) == (200, 400, [])
    assert b"expected [3]" in text


def test_each_model_and_version_has_its_own_translation(ask, planes):
    sizes = {("echo", "1.0"): 2, ("echo", "2.0"): 3, ("other", "1.0"): 4}
    specs = {key: (TensorSpec("x", "INT8", (size,)),) for key, size in sizes.items()}
    signatures = {key: Signature(spec, SIGNATURE.outputs) for key, spec in specs.items()}
    known = planes.data.known
    planes.data.tensors = lambda *key: signatures[key]
    planes.data.facts = lambda *key: replace(known, key=ModelKey(*key), signature=signatures[key])
    planes.data.check_exists = lambda *_: None
    found = ask([call(path="/v2/models/{}/versions/{}/infer".format(*key)) for key in sizes])
    assert [status for status, _, _ in found] == [200, 400, 400]


def test_a_long_head_is_parsed_each_time(ask, parsed):
    long = call(head=head_of() + b" " * KNOWN_HEAD_BYTES)
    assert [status for status, _, _ in ask([long, long])] == [200, 200]
    assert len(parsed) == 2


def test_heads_with_an_id_push_out_no_others(ask, parsed):
    mine = call(head=head_of(id="7"))
    assert [status for status, _, _ in ask([call(), mine, mine, call()])] == [200] * 4
    assert len(parsed) == 3


def test_behind_an_envelope_each_request_is_translated(ask, planes, monkeypatch):
    made = planes.services
    monkeypatch.setattr(planes, "services", lambda **given: made(service_envelope="kservev2", **given))
    planes.data.known = replace(planes.data.known, handler="echo.py")
    found = ask([call(head=head_of(id=one)) for one in ("7", "8")])
    wishes = [read_wish(dict(seen[0][3])[IN_JSON]) for _, _, seen in found]
    assert [wish.id for wish in wishes] == ["7", "8"]  # the handler reads it
