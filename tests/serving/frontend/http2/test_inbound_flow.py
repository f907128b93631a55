"""What a client may send, and what becomes of one that sends more."""

import asyncio
import contextlib
from socket import SO_SNDBUF, SOL_SOCKET
from types import SimpleNamespace
from typing import Any

import pytest
from hyperframe.frame import DataFrame, HeadersFrame, RstStreamFrame, SettingsFrame

from torchere.serving.frontend.http2 import flow_control
from torchere.serving.frontend.http2.flow_control import InboundFlow
from torchere.serving.frontend.http2.frames import ConnectionBroken, window_update

UNUSED: Any = None


def test_a_message_longer_than_the_window_comes_with_leave(run, http2):
    message = bytes(range(256)) * 24_000  # 6 MB

    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/echo", end=False)
            await peer.say_all(stream_id, http2.prefixed(message), end=True)
            return await peer.answered(stream_id)

    assert run(main()).messages == [message]


def test_data_without_leave_ends_its_stream_alone(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            piece = DataFrame(1, bytes(2**20))
            wire.greet(HeadersFrame(1, wire.block("/hold"), flags=["END_HEADERS"]))
            message = b"\0" + (7 * 2**20).to_bytes(4, "big")
            wire.send(DataFrame(1, http2.prefixed(b"first")), DataFrame(1, message), *[piece] * 4)
            wire.send(HeadersFrame(3, wire.block("/refuse"), flags=["END_HEADERS", "END_STREAM"]))
            reset = await wire.next(RstStreamFrame)
            answer = await wire.next(HeadersFrame)
            return reset.stream_id, reset.error_code, answer.stream_id, served.calls[0].ended_by

    assert run(main()) == (1, 3, 3, "gone")


def test_data_without_leave_on_the_connection_ends_it():
    flow = InboundFlow(2**20, lambda data: None, UNUSED)
    with pytest.raises(ConnectionBroken, match="leave"):
        flow.consume(None, flow_control.CONNECTION_WINDOW_BYTES + 1)


def test_the_connection_gets_leave_for_just_what_came_once_half_of_it_is_used_up():
    told: list[bytes] = []
    flow = InboundFlow(2**20, told.append, UNUSED)
    half = flow_control.CONNECTION_WINDOW_BYTES // 2
    flow.consume(None, half - 1)
    assert told == []
    for size in (1, half - 1, 1):
        flow.consume(None, size)
    assert told == [window_update(0, half)] * 2
    flow.consume(None, 2 * half)
    with pytest.raises(ConnectionBroken, match="leave"):
        flow.consume(None, 2 * half + 1)


@pytest.mark.parametrize(
    ("received_bytes", "remote_open", "paused", "is_told"),
    [
        (flow_control.STREAM_WINDOW_BYTES // 2, True, False, True),
        (flow_control.STREAM_WINDOW_BYTES // 2 - 1, True, False, False),
        (flow_control.STREAM_WINDOW_BYTES, False, False, False),
        (flow_control.STREAM_WINDOW_BYTES, True, True, False),
    ],
    ids=["half", "less than half", "ended", "paused"],
)
def test_a_stream_gets_leave_once_half_of_it_is_used_up(received_bytes, remote_open, paused, is_told):
    told: list[bytes] = []
    stream: Any = SimpleNamespace(
        id=1, allowed_bytes=flow_control.STREAM_WINDOW_BYTES, received_bytes=received_bytes
    )
    stream.remote_open, stream.paused = remote_open, paused
    InboundFlow(2**20, told.append, UNUSED).extend(stream)
    assert told == ([window_update(1, received_bytes)] if is_told else [])


def test_a_stream_that_nobody_reads_does_not_stop_others(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            for _ in range(5):
                stuck = peer.begin("/hold", b"first", end=False)
                await peer.round_trip()
                rest = 4 * 2**20 - 10
                await peer.say_all(stuck, b"\0" + (2**23).to_bytes(4, "big") + bytes(rest - 5))
            assert peer.h2.local_flow_control_window(stuck) == 0
            return await peer.call("/echo", bytes(100_000))

    assert run(main()).messages == [bytes(100_000)]


def test_a_paused_stream_gets_leave_when_it_is_resumed(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/hold", b"first", end=False)
            await peer.say_all(stream_id, b"\0" + (5 * 2**20).to_bytes(4, "big") + bytes(4 * 2**20 - 15))
            await peer.round_trip()
            before = peer.h2.local_flow_control_window(stream_id)
            served.calls[0].stream.resume()
            await peer.until(lambda: peer.h2.local_flow_control_window(stream_id) > 0)
            await peer.say_all(stream_id, bytes(2**20 + 15), end=True)
            await served.calls[0].over.wait()
            call = served.calls[0]
            return before, call.ended_by, [len(message) for message in call.messages]

    assert run(main()) == (0, "half_closed", [5, 5 * 2**20])


def test_a_client_that_asks_and_never_reads_is_cut_off(run, http2, monkeypatch):
    monkeypatch.setattr("torchere.serving.frontend.http2.connection.MAX_UNREAD_BYTES", 100_000)

    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.greet()
            await wire.next(SettingsFrame)
            (connection,) = served.listener.connections
            connection._transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, 10_000)
            first = 1
            with contextlib.suppress(ConnectionError):
                while served.listener.connections:
                    wire.send(wire.calls("/refuse", 1000, first=first, flags=5))
                    first += 2000
                    await asyncio.wait_for(wire.writer.drain(), 10)
            return len(served.calls)

    assert run(main()) < 200_000
