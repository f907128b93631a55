"""Fuzz targets for connections: HTTP/1.1, HTTP/2, header blocks, gRPC messages, and frames of workers."""

from __future__ import annotations

import asyncio
import re
import socket
import zlib
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import h11
import msgspec
from google.protobuf.message import DecodeError
from hpack import Decoder, Encoder, HPACKError

from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import Limits, ServerSettings
from torchere.serving.errors import InvalidRequest, ModelNotFound, NotFound
from torchere.serving.frontend.authorisation import RestPort, Surfaces
from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.grpc.fields import counted
from torchere.serving.frontend.grpc.open_inference_messages import decode_request, tensor_request
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionsRequest
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest
from torchere.serving.frontend.http2.connection import Connection as Http2Connection
from torchere.serving.frontend.http2.frames import PREFACE, ConnectionBroken
from torchere.serving.frontend.http2.header_blocks import HeaderReader, request_head
from torchere.serving.frontend.http2.listener import Listener as Http2Listener
from torchere.serving.frontend.http2.messages import Compressed, MessageFailed, MessageReader
from torchere.serving.frontend.http2.stream import CallListener
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.tensor_request import infer_request
from torchere.serving.frontend.rest.bodies import Chunks
from torchere.serving.frontend.rest.browser_guard import BrowserGuard
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.errors import BadMessage
from torchere.serving.frontend.rest.heads import HeadReader, Heads
from torchere.serving.frontend.rest.listener import Listener
from torchere.serving.frontend.services import Services
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import InferRequest, InferResponse, ModelKey, Parameter
from torchere.serving.workers import messages
from torchere.serving.workers.executor import BatchReport
from torchere.serving.workers.frames import HEADER, FrameReader, FrameSocket


class Standing(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still: no timer decides about an answer when the machine stalls."""

    def time(self) -> float:
        """Return the same moment, always."""
        return 0.0


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The event loop of all targets: starting one for each input would take most of the time."""
    return Standing()


async def turns(count: int = 3) -> None:
    """Let the loop run what is due."""
    for _ in range(count):
        await asyncio.sleep(0)


class Transport(asyncio.Transport):
    """Keeps the bytes that are written, and closes at once."""

    def __init__(self) -> None:
        names = {"peername": ("127.0.0.1", 4321), "sockname": ("127.0.0.1", 80)}
        super().__init__({**names, "socket": SimpleNamespace(setsockopt=lambda *_: None)})
        self.said = bytearray()
        self.closed = False
        self.ended = False  # by `write_eof`; what the client sends is dropped from then on

    def write(self, data: Any) -> None:
        assert not self.ended, "bytes behind the end"
        if not self.closed:
            self.said += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        """Bytes are given to the connection all the same, as those in flight would be."""

    def resume_reading(self) -> None:
        """See `pause_reading`."""

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 16_384, 65_536

    def get_write_buffer_size(self) -> int:
        return 0


def give(connection: Any, data: bytes) -> None:
    """Pass bytes to a connection as the event loop does."""
    while data:
        room = connection.get_buffer(-1)
        size = min(len(room), len(data))
        room[:size] = data[:size]
        connection.buffer_updated(size)
        data = data[size:]


class Echo:
    """A data plane that knows the model `echo`, and answers at once with the value of the first parameter."""

    def admit(self, request: Request, model: str, version: str | None) -> Any:
        if model != "echo":
            raise ModelNotFound.named(model)
        body = bytes(request.parameters[0].value) if request.parameters else b""
        asyncio.get_running_loop().call_soon(request.finish, InferResponse(body))
        return SimpleNamespace(batcher=SimpleNamespace(withdraw=lambda _: None))

    def check_exists(self, model: str, version: str | None) -> None:
        if model != "echo":
            raise ModelNotFound.named(model)

    def refuse_unknown(self, error: NotFound) -> NotFound:
        return error

    def tensors(self, model: str, version: str | None) -> None:
        """The model's tensors, which are not known."""

    def facts(self, model: str, version: str | None) -> ModelFacts:
        self.check_exists(model, version)
        return ModelFacts(
            key=ModelKey("echo", "1.0"),
            versions=("1.0",),
            handler="echo.py",
            manifest_model={},
            signature=None,
            max_batch_size=1,
            numbers=VersionNumbers("echo", "1.0"),
        )


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, the path and the body."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    said = f"{scope['method']} {scope['path']} ".encode("utf-8", "replace") + body
    head = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": said})


@cache
def _listener() -> Listener:
    """One listener for all inputs: its cache of heads is part of what is tested."""
    settings = ServerSettings(limits=Limits(max_request_bytes=2000), open_inference_protocol=True)
    services = Services(settings, Metrics("host"), None, "9.9", budgets=Budgets())
    planes: Any = Echo()
    return Listener(frozenset({"inference"}), services, planes, _app)


async def _dialogue(data: bytes, size: int) -> tuple[bytes, bool]:
    """What a server says to the bytes in pieces of a size, and whether it closed."""
    listener = _listener()
    connection, transport = Connection(listener), Transport()
    connection.connection_made(transport)
    for at in range(0, len(data), size):
        if transport.closed:
            break
        give(connection, data[at : at + size])
        await turns()
    said = -1  # pipelined requests are answered one by one
    while said < len(transport.said) or connection.is_busy():
        said = len(transport.said)
        await turns(9)
        if said == len(transport.said) and connection._is_in_body():
            break  # it waits for the rest of a body
    closed = transport.closed or transport.ended
    transport.close()
    connection.connection_lost(None)
    await turns()
    assert not listener.connections
    assert not any(not task.done() for task in listener.tasks), "a request outlives its connection"
    assert listener.budgets.held_bytes == 0, "the budget is not given back"
    return bytes(transport.said), closed


_RANDOM_LINES = re.compile(rb"(?m)^(x-request-id|date): [^\r]*\r$", re.IGNORECASE)


def http1(data: bytes) -> None:
    """A connection answers the same to the same bytes, in pieces of any size: the first byte."""
    size, data = max(1, data[0] if data else 1), data[1:]
    whole, pieces = (loop().run_until_complete(_dialogue(data, each)) for each in (len(data) + 1, size))
    shown = [_RANDOM_LINES.sub(rb"\1\r", said) for said, _ in (whole, pieces)]
    assert shown[0] == shown[1], "segments change the answers"
    assert whole[1] == pieces[1], "segments decide about closing"
    assert b"HTTP/1.1 500 " not in shown[0], "a bug"


def http1_seeds() -> list[bytes]:
    """Predictions with a length and in chunks, pipelined requests, and the app's paths."""
    post = b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n"
    tensor = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[1]}]}'
    infer = b"POST /v2/models/echo/versions/1.0/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
    zipped = zlib.compressobj(9, wbits=31)
    packed = zipped.compress(tensor) + zipped.flush()
    return [
        b"\x11" + infer % len(tensor) + b"\r\n" + tensor,
        b"\x50" + infer % len(packed) + b"Content-Encoding: gzip\r\nAccept-Encoding: gzip\r\n\r\n" + packed,
        b"\x05" + post + b"Content-Length: 3\r\n\r\nabc" + b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x01"
        + post
        + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n"
        + post
        + b"\r\n",
        b"\x40" + post + b"Expect: 100-continue\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx",
        b"\x10"
        + post
        + b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 7\r\n\r\na=b&c=d",
        b"\x20OPTIONS * HTTP/1.1\r\nHost: [::1]:80\r\n\r\n"
        b"HEAD /x%2e?y=z HTTP/1.0\r\nAuthorization: Bearer k\r\n\r\n",
        b"\xffCONNECT a:1 HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\n\r\n\r\n\r\n"
        b"PUT //a HTTP/1.1\r\nhost:x\r\n\r\n",
    ]


def http1_head(data: bytes) -> None:
    """A head, or BadMessage, and the same one in pieces; h11 finds the same end of its body, or refuses."""
    found = _head_of(data, len(data) + 1)
    assert found == _head_of(data, 7), "segments change the head"
    if found is None or isinstance(found, str):
        return
    end, method, url, length, headers = found
    assert len(headers) <= 8192
    peer = h11.Connection(h11.SERVER)
    try:
        peer.receive_data(data[:end])
        event = peer.next_event()
    except h11.RemoteProtocolError:
        return
    if not isinstance(event, h11.Request) or method == b"CONNECT":
        return
    lines = dict(event.headers)
    expected = -1 if b"transfer-encoding" in lines else int(lines.get(b"content-length", b"0"))
    assert (event.method, event.target, expected) == (method, url, length), "h11 reads another request"


def _head_of(data: bytes, size: int) -> tuple[int, bytes, bytes, int, list[tuple[bytes, bytes]]] | str | None:
    """End, method, target, length and headers of a head; a text if it is refused, None if incomplete."""
    surfaces: Surfaces = frozenset({"inference"})
    guard = BrowserGuard(surfaces, ServerSettings())
    heads = Heads(RestPort(surfaces, authorizes=True), 1000, guard, speaks_tensors=True)
    reader = HeadReader()
    for at in range(0, len(data), size):
        try:
            end = reader.feed(data[at : at + size], 0)
            if end >= 0:
                head = heads.read(reader)
                return at + end, reader.method, reader.url, head.length, head.headers
        except BadMessage:
            return "refused"
    return None


def head_seeds() -> list[bytes]:
    """Heads with each header that the server interprets."""
    line = b"POST /v2/models/m/infer?a=%20 HTTP/1.1\r\nHost: x\r\n"
    return [
        line + b"Content-Length: 00012\r\nContent-Type: application/json; charset=x\r\nX: \t y \r\n\r\n",
        line + b"Transfer-Encoding: gzip, chunked\r\nInference-Header-Content-Length: 5\r\n\r\n",
        line + b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
        b"x-torchere-timeout-ms: 5\r\nx-torchere-priority: high\r\nExpect: 100-continue\r\n\r\n",
        b"GET http://a:1/predictions/m/1.0 HTTP/1.0\r\n"
        b"Content-Encoding: gzip\r\nAccept-Encoding: gzip;q=1\r\n\r\n",
    ]


def http1_chunks(data: bytes) -> None:
    """A chunked body, or BadMessage, and the same one in pieces; h11 finds the same bytes, or refuses."""
    whole = _chunks_of(data, len(data) + 1)
    assert whole == _chunks_of(data, 3), "segments change the body"
    if whole is None or isinstance(whole, str):
        return
    end, body = whole
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + data[:end])
    found = b""
    try:
        while not isinstance(event := peer.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                raise AssertionError("h11 waits for more of the body")
            if isinstance(event, h11.Data):
                found += event.data
    except h11.RemoteProtocolError:
        return
    assert found == body, "h11 reads another body"


def _chunks_of(data: bytes, size: int) -> tuple[int, bytes] | str | None:
    chunks, found = Chunks(), b""
    for at in range(0, len(data), size):
        try:
            end, pieces = chunks.feed(data[at : at + size], 0)
        except BadMessage:
            return "refused"
        found += b"".join(pieces)
        if chunks.over:
            return at + end, found
    return None


def chunk_seeds() -> list[bytes]:
    """Bodies with extensions and trailers."""
    return [
        b'5;a="b\\"c";d\r\nhello\r\n00\r\nX-Sum: 1\r\nY: z\r\n\r\nrest',
        b"A\r\n0123456789\r\n1\r\nx\r\n0\r\n\r\n",
    ]


class Call(CallListener):
    """A call that answers as its first message says, and counts how often it is told its end."""

    takes_one: ClassVar[bool] = True

    def __init__(self, stream: Any) -> None:
        self.stream, self.ends = stream, 0
        self.messages: list[bytes] = []

    def on_message(self, message: Any) -> None:
        self.messages.append(bytes(message)[:9] if isinstance(message, bytes | memoryview) else b"")
        if self.messages[-1] == b"send":
            self.stream.send(bytes(50))
        elif self.messages[-1] == b"pause":
            self.stream.pause()

    def on_half_close(self) -> None:
        self.ends += 1
        try:
            self.stream.answer(bytes(90))
        except MessageFailed as err:
            self.stream.end(err.code, str(err))

    def on_failure(self, error: MessageFailed) -> None:
        self.stream.end(error.code, str(error))

    def on_cancel(self) -> None:
        self.ends += 1


async def _conversation(data: bytes, size: int) -> bytes:
    calls: list[Call] = []

    def open_call(stream: Any) -> Call:
        calls.append(Call(stream))
        return calls[-1]

    listener = Http2Listener(open_call, 200, 80)
    connection, transport = Http2Connection(listener), Transport()
    connection.connection_made(transport)
    for at in range(0, len(data), size):
        if transport.closed:
            break
        give(connection, data[at : at + size])
        await turns(1)
    await turns(2)
    connection.connection_lost(None)
    await turns(1)
    assert not connection._streams, "streams outlive their connection"
    assert listener.budgets.held_bytes == 0, "the budget is not given back"
    assert all(call.ends <= 2 for call in calls)
    return bytes(transport.said)


def http2(data: bytes) -> None:
    """Frames on a connection: answers follow the protocol, and nothing is left. First byte: the pieces."""
    size = (data[0] if data else 0) or 100_000
    said = loop().run_until_complete(_conversation(data[1:], size))
    decoder, at = Decoder(), 0
    begun: set[int] = set()
    over: set[int] = set()
    while at < len(said):
        length, kind = int.from_bytes(said[at : at + 3], "big"), said[at + 3]
        flags, stream = said[at + 4], int.from_bytes(said[at + 5 : at + 9], "big")
        payload = said[at + 9 : at + 9 + length]
        assert len(payload) == length, "a frame is cut"
        at += 9 + length
        if kind == 1:
            fields = dict(decoder.decode(payload))
            assert stream not in over
            assert (":status" in fields) == (stream not in begun)
            begun.add(stream)
        elif kind == 0:
            assert stream in begun - over
        if kind in (0, 1) and flags & 1:
            over.add(stream)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


CALL_HEADERS = (
    *((":method", "POST"), (":scheme", "http"), (":path", "/s/m"), (":authority", "x"), ("te", "trailers")),
    *(("content-type", "application/grpc"), ("grpc-timeout", "5S"), ("x-bin", "AQID")),
)


def http2_seeds() -> list[bytes]:
    """A call, two at once with continuations and padding, and control frames."""
    block = Encoder().encode(CALL_HEADERS)
    greeting = PREFACE + _frame(4, 0, 0, b"\0\3\0\0\0\x64\0\4\0\0\xff\xff")
    call = _frame(1, 4, 1, block) + _frame(0, 1, 1, _message(b"send"))
    split = _frame(1, 0, 3, block[:9]) + _frame(9, 4, 3, block[9:])
    padded = _frame(0, 9, 3, b"\2" + _message(b"pause") + b"\0\0")
    control = _frame(6, 0, 0, b"12345678") + _frame(8, 0, 0, b"\0\0\0\5") + _frame(4, 1, 0, b"")
    end = _frame(3, 0, 1, b"\0\0\0\x08") + _frame(2, 0, 1, b"\0\0\0\0\5") + _frame(7, 0, 0, bytes(8))
    return [
        b"\0" + greeting + call,
        b"\x07" + greeting + split + padded + control,
        b"\x40" + greeting + call + end,
    ]


def header_blocks(data: bytes) -> None:
    """Blocks of one connection: our reader, which remembers heads, finds what the library finds.

    Each block has its length in front. Our reader may refuse more than the library does, not less.
    """
    reader, decoder, at = HeaderReader(), Decoder(32_768), 0
    while at < len(data):
        block = data[at + 1 : at + 1 + data[at]]
        at += 1 + data[at]
        try:
            found = reader.read(block)
        except ConnectionBroken:
            return
        try:
            fields = decoder.decode(block, raw=True)
        except (HPACKError, IndexError, ValueError) as err:
            raise AssertionError(f"the library refuses the block: {err}") from err
        texts = [(_text(name), _text(value)) for name, value in fields]
        expected = request_head(texts)
        assert found[1] == expected[1]
        assert found[0] == expected[0] or found[0].flaw.startswith("SERVER: Received metadata larger")


def _text(text: Any) -> str:
    return text if isinstance(text, str) else bytes(text).decode(errors="replace")


def header_seeds() -> list[bytes]:
    """Calls of one client: equal ones, and ones that differ in their time-out."""
    encoder = Encoder()
    blocks = []
    for timeout in ("5S", "5S", "4999m", "1H"):
        fields = [(name, timeout if name == "grpc-timeout" else value) for name, value in CALL_HEADERS]
        blocks.append(encoder.encode(fields))
    plain = Encoder().encode(CALL_HEADERS, huffman=False)
    return [b"".join(bytes((len(each),)) + each for each in blocks), bytes((len(plain),)) + plain]


REFUSED = "the next message is too long"


def grpc_messages(data: bytes) -> None:
    """The messages of a stream, cut in any pieces; each decodes to a request, or is refused."""
    size, data = max(1, data[0] if data else 1), data[1:]
    whole = _messages_of(data, len(data) + 1)
    pieces = _messages_of(data, size)
    if whole[-1:] == [REFUSED]:  # the call ends; messages in the same piece are dropped
        assert pieces[-1:] == [REFUSED]
        both = min(len(whole), len(pieces)) - 1
        assert whole[:both] == pieces[:both]
    else:
        assert whole == pieces, "pieces change the messages"
    for message in whole:
        if isinstance(message, str):
            continue
        _same_request(message)
        with suppress(DecodeError, MessageFailed, InvalidRequest):
            infer_request(tensor_request(decode_request(message)))
        with suppress(DecodeError, MessageFailed):
            counted(PredictionsRequest.FromString)(message)  # type: ignore[arg-type]  # it reads memoryviews


def _same_request(message: bytes) -> None:
    """A request that is cut into head, id and tensors is that of the library, or refused if it refuses it."""
    try:
        cut = decode_request(message)
    except (DecodeError, MessageFailed):  # fields that no client writes may be refused, too
        return
    whole = ModelInferRequest()
    whole.CopyFrom(cut.fields)
    if not whole.raw_input_contents:  # else the library has read the whole message
        whole.raw_input_contents.extend(map(bytes, cut.raw))
    library = ModelInferRequest.FromString(bytes(message))
    library.DiscardUnknownFields()
    whole.DiscardUnknownFields()
    assert whole.SerializeToString(deterministic=True) == library.SerializeToString(deterministic=True)


def _messages_of(data: bytes, size: int) -> list[bytes | str]:
    reader, found = MessageReader(50_000, "gzip"), []  # type: ignore[var-annotated]
    for at in range(0, len(data), size):
        try:
            some = reader.feed(data[at : at + size])
            while some:
                found += map(_inflated, some)
                some = reader.more() if reader.unsplit else []
        except MessageFailed:
            return [*found, REFUSED]
    return found


def _inflated(message: Any) -> bytes | str:
    if not isinstance(message, Compressed):
        return bytes(message)
    try:
        return message.inflated()
    except MessageFailed as err:
        return str(err)


def message_seeds() -> list[bytes]:
    """Requests of both services, one of them compressed."""
    request = ModelInferRequest(model_name="m", id="x")
    tensor = request.inputs.add(name="a", datatype="FP32", shape=[2])
    tensor.contents.fp32_contents.extend([1, 2])
    request.parameters["p"].int64_param = 5
    request.outputs.add(name="o").parameters["classification"].int64_param = 2
    raw = ModelInferRequest(model_name="m", raw_input_contents=[b"\1\0\0\0"])
    raw.inputs.add(name="b", datatype="INT32", shape=[1])
    plain = PredictionsRequest(model_name="m", input={"data": b"x"}).SerializeToString()
    zipped = zlib.compressobj(9, wbits=31)
    text = zipped.compress(plain) + zipped.flush()
    first = _message(request.SerializeToString())
    return [
        b"\x05" + first + _message(raw.SerializeToString()),
        b"\x63" + _message(plain) + b"\1" + len(text).to_bytes(4, "big") + text,
    ]


MOST_PIECES = 4000


def frames_to_server(data: bytes) -> None:
    """Bytes that a worker writes on a data socket: reports and parts, or the end of the stream.

    The callbacks are those of `worker_process.py`, without its runs. The first byte: the pieces, at most
    `MOST_PIECES`, each of which takes the socket pair as long as some of a frame's bytes.
    """
    size, data = max(1, data[0] if data else 1, len(data) // MOST_PIECES), data[1:]
    whole, pieces = (loop().run_until_complete(_reports(data, each)) for each in (len(data) + 1, size))
    assert whole == pieces, "pieces change the messages"


async def _reports(data: bytes, size: int) -> tuple[list[str], str]:
    ours, theirs = socket.socketpair()
    seen: list[str] = []
    end = asyncio.get_running_loop().create_future()

    def on_frame(payload: memoryview) -> None:
        with suppress(msgspec.MsgspecError, RecursionError):  # what it would be on the control socket
            messages.control_from_worker.decode(payload)
        try:
            message = messages.data_from_worker.decode(payload)
            if isinstance(message, messages.Done) and message.large:
                count = messages.raw_bytes(message)
                if count > 2**20:
                    frames.fail("more than the target waits for")
                    return
                frames.take(count, lambda raw: take(messages.done_with_raw(message, raw)))
                return
        except (msgspec.MsgspecError, RecursionError, ValueError):
            frames.fail("no message")
            return
        take(message)

    def take(message: messages.DataFromWorker) -> None:
        if isinstance(message, messages.Done):
            report = messages.report_from_done(message, 2)
            assert len(report.outcomes) == 2
            seen.append(repr((report.metrics, report.all_stages_s)))
        else:
            seen.append(repr((message.index, bytes(message.part.body))))

    frames = FrameSocket(ours, on_frame, end.set_result)
    try:
        for at in range(0, len(data), size):
            try:
                theirs.sendall(data[at : at + size])
            except OSError:
                break
            await asyncio.sleep(0)
        theirs.close()
        fault = await asyncio.wait_for(end, 10)
    finally:
        frames.close()
        theirs.close()
    return seen, fault


def report_seeds() -> list[bytes]:
    """Reports with answers, failures and large values, and a part."""
    answer = InferResponse(b"body", (("a", "b"),), 201, "Made")
    large = InferResponse(bytes(40_000))
    parts: list[Any] = [
        *messages.encode_report(1, BatchReport([answer, answer], 0.5)),
        *messages.encode_report(2, BatchReport([answer, large])),
        messages.encode_frame(messages.Partial(3, 0, answer)),
    ]
    return [b"\x40" + bytes(parts[0]), b"\x40" + b"".join(map(bytes, parts[1:]))]


def frames_to_worker(data: bytes) -> None:
    """Bytes on the data socket of a worker: runs, or an end. The server writes valid ones; a bug may not."""
    for size in (len(data) + 1, 1000):
        _runs(data, size)


def _runs(data: bytes, size: int) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(True)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**18)
    with ours, theirs:
        for at in range(0, len(data), size):
            theirs.sendall(data[at : at + size])
        theirs.close()
        reader = FrameReader(ours)
        try:
            while (payload := reader.next()) is not None:
                run = messages.data_to_worker.decode(payload)
                raw = reader.raw(messages.raw_bytes(run)) if run.large else None
                if raw is not None:
                    run = messages.run_with_raw(run, raw)
                assert all(isinstance(each, InferRequest) for each in run.requests)
        except (msgspec.MsgspecError, RecursionError, ValueError, IndexError, MemoryError):
            return


def run_seeds() -> list[bytes]:
    """A run of two requests, and one with a large value."""
    small = InferRequest("id", (Parameter("body", b"x", "text/plain"),), (("a", "b"),))
    large = InferRequest("id", (Parameter("data", bytes(33_000)), Parameter("more", b"")))
    return [
        b"".join(map(bytes, messages.encode_run(1, 0, [small, small]))),
        b"".join(map(bytes, messages.encode_run(2, 1, [large]))),
        HEADER.pack(3) + b"\x93\x06\x01",
    ]
