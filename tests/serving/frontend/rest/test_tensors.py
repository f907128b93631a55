"""Requests of the Open Inference Protocol get one answer, in one body or in chunks."""

import json
from dataclasses import replace

import pytest

from torchere.archiver.signature import Signature, TensorSpec
from torchere.serving.errors import HandlerFailed, QueueFull
from torchere.serving.types import InferResponse, StreamedResponse

SIGNATURE = Signature((TensorSpec("x", "INT8", (-1,)),), (TensorSpec("y", "INT8", (-1,)),))
PATH = b"/v2/models/echo/infer"
X = {"name": "x", "shape": [2], "datatype": "INT8", "data": [1, 2]}
TENSORS = json.dumps({"inputs": [X], "id": "7"}).encode()
BINARY_HEAD = json.dumps(
    {"inputs": [{"name": "x", "shape": [2], "datatype": "INT8", "parameters": {"binary_data_size": 2}}]}
).encode()
BINARY_LENGTH = b"Inference-Header-Content-Length: %d\r\n" % len(BINARY_HEAD)


@pytest.fixture(autouse=True)
def with_signature(planes):
    """The model says which tensors it takes."""
    planes.data.known = replace(planes.data.known, signature=SIGNATURE)


def message(body: bytes, path: bytes = PATH, headers: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b" % (path, headers)
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, path: bytes = PATH, headers: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b" % (path, headers)
    return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def shown(answer: bytes) -> tuple[bytes, set[bytes], bytes]:
    """Status line, headers without the id, body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return status, {line for line in headers if not line.startswith(b"x-request-id")}, body


def answering(*args, **kwargs):
    async def behave(request):
        return InferResponse(*args, **kwargs)

    return behave


def raising(error: Exception):
    async def behave(request):
        raise error

    return behave


def raising_now(*args, **kwargs):
    raise ZeroDivisionError("bug")


async def streaming(request):
    async def chunks():
        yield b"part"

    return StreamedResponse(InferResponse(b""), chunks())


BEHAVIOURS = {
    "an answer": answering(b"{}", (("content-type", "application/json"), ("X-Own", "1"))),
    "a refusal of the handler's": answering(b'{"error": "not so"}', (), 422),
    "a 503 of the handler's": answering(b"Prediction failed", (), 503),
    "a status that is none": answering(b"", (), 99),
    "a failure": raising(HandlerFailed("Prediction failed", 503)),
    "no room": raising(QueueFull("full", 7.2)),
    "a stream": streaming,
}


@pytest.mark.parametrize("behave", BEHAVIOURS.values(), ids=BEHAVIOURS.keys())
def test_a_body_in_chunks_gets_the_same_answer(planes, talk, behave):
    planes.data.behave = behave
    direct = shown(talk(message(TENSORS)))
    in_chunks = shown(talk(chunked(TENSORS)))
    assert direct == in_chunks


REQUESTS = {
    "no JSON": message(b"{"),
    "a tensor that the model has not": message(TENSORS.replace(b'"x"', b'"z"')),
    "a shape that is none": message(TENSORS.replace(b"[2]", b"[-2]")),
    "an unknown version": message(TENSORS, b"/v2/models/echo/versions/9/infer"),
    "an unknown model": message(TENSORS, b"/v2/models/nobody/infer"),
    "an unknown model, and no tensors": message(b"[1]", b"/v2/models/nobody/infer"),
    "a time-out that is none": message(TENSORS, headers=b"X-Torchere-Timeout-Ms: soon\r\n"),
    "a priority that is none": message(TENSORS, headers=b"X-Torchere-Priority: high\r\n"),
    "a length beyond the body": message(TENSORS, headers=b"Inference-Header-Content-Length: 9999\r\n"),
    "bytes behind the tensors": message(BINARY_HEAD + b"123", headers=BINARY_LENGTH),
    "a sequence that is none": message(TENSORS.replace(b'"7"', b'"7", "parameters": {"sequence_id": 1.5}')),
}


@pytest.mark.parametrize("sent", REQUESTS.values(), ids=REQUESTS.keys())
def test_a_body_in_chunks_gets_the_same_refusal(planes, talk, sent):
    head, _, body = sent.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    length = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body)
    direct = shown(talk(sent))
    in_chunks = shown(talk(b"\r\n".join([*lines, length]) + body + b"\r\n0\r\n\r\n"))
    assert direct[0].split()[1][:1] == b"4"
    assert direct == in_chunks
    assert not planes.data.asked


def test_what_comes_behind_a_refusal_is_not_run(planes, talk):
    refused = message(b"{").replace(b"Connection: close\r\n", b"")
    assert talk(refused, message(TENSORS)).count(b"HTTP/1.1") == 1
    assert not planes.data.asked


def test_a_bug_is_told_in_the_words_of_the_protocol(planes, talk, caplog):
    planes.data.facts = raising_now
    direct, in_chunks = shown(talk(message(TENSORS))), shown(talk(chunked(TENSORS)))
    assert direct == in_chunks
    assert direct[0].split()[1] == b"500"
    assert "failed unexpectedly" in caplog.text


@pytest.mark.parametrize(
    "sent",
    [message(TENSORS), message(BINARY_HEAD + b"\1\2", headers=BINARY_LENGTH)],
    ids=["JSON", "binary"],
)
def test_the_executor_gets_the_tensors(planes, talk, sent):
    assert shown(talk(sent))[0] == b"HTTP/1.1 200 OK"
    model, version, asked = planes.data.asked[0]
    assert (model, version) == ("echo", None)
    assert [(p.name, bytes(p.value)) for p in asked.parameters] == [("x", b"\1\2")]
    assert ("explain", "False") in asked.headers


def test_a_body_is_for_the_handler_where_the_archive_has_no_signature(planes, talk):
    planes.data.known = replace(planes.data.known, signature=None)
    assert shown(talk(message(b"what ever")))[2] == b"what ever"
    assert [parameter.value for parameter in planes.data.asked[0][2].parameters] == [b"what ever"]
    planes.data.behave = raising(HandlerFailed("Prediction failed", 503))
    direct, in_chunks = shown(talk(message(b"it"))), shown(talk(chunked(b"it")))
    assert direct == in_chunks
    assert direct[0].split()[1] == b"503"  # the contract's, as the handler is TorchServe's


def test_without_the_protocol_the_path_is_torchserves(planes, talk):
    assert shown(talk(message(TENSORS), open_inference_protocol=False))[2] == TENSORS
