"""Predictions on a connection: their answers, their known heads, their idle times, and what they let go."""

import asyncio
import threading
import weakref
from functools import partial
from typing import Any

import pytest

from torchere.serving.errors import HandlerFailed, QueueFull, Unauthorized, Unavailable
from torchere.serving.frontend.rest import heads, predictions
from torchere.serving.frontend.rest.codec import INLINE_FORM_BYTES, INLINE_MULTIPART_BYTES, body_parameters
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.listener import READ_BYTES
from torchere.serving.types import InferResponse, Parameter, StreamedResponse

HEAD = b"%s %s HTTP/1.1\r\nHost: x\r\n"
CLOSE = b"Connection: close\r\n"


def plain(
    body: bytes, method: bytes = b"POST", path: bytes = b"/predictions/echo", headers: bytes = b""
) -> bytes:
    return HEAD % (method, path) + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, path: bytes = b"/predictions/echo", headers: bytes = b"") -> bytes:
    head = HEAD % (b"POST", path) + headers + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def lines(answer: bytes) -> tuple[bytes, set[bytes], bytes]:
    """Status line, headers without the id, body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return status, {line for line in headers if not line.startswith(b"x-request-id")}, body


def raising(error: Exception):
    async def behave(request):
        raise error

    return behave


def answering(*args, **kwargs):
    async def behave(request):
        return InferResponse(*args, **kwargs)

    return behave


def streaming(*parts: bytes, error: Exception | None = None, status: int = 200, headers=()):
    async def chunks():
        for part in parts:
            yield part
        if error is not None:
            raise error

    async def behave(request):
        return StreamedResponse(InferResponse(b"", (("x-kind", "stream"), *headers), status), chunks())

    return behave


BEHAVIOURS = {
    "an answer": answering(b"body", (("X-Own", "1"), ("content-type", "text/plain"))),
    "nothing": answering(b""),
    "no content": answering(b"dropped", (), 204),
    "a status of the handler's": answering(b"teapot", (), 418),
    "a status that is none": answering(b"", (), 99),
    "a header that can't be sent": answering(b"", (("X-Split", "a\r\nb"),)),
    "a failure": raising(HandlerFailed("went wrong", 413)),
    "no room": raising(QueueFull("full", 7.2)),
    "nobody there": raising(Unavailable("nobody")),
    "a stream": streaming(b"one", b"two"),
    "a stream of nothing": streaming(),
    "a stream without content": streaming(b"HTTP/1.1 200 OK", b"two", status=204),
    "a stream that fails midway": streaming(b"one", error=HandlerFailed("went wrong")),
    "a stream that fails at once": streaming(error=HandlerFailed("went wrong")),
}


@pytest.mark.parametrize("behave", BEHAVIOURS.values(), ids=BEHAVIOURS.keys())
def test_a_body_in_chunks_gets_the_same_answer(planes, talk, behave, caplog):
    planes.data.behave = behave
    direct = lines(talk(plain(b"x", headers=CLOSE)))
    in_chunks = lines(talk(chunked(b"x", headers=CLOSE)))
    assert (direct[0], direct[2]) == (in_chunks[0], in_chunks[2])
    connection = {b"connection: keep-alive", b"connection: close"}
    assert direct[1] - connection == in_chunks[1] - connection
    assert b"connection: close" in direct[1]


@pytest.mark.parametrize(
    "name",
    [
        "X-Request-Id",
        "Pragma",
        "cache-control",
        "EXPIRES",
        "Connection",
        "Content-Length",
        "Transfer-Encoding",
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_handler_sends_no_second_line_of_a_header_that_the_server_sets(planes, talk, name, is_streamed):
    headers = ((name, "forged"), ("x-own", "sent"))
    planes.data.behave = streaming(b"x", headers=headers) if is_streamed else answering(b"x", headers)
    answer = talk(plain(b"", headers=CLOSE))
    assert b"x-own: sent" in answer
    assert b"forged" not in answer


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("send", [plain, chunked])
def test_a_stream_without_content_leaves_the_connection_as_it_was(planes, talk, send, status):
    planes.data.behave = streaming(b"HTTP/1.1 200 OK", b"two", status=status)
    answer = talk(send(b"x"), plain(b"", path=b"/ping", headers=CLOSE))
    head, rest = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"transfer-encoding" not in head
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("send", [plain, chunked])
@pytest.mark.parametrize("parts", [(b"one",), (b"one", b"two")])
def test_an_answer_that_resets_content_has_none_and_says_so(planes, talk, send, parts):
    planes.data.behave = streaming(*parts, status=205)
    answer = talk(send(b"x"), plain(b"", path=b"/ping", headers=CLOSE))
    head, rest = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 205 ")
    assert head.lower().count(b"content-length: 0") == 1
    assert b"transfer-encoding" not in head
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_bug_is_a_500_and_a_line_in_the_log(planes, talk, caplog):
    def admit(*args, **kwargs):
        raise ZeroDivisionError("bug")

    planes.data.admit = admit
    status, _, body = lines(talk(plain(b"x")))
    assert status.startswith(b"HTTP/1.1 500")
    assert b"Internal server error" in body
    assert "failed unexpectedly" in caplog.text


def test_the_handler_gets_the_same_from_both(planes, talk):
    headers = CLOSE + b"X-Mixed-Case: v\r\nContent-Type: application/json; charset=utf-8\r\n"
    talk(plain(b"[1]", headers=headers))
    talk(chunked(b"[1]", headers=headers))
    (model, version, direct), (*named, in_chunks) = planes.data.asked
    assert [model, version] == named
    assert direct.parameters == in_chunks.parameters
    framing = {"Content-Length", "Transfer-Encoding"}
    assert [line for line in direct.headers if line[0] not in framing] == [
        line for line in in_chunks.headers if line[0] not in framing
    ]


def test_requests_sent_at_once_are_answered_in_their_order(planes, talk):
    answer = talk(plain(b"one"), chunked(b"two"), plain(b"three"), plain(b"four", headers=CLOSE))
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"one", b"two", b"three", b"four"]


def test_a_body_in_pieces_is_put_together(planes):
    async def main() -> bytes:
        async with planes.connected() as (_, reader, writer):
            for piece in (plain(b"abcdef", headers=CLOSE)[:-3], b"d", b"ef"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            return await asyncio.wait_for(reader.read(), 20)

    assert lines(asyncio.run(main()))[2] == b"abcdef"


LONG = bytes(range(256)) * (READ_BYTES // 256 + 1)


def test_a_long_body_is_taken_in_as_well(planes):
    answers = exchange(planes, plain(LONG), plain(LONG), plain(b"x", headers=CLOSE))
    assert [lines(answer)[2] for answer in answers] == [LONG, LONG, b"x", b""]


def test_a_long_body_without_a_key_is_refused_before_it_is_kept(planes, talk):
    status, _, body = lines(talk(plain(LONG, headers=CLOSE), keys=planes.keys, max_request_bytes=len(LONG)))
    assert status.startswith(b"HTTP/1.1 400")
    assert b"InvalidKeyException" in body
    assert not planes.data.asked


def test_a_long_body_is_not_held_twice_while_the_handler_works(planes, held):
    async def main() -> tuple:
        planes.data.behave = held
        async with planes.connected(max_request_bytes=len(LONG)) as (server, _, writer):
            writer.write(plain(LONG))
            await asyncio.wait_for(held.arrived.wait(), 20)
            (connection,) = server.listener.connections
            return connection.exchange.body

    assert asyncio.run(main()) is None


def test_a_body_that_is_too_long_is_refused_however_often_its_head_comes(planes):
    for _ in range(2):
        first, end = exchange(planes, plain(b"x" * 101), max_request_bytes=100)
        assert (first.split(b" ")[1], end) == (b"413", b"")
    assert not planes.data.asked


def test_an_idle_connection_keeps_nothing_of_the_request_before(planes):
    kept = []

    class Target:
        """The version that a request was admitted to."""

    def admit(request, model, version):
        target = Target()
        kept.append(weakref.ref(target))
        asyncio.get_running_loop().call_soon(request.finish, InferResponse(b"last"))
        return target

    async def main() -> tuple[object, object]:
        planes.data.admit = admit
        async with planes.connected() as (server, reader, writer):
            writer.write(plain(b"x"))
            await asyncio.wait_for(reader.readuntil(b"last"), 20)
            (connection,) = server.listener.connections
            return kept[0](), connection.exchange.parameters

    assert asyncio.run(main()) == (None, ())


def test_the_marks_of_a_request_are_in_order(planes, talk):
    requests = []
    admit = planes.data.admit

    def noting(request, model, version):
        requests.append(request)
        return admit(request, model, version)

    planes.data.admit = noting
    talk(plain(b"x", headers=CLOSE))
    (request,) = requests
    read_s = request.read_s or request.started_s  # 0: with the head
    assert 0 < request.started_s <= read_s <= request.answered_s <= request.sending_s
    assert request.counted


def test_a_stream_whose_client_left_is_given_up(planes, endless):
    async def main() -> None:
        planes.data.behave = endless
        async with planes.connected() as (_, reader, writer):
            writer.write(plain(b"x"))
            await asyncio.wait_for(reader.readuntil(b"first"), 20)
            writer.close()
            await asyncio.wait_for(endless.ended.wait(), 20)

    asyncio.run(main())
    assert endless.ended.is_set()


def exchange(planes, *messages: bytes, before=None, **settings):
    """The answers to messages that are sent one after the other on one connection, which ends by itself."""

    async def main() -> list[bytes]:
        async with planes.connected(**{"max_request_bytes": 100_000, **settings}) as (server, reader, writer):
            answers: list[bytes] = []
            for message in messages:
                if before is not None:
                    before(server, len(answers))
                writer.write(message)
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                answers.append(head + await reader.readexactly(length))
            answers.append(await asyncio.wait_for(reader.read(), 20))
            return answers

    return asyncio.run(main())


@pytest.fixture
def parsed(monkeypatch):
    """The heads that went through the parser."""
    seen = []
    read = heads.Heads.read

    def counted(self, reader):
        seen.append(1)
        return read(self, reader)

    monkeypatch.setattr(heads.Heads, "read", counted)
    return seen


def test_a_head_that_comes_again_is_not_parsed_again_and_nobody_can_tell(planes, parsed):
    headers = b"X-Mixed-Case: v\r\nContent-Type: text/plain\r\n"
    first, second, _, end = exchange(
        planes, plain(b"one", headers=headers), plain(b"two", headers=headers), plain(b"x", headers=CLOSE)
    )
    assert len(parsed) == 2  # the first, and the last
    assert lines(first)[:2] == lines(second)[:2]
    assert [lines(first)[2], lines(second)[2], end] == [b"one", b"two", b""]
    before, after = planes.data.asked[0][2], planes.data.asked[1][2]
    assert before.headers == after.headers
    assert before.request_id != after.request_id
    assert b"x-request-id: " + after.request_id.encode() in second


def test_a_known_head_does_not_hide_what_else_a_message_is(planes, parsed):
    known = plain(b"one")
    answers = exchange(
        planes, known, known, chunked(b"two"), known, plain(b"three"), known, plain(b"", headers=CLOSE)
    )
    assert [lines(answer)[2] for answer in answers[:-1]] == [
        b"one",
        b"one",
        b"two",
        b"one",
        b"three",
        b"one",
        b"",
    ]


def test_requests_with_a_known_head_that_are_sent_at_once_keep_their_order(planes, talk):
    known = plain(b"one")
    answer = talk(known, known, plain(b"two"), known, plain(b"x", headers=CLOSE))
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"one", b"one", b"two", b"one", b"x"]


@pytest.mark.parametrize("slow", [plain(b"slow"), chunked(b"slow")], ids=["a length", "chunks"])
def test_a_request_with_a_known_head_waits_for_the_answer_before(planes, held, monkeypatch, slow):
    async def main() -> bytes:
        came = asyncio.Event()

        def updated(connection, size):
            update(connection, size)
            if held.arrived.is_set():
                came.set()

        update = Connection.buffer_updated
        monkeypatch.setattr(Connection, "buffer_updated", updated)
        async with planes.connected() as (_, reader, writer):
            writer.write(plain(b"fast"))
            await reader.readuntil(b"fast")
            planes.data.behave = held
            writer.write(slow)
            await asyncio.wait_for(held.arrived.wait(), 20)
            writer.write(plain(b"fast"))
            await asyncio.wait_for(came.wait(), 20)
            held.go_on.set()
            return await asyncio.wait_for(reader.readuntil(b"fast"), 20)

    assert b"slow" in asyncio.run(main())


def test_a_known_head_ends_the_connection_of_a_server_that_drains(planes):
    def before(server, answered):
        if answered == 2:
            server.listener.draining = True

    answers = exchange(planes, plain(b"one"), plain(b"one"), plain(b"one"), before=before)
    assert [b"connection: close" in answer for answer in answers] == [False, False, True, False]


@pytest.mark.parametrize(("keyed", "caller"), [(True, "inference client"), (False, "127.0.0.1")])
def test_the_identity_names_the_caller_and_without_keys_the_address_does(planes, keyed, caller):
    key = b"Authorization: Bearer inference\r\n"
    messages = [plain(b"x", headers=key), plain(b"x", headers=key), plain(b"x", headers=key + CLOSE)]
    exchange(planes, *messages, keys=planes.keys if keyed else None)
    assert planes.data.callers == [caller] * 3


@pytest.mark.parametrize("is_keyed", [True, False])
@pytest.mark.parametrize("path", [b"/predictions/echo", b"/v2/models/echo/infer"])
def test_a_handler_gets_no_key_of_the_server(planes, path, is_keyed):
    """Without tokens `Authorization` holds no key of the server, and handlers get it."""
    line = b"AUTHORIZATION: Bearer inference\r\nauthorization: Bearer inference\r\n"
    messages = [plain(b"x", path=path, headers=line), plain(b"x", path=path, headers=line + CLOSE)]
    exchange(planes, *messages, keys=planes.keys if is_keyed else None)
    names = [[name.lower() for name, _ in request.headers] for *_, request in planes.data.asked]
    assert [found.count("authorization") for found in names] == [0 if is_keyed else 2] * 2


def test_a_known_head_does_not_outlive_its_key(planes):
    def refuse(role, authorization, subjects):
        raise Unauthorized("expired")

    def before(server, answered):
        if answered == 2:
            planes.keys.authorize = refuse

    keyed = plain(b"x", headers=b"Authorization: Bearer inference\r\n")
    *answers, _ = exchange(planes, keyed, keyed, keyed, before=before, keys=planes.keys)
    assert [int(answer.split(b" ")[1]) for answer in answers] == [200, 200, 400]
    assert len(planes.data.asked) == 2
    assert 'reason="auth",} 1.0' in planes.metrics.exposition({"torchere_requests_rejected_total"})


@pytest.mark.parametrize("messages", [[plain(b"one")], [plain(b"one")] * 3, [plain(b"one"), chunked(b"two")]])
def test_an_idle_connection_is_closed_after_a_while(planes, messages):
    *answers, end = exchange(planes, *messages, keep_alive_s=0.05)
    assert len(answers) == len(messages)
    assert end == b""


def test_a_request_that_takes_longer_than_a_connection_may_be_idle_is_answered(planes):
    async def behave(request):
        await asyncio.sleep(0.2)
        return InferResponse(b"late")

    planes.data.behave = behave
    answers = exchange(planes, plain(b"one"), plain(b"one"), keep_alive_s=0.05)
    assert [lines(answer)[2] for answer in answers] == [b"late", b"late", b""]


def test_a_request_behind_an_answer_of_asgi_may_take_longer_than_a_connection_may_be_idle(planes):
    async def behave(request):
        await asyncio.sleep(0.2)
        return InferResponse(b"late")

    planes.data.behave = behave
    ping = plain(b"", method=b"GET", path=b"/ping")
    for message in (plain(b"one"), chunked(b"one")):  # the second time its head is known
        answers = exchange(planes, message, ping, message, keep_alive_s=0.05)
        assert [lines(answer)[2] == b"late" for answer in answers] == [True, False, True, False]


FORM = b"Content-Type: Application/X-WWW-Form-Urlencoded; charset=utf-8\r\n"


def test_a_long_form_is_read_off_the_loop(planes, talk, monkeypatch):
    threads = []

    def noting(*args, **how):
        threads.append(threading.current_thread())
        return body_parameters(*args, **how)

    monkeypatch.setattr(predictions, "body_parameters", noting)
    short, long = b"a=%41", b"a=" + b"%41" * INLINE_FORM_BYTES
    answer = talk(plain(short, headers=FORM), plain(long, headers=FORM + CLOSE), max_request_bytes=100_000)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert [request.parameters[0].value for _, _, request in planes.data.asked] == [
        b"A",
        b"A" * INLINE_FORM_BYTES,
    ]
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


MULTIPART = b"Content-Type: multipart/form-data; boundary=b\r\n"
PART = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n%b\r\n--b--'
PARTS = b'--b\r\nContent-Disposition: form-data; name="a"%b\r\n\r\n1\r\n'  # any number, and then `--b--`


@pytest.mark.parametrize(
    "long",
    [
        PART % bytes(INLINE_MULTIPART_BYTES),
        PARTS % (b"\r\na: b" * 10) * 100 + b"--b--",
        PARTS % (b";a=b" * 20) * 100 + b"--b--",
    ],
    ids=["bytes", "lines", "options"],
)
def test_a_multipart_body_that_takes_long_is_read_off_the_loop(planes, talk, monkeypatch, long):
    threads = []

    def noting(*args, **how):
        threads.append(threading.current_thread())
        return body_parameters(*args, **how)

    monkeypatch.setattr(predictions, "body_parameters", noting)
    messages = [plain(body, headers=MULTIPART + last) for body, last in ((PART % b"1", b""), (long, CLOSE))]
    assert talk(*messages, max_request_bytes=100_000).count(b"HTTP/1.1 200 OK") == 2
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize(
    "path", [b"/predictions/missing", b"/invocations?model_name=missing", b"/v2/models/x/infer"]
)
def test_a_long_form_for_an_unknown_model_is_not_decoded(planes, talk, monkeypatch, path):
    decoded = []
    monkeypatch.setattr(predictions, "body_parameters", lambda *args, **how: decoded.append(args))
    message = plain(b"a=" + b"%" * INLINE_FORM_BYTES, path=path, headers=FORM + CLOSE)
    answer = talk(message, max_request_bytes=100_000, open_inference_protocol=False)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert not decoded


def test_a_long_form_whose_client_leaves_before_its_turn_is_not_decoded(planes, monkeypatch):
    decoded, go_on = [], threading.Event()

    def waiting(content_type, body, **how):
        decoded.append(bytes(body[:3]))
        go_on.wait(20)
        return body_parameters(content_type, body, **how)

    monkeypatch.setattr(predictions, "body_parameters", waiting)

    async def main():
        async with planes.serving(max_request_bytes=100_000) as server:
            clients = []
            for name in b"abc":
                reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
                writer.write(plain(b"%c=" % name + b"%" * INLINE_FORM_BYTES, headers=FORM))
                clients.append((reader, writer))
                while server.listener.budgets.held_bytes < len(clients) * INLINE_FORM_BYTES:
                    await asyncio.sleep(0)
            clients[1][1].transport.abort()
            while len(server.listener.connections) == 3:
                await asyncio.sleep(0)
            go_on.set()
            for reader, _ in (clients[0], clients[2]):
                assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 200")
            assert decoded == [b"a=%", b"c=%"]
            for _, writer in clients:
                writer.transport.abort()

    asyncio.run(main())


@pytest.mark.parametrize("size", [10, INLINE_FORM_BYTES])
@pytest.mark.parametrize("send", [plain, chunked])
@pytest.mark.parametrize(
    "path",
    [
        *(b"/v1/models/echo:predict", b"/v1/models/echo:explain"),
        *(b"/v2/models/echo/infer", b"/v2/models/echo/explain"),
    ],
)
def test_what_curl_sends_to_the_paths_of_kserve_is_json(planes, talk, path, send, size):
    body = b'{"instances": ["%b"]}' % (b"a+b&c=%41" * size)
    talk(send(body, path=path, headers=FORM + CLOSE), max_request_bytes=1_000_000)
    assert planes.data.asked[0][2].parameters == (Parameter("body", body, "application/json"),)


@pytest.mark.parametrize("send", [plain, chunked])
def test_a_header_for_other_origins_that_the_handler_sets_is_the_only_one(planes, talk, monkeypatch, send):
    with_cors = partial(planes.services, cors_allowed_origin="*", cors_allowed_methods="GET, POST")
    monkeypatch.setattr(planes, "services", with_cors)
    planes.data.behave = answering(b"", (("Access-Control-Allow-Origin", "https://a.example"),))
    _, headers, _ = lines(talk(send(b"x", headers=CLOSE)))
    assert {line for line in headers if line.startswith(b"access-control")} == {
        b"access-control-allow-origin: https://a.example",
        b"access-control-allow-methods: GET, POST",
    }


@pytest.mark.parametrize(
    "behave",
    [answering(b"ok"), streaming(b"a", b"b"), raising(HandlerFailed("no", 500))],
    ids=["whole", "streamed", "failed"],
)
def test_server_timing_tells_the_stages_of_a_prediction_when_it_is_on(planes, talk, behave):
    planes.data.behave = behave
    _, without, _ = lines(talk(plain(b"x", headers=CLOSE)))
    _, headers, _ = lines(talk(plain(b"x", headers=CLOSE), server_timing=True))
    (more,) = headers - without
    name, _, value = more.partition(b": ")
    metrics = dict(metric.split(b";dur=") for metric in value.split(b", "))
    assert name == b"server-timing"
    assert [*metrics][-1] == b"total"
    assert float(metrics[b"total"]) > 0


def test_other_answers_have_no_server_timing(talk):
    assert b"server-timing" not in talk(
        b"GET /ping HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", server_timing=True
    )


def test_a_prediction_is_a_span_named_by_method_and_route(planes, talk):
    class Begun:
        def begin(self, prediction):
            seen.append(prediction.operation())

        def end(self, *_):
            pass

    seen: list[Any] = []
    planes.metrics.tracing = Begun()
    talk(plain(b"x", headers=CLOSE))
    (operation,) = seen
    assert operation.name == "POST /predictions/{model}"
    assert operation.attributes | {"client.address": ""} == {
        "http.request.method": "POST",
        "http.route": "/predictions/{model}",
        "url.path": "/predictions/echo",
        "url.scheme": "http",
        "network.protocol.name": "http",
        "network.protocol.version": "1.1",
        "client.address": "",
    }
