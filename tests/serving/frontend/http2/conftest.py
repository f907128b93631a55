"""A real listener whose calls do what their path says, and two clients: h2, by the protocol, and bytes."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    ResponseReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from hpack import Encoder
from hyperframe.frame import Frame, HeadersFrame

from torchere.serving.frontend.http2.connection import Connection
from torchere.serving.frontend.http2.listener import Listener
from torchere.serving.frontend.http2.messages import MessageFailed

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
PATIENCE_S = 10


def head_of(path, *metadata, method="POST", content_type="application/grpc"):
    return [
        (":method", method),
        (":scheme", "http"),
        (":path", path),
        (":authority", "here"),
        ("te", "trailers"),
        ("content-type", content_type),
        *metadata,
    ]


def prefixed(*messages):
    return b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)


def unprefixed(data):
    found = []
    while data:
        size = 5 + int.from_bytes(data[1:5], "big")
        found.append(bytes(data[5:size]))
        data = data[size:]
    return found


class Answering:
    """Does what its path says, and keeps what came. See `PATHS`."""

    def __init__(self, stream):
        self.stream = stream
        self.does = stream.head.path
        self.takes_one = self.does != "/many"
        self.messages = []
        self.over = asyncio.Event()
        self.ended_by = ""
        self.drained = False
        self.sent = 0
        self.task = None
        if self.does == "/refuse":
            stream.end(12, "no")
        elif self.does == "/flow":
            self.task = asyncio.ensure_future(self._flow())

    def on_message(self, message):
        self.messages.append(message)
        if self.does == "/many":
            self.stream.send(bytes(message))
        elif self.does == "/hold":
            self.stream.pause()

    def on_half_close(self):
        self._over("half_closed")
        if self.does == "/echo":
            try:
                self.stream.answer(b"".join(self.messages))
            except MessageFailed as err:
                self.stream.end(err.code, str(err))
        elif self.does == "/many":
            self.stream.end()
        elif self.does == "/twice":
            for message in self.messages * 2:
                self.stream.send(bytes(message))
            self.stream.end(5, "enough: 100%")

    def on_failure(self, error):
        self._over(f"flawed: {error}")
        self.stream.end(error.code, str(error))

    def on_cancel(self):
        self._over("gone")
        if self.task is not None:
            self.task.cancel()

    def _over(self, how):
        self.ended_by = how
        self.over.set()

    def on_drain(self, *, is_stop):
        self.drained = True

    async def _flow(self):
        for _ in range(300):
            self.stream.send(bytes(10_000))
            self.sent += 1
            await self.stream.drained()
        self.stream.end()


@contextlib.asynccontextmanager
async def listening(*, limit_bytes=8 * 2**20, **options):
    """`served.calls`: each `Answering` in its order; `served.listener`, `served.port`."""
    calls = []

    def open_call(stream):
        calls.append(Answering(stream))
        return calls[-1]

    listener = Listener(open_call, limit_bytes, limit_bytes, **options)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(listener), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield SimpleNamespace(calls=calls, listener=listener, port=port)
    finally:
        server.close()
        listener.abort()
        await listener.all_closed(PATIENCE_S)
        assert not listener.connections


@dataclass
class Answer:
    headers: dict = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    trailers: dict = field(default_factory=dict)
    reset: int | None = None
    over: bool = False

    @property
    def messages(self):
        return unprefixed(self.data)

    @property
    def status(self):
        return self.trailers.get("grpc-status", self.headers.get("grpc-status"))


class Peer:
    """A client that minds the protocol. `eats`: gives leave for more as soon as data comes."""

    def __init__(self, reader, writer, *, eats=True):
        self.reader, self.writer, self.eats = reader, writer, eats
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.answers = {}
        self.goaways = []
        self.pongs = []
        self.settled = 0
        self.closed = False

    def begin(self, path, *messages, end=True, metadata=(), **options):
        """Send the head of a call, and its messages, for which there has to be leave."""
        stream_id = self.h2.get_next_available_stream_id()
        self.answers[stream_id] = Answer()
        data = prefixed(*messages)
        self.h2.send_headers(stream_id, head_of(path, *metadata, **options), end_stream=end and not data)
        if data:
            self.say(stream_id, data, end=end)
        self.flush()
        return stream_id

    def say(self, stream_id, data, *, end=False):
        step = self.h2.max_outbound_frame_size
        for start in range(0, len(data), step):
            is_last = end and start + step >= len(data)
            self.h2.send_data(stream_id, data[start : start + step], end_stream=is_last)
        self.flush()

    async def say_all(self, stream_id, data, *, end=False):
        """As `say`, waiting for leave."""
        while data:
            await self.until(lambda: self.h2.local_flow_control_window(stream_id) > 0)
            size = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            self.h2.send_data(stream_id, data[:size], end_stream=end and size >= len(data))
            self.flush()
            data = data[size:]

    def flush(self):
        self.writer.write(self.h2.data_to_send())

    async def call(self, path, *messages, **options):
        """A whole call."""
        stream_id = self.begin(path, end=not messages, **options)
        await self.say_all(stream_id, prefixed(*messages), end=True)
        return await self.answered(stream_id)

    async def answered(self, stream_id):
        answer = self.answers[stream_id]
        await self.until(lambda: answer.over)
        return answer

    async def round_trip(self):
        """Until the server has taken in all that was sent before."""
        before = len(self.pongs)
        self.h2.ping(b"12345678")
        self.flush()
        await self.until(lambda: len(self.pongs) > before)

    async def settle(self, settings):
        self.h2.update_settings(settings)
        wanted = self.settled + 1
        self.flush()
        await self.until(lambda: self.settled >= wanted)

    async def until(self, condition):
        while not condition():
            data = await asyncio.wait_for(self.reader.read(65_536), PATIENCE_S)
            if not data:
                self.closed = True
                assert condition(), "the connection is closed"
                return
            for event in self.h2.receive_data(data):
                self._took(event)
            self.flush()

    async def until_closed(self):
        await self.until(lambda: self.closed)

    def _took(self, event):
        answer: Any = self.answers.get(getattr(event, "stream_id", None))
        if isinstance(event, ResponseReceived):
            answer.headers = dict(event.headers)
        elif isinstance(event, TrailersReceived):
            answer.trailers = dict(event.headers)
        elif isinstance(event, DataReceived):
            answer.data += event.data
            if self.eats:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            answer.over = True
        elif isinstance(event, StreamReset):
            answer.reset = event.error_code
            answer.over = True
        elif isinstance(event, ConnectionTerminated):
            self.goaways.append(event)
        elif isinstance(event, PingAckReceived):
            self.pongs.append(event.ping_data)
        elif isinstance(event, SettingsAcknowledged):
            self.settled += 1


class Wire:
    """A client that sends any bytes, and reads frames."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.encoder = Encoder()

    def send(self, *parts):
        self.writer.write(b"".join(part if isinstance(part, bytes) else part.serialize() for part in parts))

    def greet(self, *parts):
        self.send(PREFACE, EMPTY_SETTINGS, *parts)

    def block(self, path, *metadata, **options):
        return self.encoder.encode(head_of(path, *metadata, **options))

    def headers(self, path, stream_id=1, *, last=False, block=None):
        """The frame that begins a call; `last`: nothing comes behind it."""
        flags = ["END_HEADERS", "END_STREAM"] if last else ["END_HEADERS"]
        return HeadersFrame(stream_id, self.block(path) if block is None else block, flags=flags)

    def calls(self, path, count, *behind, first=1, flags=4):
        """So many calls with equal heads, and frames behind each; `flags` of HEADERS: 1 no frame follows."""
        begin = HeadersFrame(first, self.block(path), flags=["END_HEADERS", *["END_STREAM"] * (flags & 1)])
        block = self.block(path)
        length = len(block).to_bytes(3, "big")
        made = [begin.serialize()]
        for number in range(first, first + 2 * count, 2):
            stream_id = number.to_bytes(4, "big")
            if number != first:
                made.append(length + bytes((1, flags)) + stream_id + block)
            made += [frame[:5] + stream_id + frame[9:] for frame in behind]
        return b"".join(made)

    async def frame(self):
        """The next frame, or None when the server has closed."""
        try:
            head = await asyncio.wait_for(self.reader.readexactly(9), PATIENCE_S)
            frame, length = Frame.parse_frame_header(memoryview(head))
            frame.parse_body(memoryview(await asyncio.wait_for(self.reader.readexactly(length), PATIENCE_S)))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None
        return frame

    async def next(self, kind):
        """The next frame of a kind; None when the server closes before it."""
        while (frame := await self.frame()) is not None:
            if type(frame) is kind:
                return frame
        return None

    async def all(self):
        """What comes until the server closes."""
        found = []
        while (frame := await self.frame()) is not None:
            found.append(frame)
        return found


@contextlib.asynccontextmanager
async def _connected(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def h2_peer(served, *, settings=None, eats=True):
    """A `Peer` whose greeting is out; `settings` are in it."""
    async with _connected(served.port) as (reader, writer):
        peer = Peer(reader, writer, eats=eats)
        peer.h2.initiate_connection()
        peer.flush()
        if settings:
            await peer.settle(settings)
        yield peer


@contextlib.asynccontextmanager
async def wire_to(served):
    """A `Wire` on which nothing was said."""
    async with _connected(served.port) as (reader, writer):
        yield Wire(reader, writer)


@contextlib.asynccontextmanager
async def greeted(**options):
    """A listener, and a `Wire` to it that has said hello."""
    async with listening(**options) as served, wire_to(served) as wire:
        wire.greet()
        yield served, wire


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """`run(coroutine)` on a fresh loop of each kind; no task is left, and nothing goes wrong aside."""

    def on_loop(main):
        loop = uvloop.new_event_loop() if request.param == "uvloop" else asyncio.new_event_loop()
        wrong = []
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        try:
            result = loop.run_until_complete(main)
            loop.run_until_complete(asyncio.sleep(0))
            assert asyncio.all_tasks(loop) == set()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        assert wrong == []
        return result

    return on_loop


@pytest.fixture
def http2():
    """`http2.listener(...)`, `peer(served)`, `wire(served)`, `greeted(...)`: contexts; what they speak."""
    contexts = {"listener": listening, "peer": h2_peer, "wire": wire_to, "greeted": greeted}
    return SimpleNamespace(**contexts, prefixed=prefixed, head_of=head_of, preface=PREFACE)
