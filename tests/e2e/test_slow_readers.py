"""Long streamed answers and the clients that read them: as fast as they can, steadily, or hardly at all."""

import http.client
import re
import socket
import threading
import time
from typing import Any

import grpc
import psutil
import pytest

from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest

PART_BYTES = 2**20
LONG = 300  # parts: much more than may lie unread
LONGER_THAN_UNREAD = 120
PATIENCE_S = 15.0
FORM = "application/x-www-form-urlencoded"
# Headers, by how a request that has them is answered.
WAYS = {"short way": "", "ASGI": "accept-encoding: gzip;q=0\r\n"}
HELD_BYTES = 150 * 2**20  # of the server's memory for one slow client at most, and all around it
STREAMING = f"""
from ts.handler_utils.utils import send_intermediate_predict_response
class Handler:
    def initialize(self, context): pass
    def handle(self, data, context):
        for _ in range(int(bytes(data[0]["data"]))):
            send_intermediate_predict_response([bytes({PART_BYTES})], context.request_ids, "", 200, context)
        return ["end"]
"""
MODELS = ("thread", "process")
BY_MODEL = pytest.mark.parametrize("model", MODELS)
TOO_SLOW = "The answer was given up: it was read too slowly."


@pytest.fixture(scope="module")
def server(start_server: Any, pack: Any) -> Any:
    """A server whose models stream as many parts as they are told to, each with one executor."""
    for model in MODELS:
        files = {"h.py": STREAMING, "c.yaml": f"isolation: {model}\nminWorkers: 1\nmaxWorkers: 1\n"}
        pack(model, files, handler="h.py", configFile="c.yaml")
    running = start_server("--disable-token-auth", "--models", *(f"{model}.mar" for model in MODELS))
    running.until_ready()
    return running


class Growth:
    """How much more memory a process takes, at most, within the block."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.bytes = 0

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._before)

    def __enter__(self) -> "Growth":
        self._before = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def asked(server: Any, model: str, parts: int, header: str) -> socket.socket:
    """A connection with little room, on which a request is out."""
    host, port = server.rest["inference"].split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    client.settimeout(20)
    client.connect((host, int(port)))
    body = b"data=%d" % parts
    head = f"POST /predictions/{model} HTTP/1.1\r\nhost: x\r\ncontent-type: {FORM}\r\n{header}"
    client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    return client


def streamed(server: Any, model: str, parts: int) -> Any:
    """A gRPC call that streams, on a channel of its own."""
    channel = grpc.insecure_channel(server.grpc["inference"])
    method = channel.unary_stream(
        "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions",
        request_serializer=PredictionsRequest.SerializeToString,
        response_deserializer=PredictionResponse.FromString,
    )
    return method(PredictionsRequest(model_name=model, input={"data": b"%d" % parts}), timeout=PATIENCE_S)


def unread_count(server: Any, model: str) -> int:
    text = server.call("GET", "/metrics", api="metrics").body.decode()
    (found,) = re.findall(
        rf'requests_cancelled_total{{model="{model}",version="1.0",stage="unread".*}} (\d+)', text
    )
    return int(found)


def served(server: Any, model: str) -> bool:
    """Whether a model answers another client."""
    reply = server.call("POST", f"/predictions/{model}", b"data=0", content_type=FORM)
    return bool(reply.body == b"end")


@BY_MODEL
@pytest.mark.parametrize("header", WAYS.values(), ids=WAYS)
def test_a_stream_over_rest_that_is_read_much_too_slowly_is_given_up(
    server: Any, model: str, header: str
) -> None:
    before, until_s = unread_count(server, model), time.monotonic() + PATIENCE_S
    with Growth(server.process.pid) as growth, asked(server, model, LONG, header) as client:
        while unread_count(server, model) == before:
            assert time.monotonic() < until_s, f"it is still read, with {growth.bytes} bytes in the server"
            taken = client.recv(65_536)
            time.sleep(0.05)
        assert served(server, model)
        while piece := client.recv(2**20):  # what was on its way already
            taken = (taken + piece)[-5:]
    assert taken != b"0\r\n\r\n"  # an end would say that this was all
    assert growth.bytes < HELD_BYTES
    assert server.log().count(TOO_SLOW) == server.log().count("lay unread")


@BY_MODEL
def test_a_stream_over_grpc_that_is_read_much_too_slowly_is_given_up(server: Any, model: str) -> None:
    before = unread_count(server, model)
    with Growth(server.process.pid) as growth, pytest.raises(grpc.RpcError) as told:
        for _ in streamed(server, model, LONG):
            if unread_count(server, model) == before:
                time.sleep(0.4)
    assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (told.value.details() or "").startswith(TOO_SLOW)
    assert growth.bytes < HELD_BYTES
    assert unread_count(server, model) == before + 1
    assert served(server, model)


@BY_MODEL
def test_a_client_on_a_network_gets_an_answer_of_any_length(server: Any, model: str) -> None:
    before = unread_count(server, model)
    client = http.client.HTTPConnection(server.rest["inference"], timeout=20)
    headers = {"content-type": FORM}
    client.request("POST", f"/predictions/{model}", f"data={LONGER_THAN_UNREAD}", headers)
    answer, taken = client.getresponse(), 0
    while piece := answer.read(PART_BYTES):
        taken += len(piece)
        time.sleep(0.01)  # a hundred megabytes a second
    client.close()
    assert taken == LONGER_THAN_UNREAD * PART_BYTES + len(b"end")
    assert unread_count(server, model) == before


@BY_MODEL
def test_a_call_that_is_cancelled_sets_its_executor_free(server: Any, model: str) -> None:
    call = streamed(server, model, LONG)
    next(iter(call))
    call.cancel()
    before_s = time.monotonic()
    assert served(server, model)
    assert time.monotonic() - before_s < 1.5


def test_all_that_was_accepted_was_answered_once(server: Any) -> None:
    assert server.stop() == 0
    ((accepted, answered),) = re.findall(r"(\d+) predictions accepted, (\d+) answered", server.log())
    assert accepted == answered
    assert "Traceback" not in server.log()
