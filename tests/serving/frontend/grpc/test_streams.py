"""Coroutines behind gRPC methods, asked by real clients: who waits, who is ended, and what is left behind."""

import asyncio
import contextlib
import gzip
import random
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import uvloop
from google.protobuf.wrappers_pb2 import BytesValue
from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

from torchere.serving.batching.request import Request
from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.call_scope import current_call
from torchere.serving.frontend.grpc import call as calls
from torchere.serving.frontend.grpc import streams
from torchere.serving.frontend.grpc.call import Method
from torchere.serving.frontend.grpc.errors import MANAGEMENT
from torchere.serving.frontend.grpc.service import dispatcher, opener
from torchere.serving.frontend.http2 import incomplete_calls
from torchere.serving.frontend.http2.connection import Connection
from torchere.serving.frontend.http2.listener import Listener
from torchere.serving.frontend.http2.messages import Compressed, MessageFailed, StatusCode
from torchere.serving.telemetry.metrics import Metrics

LIMIT = 8 * 2**20
CODE = grpc.StatusCode


class Service:
    """Methods that wait, fail, or stream; `closed` is set when one of them is ended early."""

    def __init__(self):
        self.began, self.closed, self.go = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.made = 0
        self.metrics = Metrics()
        self.meter = self.metrics.meter("m", "1")
        self.metrics.show(self.meter)

    async def echo(self, request, call):
        return request

    async def hang(self, request, call):
        with self.watched():
            await asyncio.Event().wait()

    async def block(self, request, call):
        time.sleep(call.deadline_s - time.monotonic() + calls.LATE_S)  # as a loop that stood still
        return request

    async def fail(self, request, call):
        known = {
            b"known": InvalidRequest("half \udce9 name"),
            b"long": MessageFailed(StatusCode.RESOURCE_EXHAUSTED, "too long"),
        }
        raise known.get(request.value, ValueError("bug"))

    async def flow(self, request, call):
        with self.watched():
            for _ in range(2000):
                yield BytesValue(value=bytes(10_000))
                self.made += 1

    async def predict(self, request, call):
        self.prediction = Request("id", 0.0)
        scope = current_call()
        assert scope is not None
        scope.begin(self.metrics, self.prediction)
        self.prediction.meter = self.meter
        with self.watched():
            yield BytesValue()
            await asyncio.Event().wait()

    async def each(self, requests, call):
        with self.watched():
            async for request in requests:
                yield request

    async def gated(self, requests, call):
        async for request in requests:
            await self.go.wait()
            yield request

    async def slow(self, requests, call):
        await self.go.wait()
        total = 0
        async for request in requests:
            total += len(request.value)
        yield BytesValue(value=b"%d" % total)

    async def deaf(self, requests, call):
        yield BytesValue(value=b"enough")

    async def stuck(self, requests, call):
        self.scope = current_call()
        with self.watched():
            await asyncio.Event().wait()
            yield BytesValue()

    @contextlib.contextmanager
    def watched(self):
        self.began.set()
        try:
            yield
        finally:
            self.closed.set()


def method(name, tasks):
    decode: Any = BytesValue.FromString  # reads memoryviews too
    return Method(f"test.Service/{name}", MANAGEMENT, decode, BytesValue.SerializeToString, tasks, Metrics())


@contextlib.asynccontextmanager
async def serving(**options):
    service = Service()
    tasks: set[asyncio.Task[object]] = set()
    kinds = {
        (False, False): ("echo", "hang", "block", "fail"),
        (False, True): ("flow", "predict"),
        (True, True): ("each", "gated", "slow", "deaf", "stuck"),
    }
    openers = {
        f"/test.Service/{name}": opener(
            getattr(service, name), method(name, tasks), streams_in=streams_in, streams_out=streams_out
        )
        for (streams_in, streams_out), names in kinds.items()
        for name in names
    }
    listener = Listener(dispatcher(openers, None, "inference", service.metrics), LIMIT, LIMIT, **options)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(listener), "127.0.0.1", 0)
    target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    try:
        async with grpc.aio.insecure_channel(target, unlimited) as channel:
            yield SimpleNamespace(
                channel=channel, service=service, tasks=tasks, listener=listener, target=target
            )
    finally:
        server.close()
        listener.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=10)
        assert tasks == set()
        await listener.all_closed(10)


CODEC = (BytesValue.SerializeToString, BytesValue.FromString)


def unary(served, name, value=b"m", **options):
    call = served.channel.unary_unary(f"/test.Service/{name}", *CODEC)
    return call(BytesValue(value=value), **{"timeout": 20, **options})


def streaming(served, name, **options):
    return served.channel.unary_stream(f"/test.Service/{name}", *CODEC)(
        BytesValue(), **{"timeout": 20, **options}
    )


def both(served, name, requests=None, **options):
    call = served.channel.stream_stream(f"/test.Service/{name}", *CODEC)
    return call(requests, **{"timeout": 20, **options})


def run(main):
    return asyncio.run(asyncio.wait_for(main, 20))


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), failed.value.details()


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("size", [0, 1000, 6 * 2**20])
def test_messages_of_any_size_come_back_compressed_or_not(compression, size):
    async def main():
        async with serving() as served:
            return (await unary(served, "echo", bytes(size), compression=compression)).value

    assert run(main()) == bytes(size)


def test_compressed_messages_on_a_stream_come_back():
    async def main():
        async with serving() as served:
            requests = [BytesValue(value=b"a" * n) for n in (0, 5, 50_000)]
            answers = both(served, "each", iter(requests), compression=grpc.Compression.Gzip)
            return [len(answer.value) async for answer in answers]

    assert run(main()) == [0, 5, 50_000]


@pytest.mark.parametrize(("count", "size"), [(streams.MESSAGES_AHEAD * 2, 1), (2, streams.BYTES_AHEAD)])
def test_a_stream_ends_whose_last_message_is_one_too_many_to_wait(count, size):
    async def main():
        async with serving() as served:
            answers = both(served, "slow", iter([BytesValue(value=bytes(size))] * count))
            while not any(c._streams and not c._streams[1].remote_open for c in served.listener.connections):
                await asyncio.sleep(0.01)  # until the client has sent all
            served.service.go.set()
            return [answer.value async for answer in answers]

    assert run(main()) == [b"%d" % (count * size)]


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
def test_a_message_over_the_limit_is_refused(compression):
    async def main():
        async with serving() as served:
            code, details = await status_of(unary(served, "echo", bytes(LIMIT), compression=compression))
            return code, details.split("(")[0], (await unary(served, "echo")).value

    assert run(main()) == (CODE.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max ", b"m")


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"known", (CODE.INVALID_ARGUMENT, "half ? name\norg.pytorch.serve.http.BadRequestException")),
        (b"long", (CODE.RESOURCE_EXHAUSTED, "too long")),
    ],
)
def test_an_error_becomes_its_status(value, status):
    async def main():
        async with serving() as served:
            return await status_of(unary(served, "fail", value))

    assert run(main()) == status


def test_a_bug_is_logged_and_answered_as_internal(caplog):
    async def main():
        async with serving() as served:
            return await status_of(unary(served, "fail", b"bug"))

    assert run(main())[0] is CODE.INTERNAL
    assert "ValueError: bug" in caplog.text


def test_a_call_that_is_answered_as_its_time_is_over_has_one_line_in_the_access_log(caplog):
    async def main():
        async with serving() as served:
            await asyncio.wait({asyncio.ensure_future(status_of(unary(served, "block", timeout=0.2)))})

    with caplog.at_level("INFO", "ACCESS_LOG"):
        uvloop.run(main())
    lines = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert [line.split()[-2] for line in lines] == ["0"]


def test_a_message_that_is_none_of_the_method_is_internal():
    async def main():
        async with serving() as served:
            call = served.channel.unary_unary("/test.Service/echo")
            return await status_of(call(b"\xff\xff", timeout=20))

    assert run(main()) == (CODE.INTERNAL, "Exception deserializing request!")


def test_a_method_that_is_not_there_is_unimplemented():
    async def main():
        async with serving() as served:
            return await status_of(unary(served, "nothing"))

    assert run(main()) == (CODE.UNIMPLEMENTED, "Method not found!")


@pytest.mark.parametrize("begin", [unary, streaming, both])
def test_a_client_that_cancels_ends_the_task_and_its_call_has_one_line(begin, caplog):
    name = {unary: "hang", streaming: "flow", both: "stuck"}[begin]

    async def main():
        async with serving() as served:
            call = begin(served, name)
            await served.service.began.wait()
            call.cancel()
            await served.service.closed.wait()
            await asyncio.wait(served.tasks, timeout=10) if served.tasks else None
            (connection,) = served.listener.connections
            return len(served.tasks), len(connection._streams)

    with caplog.at_level("INFO", "ACCESS_LOG"):
        assert run(main()) == (0, 0)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert f'"gRPC test.Service/{name} HTTP/2.0" 1 ' in line


@pytest.mark.parametrize("end", ["CANCELLED", "DEADLINE_EXCEEDED"])
def test_a_stream_that_ends_early_counts_as_what_ended_it(monkeypatch, end):
    if end == "DEADLINE_EXCEEDED":
        monkeypatch.setattr(calls, "LATE_S", -19.8)  # long before the client gives up

    async def main():
        async with serving() as served:
            call = streaming(served, "predict")
            await call.read()
            if end == "CANCELLED":
                call.cancel()
            await served.service.closed.wait()
            await asyncio.wait(served.tasks, timeout=10) if served.tasks else None
            text = served.service.metrics.exposition()
            assert served.service.prediction.read_s >= served.service.prediction.started_s
            return [line for line in text.splitlines() if line.startswith("torchere_requests_total{")]

    labels = 'model="m",version="1",protocol="grpc"'
    assert run(main()) == [f'torchere_requests_total{{{labels},code="{end}",}} 1.0']


def test_a_client_that_loses_its_connection_ends_the_tasks():
    async def main():
        async with serving() as served:
            call = unary(served, "hang")
            await served.service.began.wait()
            for connection in list(served.listener.connections):
                connection.abort()
            await served.service.closed.wait()
            return (await status_of(call))[0]

    assert run(main()) is CODE.UNAVAILABLE


def test_a_call_that_hangs_is_ended_after_its_deadline_even_when_its_client_waits(monkeypatch):
    monkeypatch.setattr(calls, "LATE_S", 0.0)

    async def main():
        async with serving() as served:
            reader, writer = await asyncio.open_connection(*served.target.split(":"))
            head = [
                (":method", "POST"),
                (":path", "/test.Service/hang"),
                ("content-type", "application/grpc"),
            ]
            block = Encoder().encode([*head, ("grpc-timeout", "50m")])
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize())
            writer.write(HeadersFrame(1, block, flags=["END_HEADERS"]).serialize())
            writer.write(DataFrame(1, bytes(5), flags=["END_STREAM"]).serialize())
            found = await reader.readuntil(b"grpc-message")
            writer.close()
            await writer.wait_closed()
            return found[found.index(b"grpc-status") :][:13], served.service.closed.is_set()

    assert run(main()) == (b"grpc-status\x014", True)


def test_a_client_whose_deadline_is_over_is_told_so():
    async def main():
        async with serving() as served:
            while not served.service.began.is_set():  # on a busy machine one may be over before it came
                code, _ = await status_of(unary(served, "hang", timeout=0.1))
            await served.service.closed.wait()
            return code

    assert run(main()) is CODE.DEADLINE_EXCEEDED


def test_keepalives_of_a_client_are_answered():
    async def main():
        options = [
            ("grpc.keepalive_time_ms", 10),
            ("grpc.keepalive_timeout_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        async with serving() as served, grpc.aio.insecure_channel(served.target, options) as channel:
            code, _ = await status_of(unary(SimpleNamespace(channel=channel), "hang", timeout=0.3))
            (connection,) = served.listener.connections
            return code, connection._flood._count

    code, pings = run(main())
    assert code is CODE.DEADLINE_EXCEEDED
    assert pings > 2


def test_a_call_given_up_before_its_task_began_leaves_no_timer():
    async def main():
        head = SimpleNamespace(metadata=())
        stream: Any = Mock(head=head, timeout_s=3600.0, ended=False, client=None)
        tasks: set[asyncio.Task[object]] = set()
        call: Any = opener(Service().stuck, method("stuck", tasks), streams_in=True, streams_out=True)(stream)
        call.on_cancel()
        await asyncio.wait({call.task})
        return call._expiry.cancelled(), tasks

    assert run(main()) == (True, set())


def test_a_call_whose_answer_is_cancelled_keeps_its_one_line(caplog):
    stream: Any = Mock(timeout_s=None, client=None)
    call: Any = opener(lambda asked, call: asked, method("now", set()), streams_in=False, streams_out=False)(
        stream
    )
    with caplog.at_level("INFO", "ACCESS_LOG"):
        call.begin(BytesValue())
        call.on_cancel()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert line.startswith('/unix:0 "gRPC test.Service/now HTTP/2.0" 0 ')


def test_whoever_streams_waits_for_a_slow_reader():
    async def main():
        async with serving() as served:
            call = streaming(served, "flow")
            await call.read()
            made = 0
            while made != served.service.made:  # until it makes no more
                made = served.service.made
                for _ in range(50):
                    await asyncio.sleep(0)
            came = 1
            while await call.read() is not grpc.aio.EOF:
                came += 1
            return made, came

    made, came = run(main())
    assert made < came  # how far apart they are depends on the windows of grpcio's client, which grow
    assert came == 2000


def test_a_client_that_streams_faster_than_it_is_read_waits():
    async def main():
        async with serving() as served:
            sent = 0

            async def requests():
                nonlocal sent
                for _ in range(200):
                    yield BytesValue(value=bytes(100_000))
                    sent += 1

            call = both(served, "slow", requests())
            before = -1
            while before != sent or not sent:
                before = sent
                for _ in range(200):
                    await asyncio.sleep(0)
            (connection,) = served.listener.connections
            (stream,) = connection._streams.values()
            waiting = len(stream.listener._messages)
            served.service.go.set()
            return waiting, [answer.value async for answer in call]

    waiting, answers = run(main())
    assert waiting <= 42  # a window of four megabytes
    assert answers == [b"20000000"]


def test_a_method_that_stops_reading_ends_the_call_well():
    async def main():
        async with serving() as served:

            async def requests():
                while True:
                    yield BytesValue(value=b"more")
                    await asyncio.sleep(0)

            while True:
                call = both(served, "deaf", requests())
                try:
                    return [answer.value async for answer in call], await call.code()
                except grpc.aio.AioRpcError as err:
                    # The client's own word, where it was just sending when the end came: once in many runs.
                    if "execute_batch" not in str(err.debug_error_string()):
                        raise

    assert run(main()) == ([b"enough"], CODE.OK)


def test_a_stop_ends_idle_streams_at_once():
    async def main():
        async with serving() as served:
            call = both(served, "each")
            await call.write(BytesValue(value=b"m"))
            answer = (await call.read()).value
            served.listener.drain()
            await served.listener.all_closed(10)
            return answer, len(served.listener.connections), await call.code(), await call.details()

    text = "The server is shutting down: call again"
    assert run(main()) == (b"m", 0, CODE.UNAVAILABLE, text)


def test_a_stop_ends_a_stream_after_the_answers_to_all_that_came():
    async def main():
        async with serving() as served:
            call = both(served, "gated")
            for value in (b"a", b"b"):
                await call.write(BytesValue(value=value))
            connection = await the_connection(served)
            while connection._streams[1].messages < 2:
                await asyncio.sleep(0)
            served.listener.drain()
            await until_closing(connection)
            await asyncio.sleep(0.1)
            served.service.go.set()
            return [(await call.read()).value for _ in range(2)], await call.code()

    assert run(main()) == ([b"a", b"b"], CODE.UNAVAILABLE)


def test_a_stream_that_begins_while_the_server_stops_may_send_its_first_message():
    async def main():
        async with serving() as served:
            call = both(served, "each")
            connection = await the_busy_connection(served)
            served.listener.drain()
            await until_closing(connection)
            await call.write(BytesValue(value=b"m"))
            return (await call.read()).value, await call.code()

    assert run(main()) == (b"m", CODE.UNAVAILABLE)


def test_a_stream_outlives_the_age_of_its_connection_and_not_a_stop():
    async def main():
        async with serving() as served:
            call = both(served, "each")
            connection = await the_busy_connection(served)
            connection.closing.begin()  # as at its age
            await until_closing(connection)
            answers = []
            for value in (b"a", b"b"):
                await call.write(BytesValue(value=value))
                answers.append((await call.read()).value)
            served.listener.drain()
            return answers, await call.code()

    assert run(main()) == ([b"a", b"b"], CODE.UNAVAILABLE)


async def the_connection(served):
    while not served.listener.connections:
        await asyncio.sleep(0)
    return next(iter(served.listener.connections))


async def the_busy_connection(served):
    connection = await the_connection(served)
    while not connection._streams:
        await asyncio.sleep(0)
    return connection


async def until_closing(connection):
    while connection.closing.last_taken is None:
        await asyncio.sleep(0)


def test_no_call_is_lost_while_connections_grow_old():
    async def main():
        async with serving(age_s=0.05) as served:

            async def client():
                return [(await unary(served, "echo", b"%d" % n)).value for n in range(150)]

            found = await asyncio.gather(*(client() for _ in range(4)))
            return found

    assert run(main()) == [[b"%d" % n for n in range(150)]] * 4


def test_no_call_is_lost_when_a_connection_takes_no_more_without_a_word_before():
    async def main():
        async with serving() as served:

            async def client(number):
                found = []
                for n in range(100):
                    found.append((await unary(served, "echo", b"%d" % n)).value)
                    # By one of them only: grpcio sends a call that was not taken again, but only once.
                    if number == 0 and n % 20 == 10:
                        for connection in list(served.listener.connections):
                            connection.closing.take_no_more()
                return found

            return await asyncio.gather(*map(client, range(4)))

    assert run(main()) == [[b"%d" % n for n in range(100)]] * 4


class Wire:
    """A connection by the bytes: calls begun and not ended, as no client of grpcio's leaves them."""

    def __init__(self, served):
        self.served = served

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection(*self.served.target.split(":"))
        self.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize())
        self.encoder = Encoder()
        return self

    async def __aexit__(self, *_):
        self.writer.transport.abort()

    def begin(self, stream_id, name, *messages):
        head = [(":method", "POST"), (":path", f"/test.Service/{name}"), ("content-type", "application/grpc")]
        block = self.encoder.encode([*head, ("grpc-encoding", "gzip")])
        self.writer.write(HeadersFrame(stream_id, block, flags=["END_HEADERS"]).serialize())
        for message in messages:
            prefix = b"\1" + len(message).to_bytes(4, "big")
            self.writer.write(DataFrame(stream_id, prefix + message).serialize())

    def end(self, stream_id):
        self.writer.write(DataFrame(stream_id, flags=["END_STREAM"]).serialize())

    async def connection(self, calls):
        """The server's end, once so many calls have come."""
        while not any(len(one._streams) == calls for one in self.served.listener.connections):
            await asyncio.sleep(0)
        return next(one for one in self.served.listener.connections if len(one._streams) == calls)


@pytest.mark.parametrize(("count", "found"), [(0, b"found no message"), (3, b"found several messages")])
def test_a_call_of_a_method_that_takes_one_message_brings_one(count, found):
    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "echo", *[gzip.compress(b"")] * count)
            wire.end(1)
            told = await wire.reader.readuntil(b", expected one")
            return told[told.index(b"grpc-status") :][:14], told.endswith(found + b", expected one")

    assert run(main()) == (b"grpc-status\x0213", True)


def unsplit(stream):
    """How many bytes wait to become messages."""
    return 0 if stream._reader is None else len(stream._reader.unsplit)


BOMB = gzip.compress(BytesValue(value=bytes(6 * 2**20)).SerializeToString())


@pytest.mark.parametrize("name", ["echo", "each"])
@pytest.mark.parametrize(("size", "is_bomb"), [(900, False), (1_000_000, False), (900_000, True)])
def test_a_long_message_is_inflated_in_a_thread_and_a_short_one_is_not(name, size, is_bomb, monkeypatch):
    threads = []
    inflated = Compressed.inflated

    def watched(compressed):
        threads.append(threading.current_thread())
        return inflated(compressed)

    monkeypatch.setattr(Compressed, "inflated", watched)
    value = random.Random(0).randbytes(size // 2).hex().encode()  # half as long when compressed
    if is_bomb:
        value = bytes(size)
        assert len(gzip.compress(value)) < 1024

    async def main():
        async with serving() as served:
            if name == "echo":
                return (await unary(served, name, value, compression=grpc.Compression.Gzip)).value
            requests = iter([BytesValue(value=value)])
            (answer,) = [
                one.value async for one in both(served, name, requests, compression=grpc.Compression.Gzip)
            ]
            return answer

    assert run(main()) == value
    assert threading.main_thread() not in threads
    assert len(threads) == (size > 1024)


@pytest.mark.parametrize("name", ["echo", "stuck"])
def test_compressed_messages_of_calls_on_their_way_take_what_was_sent(name):
    async def main():
        async with serving() as served, Wire(served) as wire:
            tracemalloc.start()
            try:
                for stream_id in range(1, 40, 2):
                    wire.begin(stream_id, name, BOMB)
                connection = await wire.connection(20)
                while connection.budget.held_bytes < 20 * (len(BOMB) + 5):
                    await asyncio.sleep(0)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    assert run(main()) < 4 * 2**20


def test_nothing_is_held_after_a_storm_of_answers_resets_refusals_and_lost_connections():
    budgets = Budgets(2**20)

    async def main():
        async with serving(budgets=budgets) as served:
            for turn in range(3):
                async with Wire(served) as wire:
                    for number in range(60):
                        stream_id = 2 * number + 1
                        name = ("echo", "stuck", "sum")[number % 3]
                        wire.begin(stream_id, name, BOMB if number % 2 else gzip.compress(bytes(30_000)))
                        if number % 5 == turn:
                            wire.end(stream_id)
                        elif number % 5 == 4:
                            wire.writer.write(RstStreamFrame(stream_id).serialize())
                    wire.writer.write(PingFrame(0, b"finished").serialize())
                    await wire.reader.readuntil(b"finished")
                    seen.append(budgets.held_bytes)
            while served.listener.connections or budgets.held_bytes:
                await asyncio.sleep(0)

    seen: list[int] = []
    run(main())
    assert min(seen) > 0
    assert (budgets.held_bytes, budgets.key_free_bytes) == (0, 0)
    assert budgets.refused.total() > 0


def test_the_loop_goes_on_while_a_long_message_is_inflated(monkeypatch):
    go_on, threads = threading.Event(), []
    inflated = Compressed.inflated

    def slow(packed):
        threads.append(threading.current_thread())
        assert go_on.wait(10)
        return inflated(packed)

    monkeypatch.setattr(Compressed, "inflated", slow)

    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "echo", BOMB)
            wire.end(1)
            connection = await wire.connection(1)
            while not threads:
                await asyncio.sleep(0)
            other = (await unary(served, "echo")).value
            held = connection.budget.held_bytes
            go_on.set()
            while connection.budget.held_bytes:
                await asyncio.sleep(0)
            return other, held

    other, held = run(main())
    assert other == b"m"
    assert held >= len(BOMB)


def test_a_call_given_up_while_its_message_is_inflated_is_not_begun(monkeypatch):
    go_on, came = threading.Event(), threading.Event()
    inflated = Compressed.inflated

    def slow(packed):
        came.set()
        assert go_on.wait(10)
        return inflated(packed)

    monkeypatch.setattr(Compressed, "inflated", slow)

    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "hang", BOMB)
            wire.end(1)
            connection = await wire.connection(1)
            while not came.is_set():
                await asyncio.sleep(0)
            wire.writer.write(RstStreamFrame(1, 8).serialize())
            while connection._streams:
                await asyncio.sleep(0)
            go_on.set()
            await asyncio.get_running_loop().shutdown_default_executor()
            await asyncio.sleep(0)
            return served.service.began.is_set(), served.tasks

    assert run(main()) == (False, set())


@pytest.mark.parametrize("message", [BOMB, BOMB[:-50]], ids=["whole", "cut off"])
@pytest.mark.parametrize("name", ["each", "echo"])
def test_a_call_given_up_before_a_thread_inflates_its_message_leaves_nothing_held(name, message):
    go_on, budgets = threading.Event(), Budgets()
    wrong: list[object] = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: wrong.append(context))
        loop.set_default_executor(ThreadPoolExecutor(1))
        async with serving(budgets=budgets) as served, Wire(served) as wire:
            only_thread = loop.run_in_executor(None, go_on.wait, 10)
            wire.begin(1, name, message)
            if name == "echo":
                wire.end(1)
            while budgets.held_bytes < 2**20:
                await asyncio.sleep(0)
            connection = await wire.connection(1)
            wire.writer.write(RstStreamFrame(1, 8).serialize())
            while served.tasks or connection._streams:
                await asyncio.sleep(0)
            held = budgets.held_bytes
            go_on.set()
            await only_thread
            while budgets.held_bytes:
                await asyncio.sleep(0)
            return held

    assert run(main()) > 2**20
    assert wrong == []


def test_a_call_that_sent_its_message_and_no_end_is_given_up(monkeypatch):
    monkeypatch.setattr(incomplete_calls, "INCOMPLETE_TIMEOUT_S", 0.02)

    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "echo", gzip.compress(b""))
            return await wire.reader.readuntil(b"The rest of the call did not come in time")

    assert run(main())


def test_no_prediction_of_a_stream_of_requests_is_the_whole_call():
    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "stuck")
            await served.service.began.wait()
            served.service.scope.begin(served.service.metrics, Request("id", 0.0))
            return served.service.scope.request

    assert run(main()) is None


def test_a_compressed_message_that_is_none_ends_its_call_alone():
    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "echo", bytes(5000))
            wire.end(1)
            found = await wire.reader.readuntil(b"grpc-message")
            return found[found.index(b"grpc-status") :][:14], (await unary(served, "echo")).value

    assert run(main()) == (b"grpc-status\x0213", b"m")


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize("name", ["echo", "each"])
def test_a_message_for_which_no_thread_can_be_started_ends_its_call_alone(name):
    budgets = Budgets()

    async def main():
        async with serving(budgets=budgets) as served, Wire(served) as wire:
            wire.begin(1, name, BOMB)
            wire.end(1)
            found = await wire.reader.readuntil(b"grpc-message")
            wire.begin(3, "echo", gzip.compress(b""))
            wire.end(3)
            await wire.reader.readuntil(b"grpc-status\x010")
            return found[found.index(b"grpc-status") :][:14], budgets.held_bytes

    assert run(main()) == (b"grpc-status\x0213", 0)


def test_a_client_with_few_long_messages_ahead_waits(monkeypatch):
    monkeypatch.setattr(streams, "BYTES_AHEAD", 1000)

    async def main():
        async with serving() as served:

            async def requests():
                yield BytesValue(value=bytes(400))
                yield BytesValue(value=bytes(700))

            call = both(served, "slow", requests())
            while not served.listener.connections:
                await asyncio.sleep(0)
            (connection,) = served.listener.connections
            while not connection._streams:
                await asyncio.sleep(0)
            (stream,) = connection._streams.values()
            while not stream.paused:
                await asyncio.sleep(0)
            served.service.go.set()
            return [answer.value async for answer in call]

    assert run(main()) == [b"1100"]


def test_messages_that_nobody_takes_are_held_as_the_bytes_that_came():
    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "stuck", gzip.compress(b""))
            connection = await wire.connection(1)
            (stream,) = connection._streams.values()
            tracemalloc.start()
            try:
                for _ in range(200):  # messages of no bytes: two hundred thousand of them
                    wire.writer.write(DataFrame(1, bytes(5 * 1000)).serialize())
                while connection.budget.held_bytes < 1_000_000:
                    await asyncio.sleep(0)
                return len(stream.listener._messages), tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()

    waiting, traced_bytes = run(main())
    assert streams.MESSAGES_AHEAD <= waiting < 2 * streams.MESSAGES_AHEAD
    assert traced_bytes < 3_000_000


def test_a_stream_that_ended_keeps_no_messages_while_its_answers_wait_for_the_client():
    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.writer.write(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}).serialize())
            wire.begin(1, "each", gzip.compress(BytesValue(value=bytes(100_000)).SerializeToString()))
            connection = await wire.connection(1)
            (stream,) = connection._streams.values()
            for _ in range(200):
                wire.writer.write(DataFrame(1, bytes(5 * 1000)).serialize())
            while unsplit(stream) < 900_000 or stream.unsent_bytes < 100_000:
                await asyncio.sleep(0)
            call = stream.listener
            assert call._messages
            call._expire()  # as its deadline does
            assert connection._streams == {1: stream}
            return connection.budget.held_bytes, unsplit(stream), len(call._messages)

    assert run(main()) == (0, 0, 0)


@pytest.mark.parametrize("ends", ["with the last message", "later"])
def test_messages_that_came_while_nobody_took_any_are_all_taken_in_the_end(ends):
    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "slow", gzip.compress(b""))
            connection = await wire.connection(1)
            data = (b"\0\0\0\0\3" + BytesValue(value=b"x").SerializeToString()) * 1000
            flags = ["END_STREAM"] if ends == "with the last message" else []
            wire.writer.write(
                DataFrame(1, data).serialize() + DataFrame(1, data[8:], flags=flags).serialize()
            )
            (stream,) = connection._streams.values()
            while unsplit(stream) < 15_000:
                await asyncio.sleep(0)
            served.service.go.set()
            if ends == "later":
                while connection.budget.held_bytes:
                    await asyncio.sleep(0)
                wire.end(1)
            return await wire.reader.readuntil(b"1999")

    assert run(main())


def test_the_last_messages_of_a_stream_of_requests_are_held_until_they_are_taken():
    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "slow")
            connection = await wire.connection(1)
            (stream,) = connection._streams.values()
            message = BytesValue(value=bytes(1000)).SerializeToString()
            data = (b"\0" + len(message).to_bytes(4, "big") + message) * 100
            wire.writer.write(DataFrame(1, data, flags=["END_STREAM"]).serialize())
            while stream.remote_open:
                await asyncio.sleep(0)
            held = connection.budget.held_bytes
            served.service.go.set()
            await wire.reader.readuntil(b"grpc-status\x010")
            return held - len(data), connection.budget.held_bytes

    assert run(main()) == (0, 0)


def test_others_have_their_turn_between_many_small_messages_that_are_there_already():
    """A method that waits for nothing would keep the loop until the last of them."""

    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "slow")
            connection = await wire.connection(1)
            wire.writer.write(
                DataFrame(1, (b"\0\0\0\0\3" + BytesValue(value=b"x").SerializeToString()) * 2000).serialize()
            )
            wire.end(1)
            (stream,) = connection._streams.values()
            while stream.remote_open:
                await asyncio.sleep(0)
            served.service.go.set()
            turns = 0
            while not stream.ended:
                turns += 1
                await asyncio.sleep(0)
            return turns

    assert run(main()) > 2000 // streams.MESSAGES_AHEAD // 2


def test_a_message_that_can_not_be_taken_behind_others_ends_the_call():
    async def main():
        async with serving() as served, Wire(served) as wire:
            wire.begin(1, "slow", gzip.compress(b""))
            connection = await wire.connection(1)
            wire.writer.write(DataFrame(1, bytes(500) + b"\0\xff\xff\xff\xff").serialize())
            (stream,) = connection._streams.values()
            while unsplit(stream) < 400:
                await asyncio.sleep(0)
            served.service.go.set()
            found = await wire.reader.readuntil(b"grpc-message")
            return found[found.index(b"grpc-status") :][:13]

    assert run(main()) == b"grpc-status\x018"
