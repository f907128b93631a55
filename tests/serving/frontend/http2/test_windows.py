"""Real clients that give leave bit by bit, take it back, or give more than there can be."""

import asyncio

import pytest
from h2.settings import SettingCodes
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

WINDOW = SettingCodes.INITIAL_WINDOW_SIZE
FRAME = SettingCodes.MAX_FRAME_SIZE
LARGEST = 2**31 - 1  # of windows


@pytest.mark.parametrize("window", [1, 7, 1000])
def test_a_tiny_window_lets_an_answer_through_bit_by_bit(run, http2, window):
    message = bytes(range(256)) * 4

    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: window}) as peer:
            return await peer.call("/echo", message)

    answer = run(main())
    assert (answer.messages, answer.status) == ([message], "0")


def test_a_window_of_nothing_holds_an_answer_until_it_grows(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served, settings={WINDOW: 0}) as peer:
            stream_id = peer.begin("/echo", b"message")
            await served_call(served)
            await peer.round_trip()
            held = bytes(peer.answers[stream_id].data), peer.answers[stream_id].headers[":status"]
            peer.h2.update_settings({WINDOW: 100})
            peer.flush()
            return held, await peer.answered(stream_id)

    held, answer = run(main())
    assert held == (b"", "200")
    assert (answer.messages, answer.status) == ([b"message"], "0")


async def served_call(served):
    while not served.calls:
        await asyncio.sleep(0)
    await served.calls[-1].over.wait()


def test_a_window_lowered_below_zero_while_a_stream_sends_is_minded(run, http2):
    message = bytes(50_000)

    async def main():
        async with (
            http2.listener() as served,
            http2.peer(served, settings={WINDOW: 20_000}, eats=False) as peer,
        ):
            stream_id = peer.begin("/echo", message)
            answer = peer.answers[stream_id]
            await peer.until(lambda: len(answer.data) == 20_000)
            await peer.settle({WINDOW: 5})  # so the stream's window is 19,995 below zero
            peer.h2.increment_flow_control_window(19_995, stream_id)
            await peer.round_trip()
            at_zero = len(answer.data)
            peer.h2.increment_flow_control_window(1, stream_id)
            await peer.round_trip()
            at_one = len(answer.data)
            peer.h2.increment_flow_control_window(100_000, stream_id)
            peer.flush()
            return at_zero, at_one, await peer.answered(stream_id)

    at_zero, at_one, answer = run(main())
    assert (at_zero, at_one) == (20_000, 20_001)
    assert answer.messages == [message]


def test_streams_that_wait_for_the_connections_window_take_turns(run, http2):
    message = bytes(60_000)

    async def main():
        async with (
            http2.listener() as served,
            http2.peer(served, settings={WINDOW: 2**20}, eats=False) as peer,
        ):
            ids = [peer.begin("/echo", message) for _ in range(3)]
            await peer.until(lambda: sum(len(answer.data) for answer in peer.answers.values()) == 65_535)
            held = [len(peer.answers[stream_id].data) for stream_id in ids]
            peer.h2.increment_flow_control_window(60_005)
            await peer.round_trip()
            peer.h2.increment_flow_control_window(2**20)
            peer.flush()
            return held, [await peer.answered(stream_id) for stream_id in ids]

    held, answers = run(main())
    assert held == [60_005, 5_530, 0]
    assert [answer.messages for answer in answers] == [[message]] * 3


def test_nothing_more_goes_out_of_a_call_that_was_given_up_while_it_waited(run, http2):
    async def main():
        async with http2.greeted() as (_, wire):
            wire.send(SettingsFrame(0, {4: 2**20}))
            for number in (1, 3):
                message = DataFrame(number, http2.prefixed(bytes(60_000)), flags=["END_STREAM"])
                wire.send(wire.headers("/echo", number), message)
            wire.send(RstStreamFrame(3, 8), WindowUpdateFrame(0, 2**20), PingFrame(0, bytes(8)))
            found = []
            while type(frame := await wire.frame()) is not PingFrame:
                found.append(frame)
            return [frame for frame in found if frame.stream_id == 3]

    head, *data = run(main())
    assert type(head) is HeadersFrame
    assert {type(frame) for frame in data} == {DataFrame}
    assert sum(len(frame.data) for frame in data) == 65_535 - 60_005


def test_short_answers_wait_for_the_connections_window_too(run, http2):
    message = bytes(10_000)

    async def main():
        async with http2.listener() as served, http2.peer(served, eats=False) as peer:
            await peer.round_trip()
            ids = [peer.begin("/echo", message) for _ in range(8)]
            await peer.round_trip()
            held = sum(len(answer.data) for answer in peer.answers.values())
            peer.h2.increment_flow_control_window(2**20)
            peer.flush()
            return held, [await peer.answered(stream_id) for stream_id in ids]

    held, answers = run(main())
    assert held == 65_535
    assert [answer.messages for answer in answers] == [[message]] * 8


def test_a_short_answer_waits_while_the_socket_is_full(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            await peer.round_trip()
            (connection,) = served.listener.connections
            connection.pause_writing()
            stream_id = peer.begin("/echo", b"message")
            await served_call(served)
            await peer.round_trip()
            held = bytes(peer.answers[stream_id].data)
            connection.resume_writing()
            return held, await peer.answered(stream_id)

    held, answer = run(main())
    assert held == b""
    assert (answer.messages, answer.status) == ([b"message"], "0")


def test_frames_are_no_longer_than_the_client_takes(run, http2):
    async def main(size):
        async with http2.listener() as served, http2.peer(served) as peer:
            if size:
                await peer.settle({FRAME: size, WINDOW: 2**24})
                peer.h2.increment_flow_control_window(2**24)
            return await peer.call("/echo", bytes(150_000))

    # The client checks each frame's length.
    assert run(main(None)).messages == [bytes(150_000)]
    assert run(main(20_000)).messages == [bytes(150_000)]


@pytest.mark.parametrize("size", [65_535, 65_536, 100_000, 2**20 - 5, 2**20])
def test_a_message_that_fits_in_one_long_frame_goes_out_whole(run, http2, size):
    async def main():
        async with (
            http2.listener() as served,
            http2.peer(served, settings={FRAME: 2**20, WINDOW: 2**16}) as peer,
        ):
            return await peer.call("/echo", bytes(size))

    answer = run(main())
    assert (len(answer.messages[0]), answer.status) == (size, "0")


def test_an_increment_that_overflows_ends_the_stream_or_the_connection(run, http2):
    async def main(stream_id):
        async with http2.listener() as served, http2.wire(served) as wire:
            head = HeadersFrame(1, wire.block("/hang"), flags=["END_HEADERS"])
            wire.greet(head, WindowUpdateFrame(stream_id, 2**31 - 1))
            frame = await wire.next(SettingsFrame)
            while type(frame) not in {type(None)} and getattr(frame, "error_code", None) is None:
                frame = await wire.frame()
            return type(frame).__name__, frame.error_code, frame.stream_id

    assert run(main(1)) == ("RstStreamFrame", 3, 1)
    assert run(main(0)) == ("GoAwayFrame", 3, 0)


@pytest.mark.parametrize(
    ("leave", "more"),
    [
        ([WindowUpdateFrame(1, LARGEST - 65_535)], WindowUpdateFrame(1, 1)),
        ([WindowUpdateFrame(0, LARGEST - 65_535)], WindowUpdateFrame(0, 1)),
        ([WindowUpdateFrame(1, 9), SettingsFrame(0, {4: LARGEST - 9})], SettingsFrame(0, {4: LARGEST - 8})),
    ],
    ids=["stream", "connection", "settings"],
)
def test_a_window_may_be_as_large_as_can_be_and_no_larger(run, http2, leave, more):
    async def main():
        async with http2.greeted() as (_, wire):
            wire.send(wire.headers("/hang"), *leave, PingFrame(0, bytes(8)))
            found = [type(await wire.frame()) for _ in range(3)]
            wire.send(more)
            while getattr(frame := await wire.frame(), "error_code", None) is None:
                found.append(type(frame))
            return found, frame.error_code

    found, error_code = run(main())
    assert PingFrame in found
    assert not {RstStreamFrame, GoAwayFrame} & {*found}
    assert error_code == 3


def test_an_increment_of_nothing_ends_the_stream_or_the_connection(run, http2):
    nothing = b"\0\0\4\x08\0\0\0\0"

    async def main(stream_id):
        async with http2.listener() as served, http2.wire(served) as wire:
            head = HeadersFrame(1, wire.block("/hang"), flags=["END_HEADERS"])
            wire.greet(head, nothing + bytes((stream_id,)) + bytes(4))
            frame = await wire.frame()
            while getattr(frame, "error_code", None) is None:
                frame = await wire.frame()
            return type(frame).__name__, frame.error_code

    assert run(main(1)) == ("RstStreamFrame", 1)
    assert run(main(0)) == ("GoAwayFrame", 1)


def test_an_initial_window_that_overflows_a_stream_ends_the_connection(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            head = HeadersFrame(1, wire.block("/hang"), flags=["END_HEADERS"])
            wire.greet(head, WindowUpdateFrame(1, 2**30), SettingsFrame(0, {4: 2**31 - 1}))
            return (await wire.all())[-1].error_code

    assert run(main()) == 3
