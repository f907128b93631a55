"""Frames that move nothing: a flood of them ends the connection, what comes with ordinary calls does not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from h2.settings import SettingCodes
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from torchere.serving.frontend.budgets import FLOOD
from torchere.serving.frontend.http2 import connection
from torchere.serving.frontend.http2 import flood_guard as module
from torchere.serving.frontend.http2.flood_guard import IDLE_FRAMES, FloodGuard
from torchere.serving.frontend.http2.frames import ConnectionBroken
from torchere.serving.frontend.http2.listener import Listener

ENHANCE_YOUR_CALM = 11


@pytest.fixture
def clock(monkeypatch):
    """`clock.now_s` is what the module reads."""
    made = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


def quiet():
    return 0


def test_frames_that_move_nothing_now_and_then_are_no_flood(clock):
    guard = FloodGuard(quiet)
    for _ in range(20 * IDLE_FRAMES):
        clock.now_s += module.INTERVAL_S / IDLE_FRAMES * 1.1
        guard.count()


def test_frames_that_move_nothing_in_a_short_time_are_one_too_many(clock):
    guard = FloodGuard(quiet)
    with pytest.raises(ConnectionBroken):
        for _ in range(2 * IDLE_FRAMES):
            guard.count()


def no_call(stream):
    raise AssertionError("no call is opened")


def connection_with(answers=0, sends=0, sent_bytes=0):
    made = connection.Connection(Listener(no_call, 1, 1))
    made._answers, made.outbound.sends, made.outbound.sent_bytes = answers, sends, sent_bytes
    return made


@pytest.mark.parametrize(
    ("answers", "sends", "sent_bytes", "earned"),
    [(0, 0, 0, 0), (100, 0, 0, 400), (0, 100, 0, 400), (0, 0, 100 * 1024, 100)],
)
def test_so_many_frames_pass_and_no_more(clock, answers, sends, sent_bytes, earned):
    async def main():
        guard = connection_with(answers, sends, sent_bytes)._flood
        passed = 0
        with pytest.raises(ConnectionBroken):
            while passed < 10 * IDLE_FRAMES:
                guard.count()
                passed += 1
        return passed

    assert asyncio.run(main()) == 2 * (IDLE_FRAMES - 1) + earned


@pytest.mark.parametrize("answers_a_frame", [1, 0.3])
def test_a_client_that_is_answered_may_send_more(clock, answers_a_frame):
    async def main():
        made = connection_with()
        for number in range(50 * IDLE_FRAMES):
            made._answers = int(number * answers_a_frame)
            made._flood.count()

    asyncio.run(main())


def test_long_answers_may_be_acknowledged_bit_by_bit(clock):
    async def main():
        made = connection_with()
        for _ in range(50):
            made.outbound.sends += 6
            made.outbound.sent_bytes += 6 * 2**20
            made._flood.count(6 * 2**20 // 4096)

    asyncio.run(main())


def test_answers_of_long_ago_do_not_count_for_ever(clock):
    earned = connection.EARNED_BY_ANSWER * IDLE_FRAMES
    guard = FloodGuard(lambda: earned)
    guard.count(IDLE_FRAMES)
    clock.now_s += module.INTERVAL_S
    with pytest.raises(ConnectionBroken):
        for _ in range((2 + connection.EARNED_BY_ANSWER) * IDLE_FRAMES):  # once
            guard.count()


FLOODS: dict[str, Any] = {
    "ping": PingFrame(0, bytes(8)),
    "ping answer": PingFrame(0, bytes(8), flags=["ACK"]),
    "settings": SettingsFrame(0, {4: 100_000}),
    "settings answer": SettingsFrame(0, flags=["ACK"]),
    "empty data": DataFrame(1),
    "padding alone": DataFrame(1, b"", pad_length=10, flags=["PADDED"]),
    "priority": b"\0\0\5\2\0\0\0\0\1" + bytes(5),
    "unknown": b"\0\0\0\xee\0\0\0\0\1",
    "leave for nothing": WindowUpdateFrame(0, 1),
    "leave for nothing on a stream": WindowUpdateFrame(1, 1),
    "goodbye": GoAwayFrame(0, 0),
}


@pytest.mark.parametrize("kind", list(FLOODS))
def test_a_flood_of_frames_that_move_nothing_is_ended_calmly(run, http2, kind):
    one = FLOODS[kind]
    sent = one.serialize() if isinstance(one, Frame) else one

    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.greet(HeadersFrame(1, wire.block("/hang"), flags=["END_HEADERS"]), sent * 2500)
            goaway = await wire.next(GoAwayFrame)
            return goaway.error_code

    assert run(main()) == 11


@pytest.mark.parametrize("flags", [["END_STREAM"], ["END_STREAM", "PADDED"]], ids=["plain", "padded"])
def test_empty_data_that_ends_calls_is_no_flood(run, http2, monkeypatch, flags):
    monkeypatch.setattr(module, "IDLE_FRAMES", 100)

    async def main():
        async with http2.greeted() as (_, wire):
            end = DataFrame(1, flags=flags).serialize()  # as node's client ends each call
            wire.send(wire.calls("/hang", 200, end), PingFrame(0, bytes(8)))
            return await wire.next(PingFrame)

    assert run(main()) is not None


OF_CLOSED_STREAMS: dict[str, Any] = {
    "reset": RstStreamFrame(1, 8),
    "leave": WindowUpdateFrame(1, 1),
    "trailers": b"\0\0\4\1\5\0\0\0\1\x0f\0\1x",
    "data of two": DataFrame(1, b"x").serialize() + DataFrame(3, b"x").serialize(),
}


@pytest.mark.parametrize("kind", list(OF_CLOSED_STREAMS))
def test_a_flood_of_frames_for_a_call_that_is_over_is_ended_calmly(run, http2, kind):
    one = OF_CLOSED_STREAMS[kind]
    sent = one.serialize() if isinstance(one, Frame) else one

    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.greet(wire.calls("/refuse", 2, flags=5), sent * 2500)
            return (await wire.next(GoAwayFrame)).error_code

    assert run(main()) == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("flags", [4, 5])
def test_a_flood_of_calls_given_up_before_they_said_anything_is_ended_calmly(run, http2, flags):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.greet(wire.calls("/hang", 2500, RstStreamFrame(1, 8).serialize(), flags=flags))
            goaway = await wire.next(GoAwayFrame)
            return goaway.error_code, len(served.calls)

    code, calls = run(main())
    assert code == ENHANCE_YOUR_CALM
    assert calls <= 2 * IDLE_FRAMES


def test_a_flood_of_calls_that_break_their_rules_is_ended_calmly(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            message = DataFrame(1, http2.prefixed(b"m"), flags=["END_STREAM"]).serialize()
            broken = b"\0\0\4\x08\0\0\0\0\1" + bytes(4)  # leave for nothing at all
            wire.greet(wire.calls("/hang", 2500, message, broken))
            return (await wire.next(GoAwayFrame)).error_code

    assert run(main()) == ENHANCE_YOUR_CALM


async def served_after_all(http2, served, wire, stream_id):
    """What a call is answered with, if the connection is still there."""
    wire.send(HeadersFrame(stream_id, wire.block("/echo"), flags=["END_HEADERS"]))
    wire.send(DataFrame(stream_id, http2.prefixed(b"m"), flags=["END_STREAM"]))
    while (frame := await wire.frame()) is not None and type(frame) is not GoAwayFrame:
        if frame.stream_id == stream_id and type(frame) is DataFrame:
            return frame.data
    return frame


def test_calls_given_up_while_they_are_answered_are_no_flood(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.greet()
            message = DataFrame(1, http2.prefixed(b"m"), flags=["END_STREAM"]).serialize()
            reset = RstStreamFrame(1, 8).serialize()
            wire.send(wire.calls("/hang", 5000, message, reset))  # in time
            wire.send(wire.calls("/echo", 5000, message, reset, first=10_001))  # too late
            return await served_after_all(http2, served, wire, 30_001)

    assert run(main()) == http2.prefixed(b"m")


def test_a_client_that_acknowledges_every_answer_by_itself_is_no_flood(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            wire.greet()
            message = DataFrame(1, http2.prefixed(b"m"), flags=["END_STREAM"]).serialize()
            leave = WindowUpdateFrame(1, 6).serialize()
            of_connection = WindowUpdateFrame(0, 6).serialize()
            wire.send(wire.calls("/echo", 5000, message, leave, of_connection))
            return await served_after_all(http2, served, wire, 30_001)

    assert run(main()) == http2.prefixed(b"m")


def test_leave_that_lets_bytes_through_is_no_flood(run, http2):
    async def main():
        settings = {SettingCodes.INITIAL_WINDOW_SIZE: 1}
        async with http2.listener() as served, http2.peer(served, settings=settings, eats=False) as peer:
            stream_id = peer.begin("/echo", bytes(3000))
            for _ in range(3004):
                peer.h2.increment_flow_control_window(1, stream_id)
            peer.flush()
            return await peer.answered(stream_id)

    assert run(main()).messages == [bytes(3000)]


def test_data_that_crosses_with_its_answer_is_no_flood(run, http2):
    async def main():
        async with http2.greeted() as (_, wire):
            wire.send(wire.calls("/refuse", 2))
            late = DataFrame(1, bytes(128)).serialize(), DataFrame(3, bytes(128)).serialize()
            wire.send(b"".join(late) * 2 * IDLE_FRAMES, PingFrame(0, b"12345678"))
            return (await wire.next(PingFrame)) is not None

    assert run(main())


def test_a_flood_of_calls_given_up_after_their_whole_request_is_ended_calmly(run, http2, monkeypatch):
    monkeypatch.setattr(connection, "CANCELLATIONS", 3000)

    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            message = DataFrame(1, http2.prefixed(b"m"), flags=["END_STREAM"]).serialize()
            wire.greet(wire.calls("/hang", 7000, message, RstStreamFrame(1, 8).serialize()))
            goaway = await wire.next(GoAwayFrame)
            return goaway.error_code, len(served.calls), served.listener.budgets.refused[FLOOD]

    code, calls, refused = run(main())
    assert (code, refused) == (ENHANCE_YOUR_CALM, 1)
    assert calls <= 2 * 3000
