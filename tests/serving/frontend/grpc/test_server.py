"""What every gRPC port has: keys, health, reflection, and addresses."""

import asyncio
import random
import socket
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import uvloop
from google.protobuf import empty_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame, PingFrame, SettingsFrame

from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.budgets import WATCHES, Budgets
from torchere.serving.frontend.dataplane import Readiness
from torchere.serving.frontend.grpc import call as calls
from torchere.serving.frontend.grpc import health
from torchere.serving.frontend.grpc.errors import MANAGEMENT
from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2
from torchere.serving.frontend.grpc.server import grpc_listeners, inference_server
from torchere.serving.frontend.grpc.service import service
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import InferResponse, StreamedResponse

REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
WATCH = "/grpc.health.v1.Health/Watch"
SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"


def bearer(kind):
    return (("authorization", f"Bearer {kind}"),)


@pytest.mark.parametrize("metadata", [(), bearer("management"), (("authorization", "inference"),)])
def test_without_its_key_no_method_answers(refusal, planes, metadata):
    found = refusal("inference", "Ping", empty_pb2.Empty(), settings={"keys": planes.keys}, metadata=metadata)
    assert found == ("PERMISSION_DENIED", REFUSED)


def test_with_its_key_a_method_answers(ask_grpc, planes):
    keys = {"keys": planes.keys}
    ask_grpc("inference", "Ping", empty_pb2.Empty(), settings=keys, metadata=bearer("inference"))
    wish = management_pb2.ListModelsRequest()
    answer = ask_grpc("management", "ListModels", wish, settings=keys, metadata=bearer("management"))
    assert "echo" in answer.msg


async def silence():
    await asyncio.Event().wait()
    yield


@pytest.mark.parametrize("method", ["StreamPredictions", "StreamPredictions2"])
def test_streams_need_the_key_too(serving, planes, method):
    async def main():
        async with serving("inference", keys=planes.keys) as served:
            # Of grpcio's client, a message that crosses with the refusal may fail by itself.
            wanted = (
                silence() if method.endswith("2") else inference_pb2.PredictionsRequest(model_name="echo")
            )
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in served.call(method, wanted, timeout=20):
                    raise AssertionError("nothing may be answered")
        return failed.value.code()

    assert asyncio.run(main()) is grpc.StatusCode.PERMISSION_DENIED
    assert planes.data.asked == []


def check(channel, service):
    call = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    return call(health_pb2.HealthCheckRequest(service=service), timeout=20)


@pytest.mark.parametrize("service", ["", SERVICE])
def test_the_health_service_tells_readiness_without_a_key(serving, planes, service):
    async def main():
        async with serving("inference", keys=planes.keys) as served:
            before = await check(served.channel, service)
            planes.data.is_ready = Readiness(False)
            return before.status, (await check(served.channel, service)).status

    assert asyncio.run(main()) == (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )


def test_the_health_of_an_unknown_service_is_not_found(serving):
    async def main():
        async with serving("inference") as served:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await check(served.channel, "nope" * 100)
            return failed.value.code(), str(failed.value.details()).splitlines()[0]

    text = f"There is no service {'nope' * 25!r} here."  # cut: anybody may have it said again and again
    assert asyncio.run(main()) == (grpc.StatusCode.NOT_FOUND, text)


def watch(channel, service):
    call = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    return call(health_pb2.HealthCheckRequest(service=service), timeout=20)


@pytest.mark.parametrize(
    ("service", "told"),
    [
        ("", [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]),
        ("x", [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]),
    ],
)
def test_health_is_watched_until_the_connection_ends(serving, planes, monkeypatch, service, told):
    monkeypatch.setattr(health, "LOOK_S", 0.01)

    async def main():
        async with serving("inference") as served:
            watching = watch(served.channel, service)
            found = [(await watching.read()).status]
            coming = asyncio.ensure_future(watching.read())
            await check(served.channel, "")  # behind whatever the watching call brought
            goes_on = not coming.done()
            planes.data.is_ready = Readiness(False)
            stopping = asyncio.ensure_future(served.server.stop(60))
            while (message := await coming) is not grpc.aio.EOF:
                found.append(message.status)
                coming = asyncio.ensure_future(watching.read())
            await stopping
            return goes_on, found, await watching.code()

    assert asyncio.run(main()) == (True, told, grpc.StatusCode.OK)


def test_a_change_that_is_announced_is_told_to_every_watch_at_once(serving, planes, monkeypatch):
    monkeypatch.setattr(health, "LOOK_S", 3600)

    async def main():
        async with serving("inference") as served:
            watches = [watch(served.channel, service) for service in ("", SERVICE, "")]
            found = [[(await one.read()).status for one in watches]]
            planes.data.is_ready = Readiness(False)
            for listener in list(planes.data.readiness_listeners):
                listener()
            found.append([(await one.read()).status for one in watches])
            for one in watches:
                one.cancel()
            while planes.data.readiness_listeners:  # until the cancellations have arrived
                await asyncio.sleep(0)
            return found

    serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert asyncio.run(main()) == [[serving_] * 3, [not_serving] * 3]


@pytest.mark.parametrize(
    ("method", "parts"), [("Predictions", 0), ("StreamPredictions", 1), ("StreamPredictions2", 1)]
)
def test_a_call_that_outlasts_the_stop_is_told_so_and_its_work_is_stopped(serving, planes, method, parts):
    began, stopped = asyncio.Event(), asyncio.Event()

    async def made():
        try:
            yield b"first"
            began.set()
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def behave(request):
        return StreamedResponse(InferResponse(b""), made())

    planes.data.behave = behave

    async def main():
        async with serving("inference") as served:
            request = inference_pb2.PredictionsRequest(
                model_name="echo", input={"data": b"x"}, sequence_id="s"
            )
            told = served.call(method, iter([request]) if method.endswith("2") else request, timeout=20)
            found = [await told.read() for _ in range(parts)]
            await began.wait()
            await served.server.stop(0.05)
            await asyncio.wait_for(stopped.wait(), 5)
            return [one.prediction for one in found], await told.code(), await told.details()

    code = grpc.StatusCode.UNAVAILABLE
    assert asyncio.run(main()) == ([b"first"] * parts, code, "The server is shutting down: call again")


class WatchStream:
    """A stream that keeps what it sends; it has a connection of its own unless one is named."""

    def __init__(self, connection=None):
        self.connection = connection or self
        self.head, self.timeout_s, self.client = SimpleNamespace(metadata=()), None, None
        self.sent, self.ended, self.code = [], False, None
        self.key_free = True

    def consumed_all(self):
        """Nothing is held."""

    def send(self, message):
        self.sent.append(health_pb2.HealthCheckResponse.FromString(message).status)

    def end(self, code=0, *status):
        self.ended, self.code = True, code


def test_a_thousand_idle_watches_cost_one_look_and_one_timer(planes, monkeypatch):
    looks, timers = [], []
    ready = planes.data.readiness

    def readiness():
        looks.append(1)
        return ready()

    monkeypatch.setattr(planes.data, "readiness", readiness)

    async def main():
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def call_later(*args):
            timers.append(args)
            return later(*args)

        monkeypatch.setattr(loop, "call_later", call_later)
        tasks: set[asyncio.Task[object]] = set()
        health_service = health.HealthService(planes.data, frozenset({SERVICE}))
        opened = service(health.HEALTH, health_service.methods(), MANAGEMENT)(tasks, planes.metrics)[WATCH]
        streams: list[Any] = [WatchStream() for _ in range(1000)]
        calls = [opened(stream) for stream in streams]
        for call in calls:
            call.on_message(b"")
            call.on_half_close()
        made = len(timers)
        looks.clear()
        health_service._look_again()  # the timer, which is a second away
        idle = len(looks), len(timers) - made
        planes.data.is_ready = Readiness(False)
        health_service._look_again()
        told = {tuple(stream.sent) for stream in streams}
        for call in calls[:500]:
            call.on_cancel()
        for call in calls[500:]:
            call.on_drain(is_stop=True)
        left = health_service._timer, planes.data.readiness_listeners, tasks
        return made, idle, told, left, sum(stream.ended for stream in streams)

    made, idle, told, left, ended = asyncio.run(main())
    assert (made, idle) == (1, (1, 1))
    assert told == {(health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)}
    assert left == (None, set(), set())
    assert ended == 500


def test_a_watch_that_begins_while_the_connection_drains_is_told_and_ended(planes):
    async def main():
        health_service = health.HealthService(planes.data, frozenset())
        stream: Any = WatchStream()
        call = service(health.HEALTH, health_service.methods(), MANAGEMENT)(set(), Metrics())[WATCH](stream)
        call.on_drain(is_stop=True)
        before = stream.ended
        call.on_message(b"")
        call.on_half_close()
        return before, stream.sent, stream.ended, health_service._timer

    assert asyncio.run(main()) == (False, [health_pb2.HealthCheckResponse.SERVING], True, None)


def watching(health_service, stream, service_name=b""):
    """A watch that has begun."""
    call = service(health.HEALTH, health_service.methods(), MANAGEMENT)(set(), Metrics())[WATCH](stream)
    call.on_message(service_name)
    call.on_half_close()
    return call


@pytest.mark.parametrize("service_name", [b"", b"\n\1x"], ids=["known", "unknown"])
def test_a_connection_has_a_limit_of_watches_and_so_have_all_of_them(planes, monkeypatch, service_name):
    monkeypatch.setattr(health, "MAX_CONNECTION_WATCHES", 3)
    monkeypatch.setattr(health, "MAX_WATCHES", 5)

    async def main():
        budgets = Budgets()
        health_service = health.HealthService(planes.data, frozenset(), budgets)
        greedy = [WatchStream("greedy") for _ in range(5)]
        calls = [watching(health_service, stream, service_name) for stream in greedy]
        found = [[stream.code for stream in greedy]]
        others = [WatchStream() for _ in range(3)]  # the third one ends the oldest watch of all
        calls += [watching(health_service, stream, service_name) for stream in others]
        more = WatchStream("greedy")  # which ends none of the others
        watching(health_service, more, service_name)
        found.append([stream.code for stream in (*greedy[:3], *others, more)])
        for call in calls:
            call.on_cancel()
        return found, budgets.refused[WATCHES], health_service._held, health_service._timer

    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    found, refused, held, timer = asyncio.run(main())
    assert found == [
        [None, None, None, exhausted, exhausted],
        [exhausted, None, None, None, None, None, exhausted],
    ]
    assert (refused, held, timer) == (4, {}, None)


def test_a_watch_ends_at_its_deadline(serving, planes, monkeypatch):
    monkeypatch.setattr(calls, "LATE_S", -19.9)  # long before the client gives up

    async def main():
        async with serving("inference") as served:
            watching = watch(served.channel, "")
            found = [one.status async for one in until_failed(watching)]
            return found, await watching.code(), planes.data.readiness_listeners

    assert asyncio.run(main()) == (
        [health_pb2.HealthCheckResponse.SERVING],
        grpc.StatusCode.DEADLINE_EXCEEDED,
        set(),
    )


async def until_failed(call):
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError:
        return


def test_reflection_lists_the_services_of_the_port(serving):
    async def main():
        async with serving("management") as served:
            call = served.channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                reflection_pb2.ServerReflectionRequest.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            wanted = [reflection_pb2.ServerReflectionRequest(list_services="")]
            answers = [answer async for answer in call(iter(wanted), timeout=20)]
            return {service.name for service in answers[0].list_services_response.service}

    assert asyncio.run(main()) == {
        "org.pytorch.serve.grpc.management.ManagementAPIsService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_the_settings_say_which_ports_to_open(planes):
    def opened(**settings):
        services: Any = SimpleNamespace(
            settings=ServerSettings(**settings),
            keys=None,
            metrics=None,
            budgets=Budgets(),
            client_limits=None,
        )
        return [server.api for server in grpc_listeners(planes.data, planes.control, services)]

    assert opened() == ["inference", "management"]
    assert opened(grpc_management_address=None) == ["inference"]
    assert opened(grpc_inference_address=None, grpc_management_address=None) == []


def test_a_body_of_the_greatest_size_has_room_for_what_is_around_it(planes):
    services = planes.services(max_request_bytes=1000)
    for made in grpc_listeners(planes.data, planes.control, services):
        limits = made._listener.receive_limit_bytes, made._listener.send_limit_bytes
        assert limits == (1000 + 4096, services.settings.limits.max_response_bytes + 4096)


def test_a_server_that_did_not_start_can_be_stopped(planes):
    asyncio.run(inference_server(planes.data, planes.control, planes.services(), Address(port=0)).stop(1))


def test_a_port_that_is_taken_is_an_error_at_the_start(serving, planes):
    async def main():
        async with serving("inference") as served:
            with pytest.raises(OSError, match="Address already in use"):
                await inference_server(planes.data, planes.control, planes.services(), served.address).start()

    asyncio.run(main())


def test_tls_without_files_is_an_error_at_the_start(planes):
    async def main():
        services = planes.services(grpc_tls_enabled=True)
        with pytest.raises(OSError, match="needs private_key_file"):
            await inference_server(planes.data, planes.control, services, Address(port=0)).start()

    asyncio.run(main())


def test_a_unix_socket_serves_and_is_gone_afterwards(planes, tmp_path):
    path = tmp_path / "grpc.sock"

    def ask():  # of grpcio's clients, the other one
        with grpc.insecure_channel(f"unix:{path}") as channel:
            return check(channel, SERVICE).status

    async def main():
        address = Address(unix_path=str(path))
        server = inference_server(planes.data, planes.control, planes.services(), address)
        await server.start()
        try:
            return await asyncio.to_thread(ask)
        finally:
            await server.stop(1)

    assert asyncio.run(main()) == health_pb2.HealthCheckResponse.SERVING
    assert not path.exists()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_unspecified_address_of_ipv6_takes_ipv4_too(planes, new_loop):
    def ask(host, port):
        with grpc.insecure_channel(f"{host}:{port}") as channel:
            return check(channel, SERVICE).status

    async def main():
        server = inference_server(planes.data, planes.control, planes.services(), Address("::", 0))
        address = await server.start()
        try:
            return [await asyncio.to_thread(ask, host, address.port) for host in ("127.0.0.1", "[::1]")]
        finally:
            await server.stop(1)

    loop = new_loop()
    try:
        assert loop.run_until_complete(main()) == [health_pb2.HealthCheckResponse.SERVING] * 2
    finally:
        loop.close()


def test_connections_over_tcp_are_kept_alive(serving):
    async def main():
        async with serving("inference") as served:
            await check(served.channel, "")
            (connection,) = served.server._listener.connections
            sock = connection._transport.get_extra_info("socket")
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize(("pick", "factor"), [(min, 0.9), (max, 1.1)])
def test_connections_grow_as_old_as_the_settings_say_and_not_all_at_once(planes, monkeypatch, pick, factor):
    monkeypatch.setattr(random, "uniform", lambda *ends: pick(ends))
    services = planes.services(
        grpc_inference_max_connection_age_ms=2000,
        grpc_inference_max_connection_age_grace_ms=500,
        grpc_management_max_connection_age_ms=4000,
    )
    found = [made._listener for made in grpc_listeners(planes.data, planes.control, services)]
    assert [shared.new_age_s() for shared in found] == pytest.approx([2 * factor, 4 * factor])
    assert [shared.age_grace_s for shared in found] == [0.5, None]


def test_a_call_with_too_much_metadata_ends_alone(serving):
    async def main():
        async with serving("inference") as served:
            watching = watch(served.channel, "")
            await watching.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await served.call("Ping", empty_pb2.Empty(), timeout=20, metadata=(("x-long", "v" * 20_000),))
            await served.call("Ping", empty_pb2.Empty(), timeout=20)
            goes_on = not watching.done()
            watching.cancel()
            return refused.value.code(), goes_on

    assert asyncio.run(main()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


TOO_MUCH = {
    "a long name": (b"\x0a\x80\x08" + b"x" * 1024, grpc.Compression.NoCompression),
    "fields of two bytes": (b"\x10\0" * 32_768, grpc.Compression.NoCompression),
    "megabytes compressed": (b"\x10\0" * 400_000, grpc.Compression.Gzip),
}


@pytest.mark.parametrize(("message", "compression"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_the_health_service_takes_short_messages_only(serving, monkeypatch, message, compression):
    read = []
    monkeypatch.setattr(health.HealthService, "check", lambda *seen: read.append(seen))

    async def main():
        async with serving("inference", max_request_bytes=2**20) as served:
            check_bytes = served.channel.unary_unary("/grpc.health.v1.Health/Check", bytes, bytes)
            call = check_bytes(message, compression=compression, timeout=20)
            return await call.code(), await call.details(), served.server._listener.budgets.held_bytes

    code, details, held = asyncio.run(main())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details.startswith("SERVER: Received message larger than max (")
    assert details.endswith(" vs. 1024)")
    assert (read, held) == ([], 0)


async def half_messages(port, calls, size):
    """Begin calls of the health service that end in the middle of their message; returns the writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize())
    encoder = Encoder()
    path = "/grpc.health.v1.Health/Check"
    for stream_id in range(1, 2 * calls, 2):
        block = encoder.encode([(":method", "POST"), (":path", path), ("content-type", "application/grpc")])
        writer.write(HeadersFrame(stream_id, block, flags=["END_HEADERS"]).serialize())
        message = b"\0" + (size + 1).to_bytes(4, "big") + bytes(size - 5)
        writer.write(DataFrame(stream_id, message).serialize())
    writer.write(PingFrame(0, b"finished").serialize())
    await reader.readuntil(b"finished")
    return writer


def test_unfinished_health_calls_have_a_small_budget_of_their_own(serving):
    budgets = Budgets(2**25)
    budgets.key_free_limit_bytes = 10_000

    async def main():
        async with serving("inference", budgets=budgets) as served:
            writers = [await half_messages(served.address.port, 20, 500) for _ in range(4)]
            held, code = budgets.held_bytes, await check(served.channel, "").code()
            for writer in writers:
                writer.transport.abort()
            while budgets.held_bytes:
                await asyncio.sleep(0)
            return held, code

    assert asyncio.run(main()) == (10_000, grpc.StatusCode.OK)
    assert budgets.refused["key_free"] == 60
    assert budgets.key_free_bytes == 0
