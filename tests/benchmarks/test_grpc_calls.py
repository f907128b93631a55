"""The load client that gives each gRPC call another deadline, against gRPC's own server."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc
import pytest
from harness.grpc_calls import CallFailed, Connection, first_block, next_block, run, timeout_of
from hpack import Decoder

METHOD = "/test.Service/Call"
CALLS = 10


class Server(grpc.GenericRpcHandler):
    """Answers `answer`, and keeps what it was asked; `enough` is set after `CALLS`."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.asked: list[tuple[bytes, float, dict[str, str]]] = []
        self.enough = threading.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._answered)

    def _answered(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        headers = {key: str(value) for key, value in context.invocation_metadata()}
        self.asked.append((request, context.time_remaining(), headers))
        if len(self.asked) >= CALLS:
            self.enough.set()
        if not self.answer:
            context.abort(grpc.StatusCode.INTERNAL, "no answer")
        return self.answer


@contextmanager
def serving(answer: bytes) -> Iterator[tuple[str, Server]]:
    handler = Server(answer)
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler
    finally:
        server.stop(None).wait()


def load(connections: list[Connection], enough: threading.Event) -> dict[str, Any]:
    """Run in short phases until the server has seen enough."""
    while True:
        found = run(connections, 0.2)
        if enough.is_set():
            return found


def test_each_call_is_answered_and_has_a_deadline_of_its_own():
    with serving(b"answer") as (address, server), ExitStack() as stack:
        made = (Connection(address, METHOD, b"question", 2, 6) for _ in range(2))
        connections = [stack.enter_context(closing(one)) for one in made]
        figures = load(connections, server.enough)
    assert figures["requests"] > 0
    assert figures["latency_ms"]["50"] <= figures["latency_ms"]["99"]
    assert {request for request, _, _ in server.asked} == {b"question"}
    assert all(20 < remaining_s < 100 for _, remaining_s, _ in server.asked)


def test_a_short_answer_is_a_failure():
    with serving(b"answer") as (address, _):
        connection = Connection(address, METHOD, b"question", 1, 7)
        wanted = "found an answer of 11 bytes, expected at least 12"
        with closing(connection), pytest.raises(CallFailed, match=wanted):
            run([connection], 20)


def test_a_failed_call_is_a_failure():
    with serving(b"") as (address, _):
        connection = Connection(address, METHOD, b"question", 1, 1)
        with closing(connection), pytest.raises(CallFailed, match="found an answer of 0 bytes"):
            run([connection], 20)


def test_the_header_blocks_say_the_same_but_for_the_deadline():
    decoder = Decoder()
    first = dict(decoder.decode(first_block(METHOD, "host:1", timeout_of(1))))
    later = [dict(decoder.decode(next_block(timeout_of(number)))) for number in (2, 3)]
    assert first == {
        ":method": "POST",
        ":scheme": "http",
        ":path": METHOD,
        ":authority": "host:1",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-timeout": "30000001u",
    }
    assert later == [{**first, "grpc-timeout": f"3000000{number}u"} for number in (2, 3)]


def test_deadlines_have_the_eight_digits_that_grpc_allows():
    assert {len(timeout_of(number)) for number in (0, 1, 10**7, 10**9)} == {9}
    assert timeout_of(1) != timeout_of(2)


def test_a_message_of_more_than_a_frame_is_refused():
    with pytest.raises(ValueError, match="16385"):
        Connection("127.0.0.1:1", METHOD, b"x" * 16_385, 1, 1)
