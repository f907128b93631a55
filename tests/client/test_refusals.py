import asyncio
import copy
import json
import pickle

import httpx
import pytest
from scripted_transport import Caller, Server

from torchere.client import AsyncClient, Client
from torchere.client import errors as e
from torchere.client.exchange import Answer, refusal


def answer(status: int, body: object, **headers: str) -> Answer:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(text, {name.replace("_", "-"): value for name, value in headers.items()}, status)


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (400, "BadRequestException", e.InvalidRequest),
        (400, "InvalidKeyException", e.Unauthorized),
        (400, "InternalServerException", e.InvalidRequest),
        (404, "ModelNotFoundException", e.NotFound),
        (405, "MethodNotAllowedException", e.InvalidRequest),
        (409, "ConflictStatusException", e.Conflict),
        (413, "", e.InvalidRequest),
        (429, "", e.Unavailable),
        (500, "InternalServerException", e.ModelFailed),
        (503, "ServiceUnavailableException", e.Unavailable),
        (503, "InternalServerException", e.ModelFailed),
        (504, "RequestTimeoutException", e.TooLate),
        (507, "InternalServerException", e.ModelFailed),
    ],
)
def test_every_kind_of_answer_has_its_class(status: int, kind: str, expected: type[e.AnswerError]) -> None:
    made = refusal(answer(status, {"code": status, "type": kind, "message": "why"}))
    assert type(made) is expected
    assert (made.status, made.kind, made.message) == (status, kind, "why")


@pytest.mark.parametrize(
    ("body", "by_server"),
    [
        (b"busy", False),
        ({"error": "no database"}, False),
        ({"type": "error", "why": "no database"}, False),
        ({"code": 429, "type": "InternalServerException", "message": "busy"}, False),
        ({"error": "busy", "type": "InternalServerException"}, False),
        ({"type": "ServiceUnavailableException"}, True),
        ({"error": "full", "type": "ServiceUnavailableException"}, True),
        ({"error": "slower", "type": "TooManyRequestsException"}, True),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_a_status_of_the_handlers_is_not_taken_for_the_servers(
    status: int, body: object, by_server: bool
) -> None:
    expected = e.Unavailable if by_server else e.ModelFailed
    assert type(refusal(answer(status, body, x_request_id="1"))) is expected


@pytest.mark.parametrize("body", [b"busy", {"error": "no server"}])
def test_an_answer_without_an_id_is_a_proxys(body: object) -> None:
    assert type(refusal(answer(503, body))) is e.Unavailable


def test_another_status_of_the_handlers_means_what_it_says() -> None:
    assert type(refusal(answer(404, b"no such row", x_request_id="1"))) is e.NotFound


def test_an_error_says_all_that_the_server_said() -> None:
    body = {"code": 500, "type": "X", "message": "it broke", "detail": "exit code 3"}
    made = refusal(answer(500, body, x_request_id="abc"))
    assert str(made) == "500 X: it broke (exit code 3) [request abc]"


def test_the_open_inference_protocols_errors_are_read() -> None:
    assert refusal(answer(400, {"error": "inputs[0]: found ..."})).message == "inputs[0]: found ..."


def test_retry_after_is_in_seconds() -> None:
    assert refusal(answer(503, {}, retry_after="7")).retry_after_s == 7.0
    assert refusal(answer(503, {}, retry_after="Fri, 31 Dec 1999 23:59:59 GMT")).retry_after_s is None
    assert refusal(answer(503, {}, retry_after="²")).retry_after_s is None
    assert refusal(answer(503, {}, retry_after="1" * 10)).retry_after_s is None
    assert refusal(answer(503, {})).retry_after_s is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>Bad gateway</html>", "<html>Bad gateway</html>"),
        (b"", "The server gave no reason."),
        (b"[1]", "[1]"),
        (b"[" * 100_000, "[" * 500),
    ],
)
def test_an_error_that_is_no_json_object_is_shown_as_it_is(body: bytes, message: str) -> None:
    assert refusal(answer(502, body)).message == message


def test_a_request_that_is_too_large_is_called_so_where_nothing_else_is_said() -> None:
    assert refusal(answer(413, b"")).message == "The request is too large."


def test_too_late_is_caught_as_a_deadline_too() -> None:
    with pytest.raises(e.DeadlineExceeded):
        raise refusal(answer(504, {"message": "late"}))


def test_every_error_comes_whole_from_another_process() -> None:
    errors: list[e.ClientError] = [e.ConnectionFailed("no connection", refused=True)]
    for made in vars(e).values():
        if isinstance(made, type) and issubclass(made, e.AnswerError):
            errors.append(made("why", 500, kind="X", detail="y", request_id="abc", retry_after_s=7.0))
        elif isinstance(made, type) and issubclass(made, e.ClientError):
            errors.append(made("why"))
    for error in errors:
        for found in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(found) is type(error)
            assert (str(found), vars(found)) == (str(error), vars(error))
    assert len(errors) > 12


@pytest.mark.parametrize(
    "headers",
    [{"x-a": "s3crét"}, {"x-a": "s3cret\n"}, {"x-a": " s3cret"}, {"x-ä": "1"}, {"x a": "1"}, {"": "1"}],
)
def test_a_header_that_http_cannot_carry_is_named_without_its_value(
    call: Caller, headers: dict[str, str]
) -> None:
    server = Server(httpx.Response(200))
    with pytest.raises(e.ClientError, match=f"the header '{next(iter(headers))}': ") as caught:
        call(server, lambda client: client.predict("net", headers=headers))
    assert type(caught.value) is e.ClientError
    assert "s3cr" not in str(caught.value)
    with pytest.raises(ValueError, match="the header"):
        call(server, lambda client: client.predict("net"), headers=headers)
    assert not server.requests


def test_a_closed_client_says_so() -> None:
    blocking, awaited = Client(), AsyncClient()
    blocking.close()
    asyncio.run(awaited.close())
    with pytest.raises(e.ClientError, match="the client is closed"):
        blocking.predict("net")
    with pytest.raises(e.ClientError, match="the client is closed"):
        next(blocking.predict_stream("net"))
    with pytest.raises(e.ClientError, match="the client is closed"):
        asyncio.run(awaited.predict("net"))
