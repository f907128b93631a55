"""Calls that are begun and not ended: waited for so long, and no more of them is held than may be."""

import asyncio
import time

import pytest
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame, SettingsFrame

from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.http2 import connection, graceful_close, incomplete_calls

TIMEOUT_S = 0.15
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED = "4", "8"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(incomplete_calls, "INCOMPLETE_TIMEOUT_S", TIMEOUT_S)


BEGINNINGS = {
    "head": ("/echo", b""),
    "half a message": ("/echo", b"\0\0\0\0\5abc"),
    "a message and no end": ("/echo", b"\0\0\0\0\3abc"),
    "half a message of several": ("/many", b"\0\0\0\0\1a" + b"\0\0\0\0\5abc"),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_call_that_stops_coming_is_ended_and_the_others_go_on(run, http2, beginning):
    path, sent = beginning

    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            began_s = time.monotonic()
            stream_id = peer.begin(path, end=False)
            if sent:
                peer.say(stream_id, sent)
            answer = await peer.answered(stream_id)
            took_s = time.monotonic() - began_s
            return answer, took_s, await peer.call("/echo", b"m"), served.calls[0].ended_by

    answer, took_s, other, ended_by = run(main())
    assert answer.status == DEADLINE_EXCEEDED
    assert ended_by == "flawed: SERVER: The rest of the call did not come in time"
    assert took_s >= TIMEOUT_S * 0.9
    assert other.messages == [b"m"]


@pytest.mark.usefixtures("impatient")
def test_all_calls_that_stop_coming_are_ended_at_once(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            await peer.round_trip()
            ids = [peer.begin("/echo", b"m", end=False) for _ in range(50)]
            began_s = time.monotonic()
            answers = [await peer.answered(stream_id) for stream_id in ids]
            return [answer.status for answer in answers], time.monotonic() - began_s

    statuses, took_s = run(main())
    assert statuses == [DEADLINE_EXCEEDED] * 50
    assert took_s < 20 * TIMEOUT_S


@pytest.mark.usefixtures("impatient")
def test_a_call_that_keeps_coming_is_waited_for(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/echo", end=False)
            for byte in http2.prefixed(b"message"):
                peer.say(stream_id, bytes((byte,)))
                await asyncio.sleep(TIMEOUT_S / 3)
            peer.h2.end_stream(stream_id)
            peer.flush()
            return await peer.answered(stream_id)

    assert run(main()).messages == [b"message"]


RATE = 1000  # bytes a second


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("path", "sent"), [("/echo", b""), ("/many", b"\0\0\0\0\1a")])
def test_a_call_that_drips_is_ended(run, http2, path, sent):
    async def main():
        async with http2.listener(min_upload_rate=RATE) as served, http2.peer(served) as peer:
            stream_id = peer.begin(path, end=False)
            peer.say(stream_id, sent + b"\0\0\0\x0f\xff")
            answered = asyncio.ensure_future(peer.answered(stream_id))
            while not answered.done():
                peer.say(stream_id, b"x")
                await asyncio.wait({answered}, timeout=TIMEOUT_S / 10)
            return answered.result()

    assert run(main()).status == DEADLINE_EXCEEDED


@pytest.mark.usefixtures("impatient")
def test_short_messages_of_a_stream_need_no_rate(run, http2):
    async def main():
        async with http2.listener(min_upload_rate=RATE) as served, http2.peer(served) as peer:
            stream_id = peer.begin("/many", end=False)
            peer.say(stream_id, b"\0")  # at each look, a message is incomplete
            for _ in range(12):
                await asyncio.sleep(TIMEOUT_S / 3)
                peer.say(stream_id, b"\0\0\0\1a\0")
            peer.say(stream_id, b"\0\0\0\1a", end=True)
            return await peer.answered(stream_id)

    assert len(run(main()).messages) == 13


@pytest.mark.usefixtures("impatient")
def test_a_long_frame_that_keeps_coming_is_waited_for(run, http2):
    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            data = DataFrame(1, http2.prefixed(bytes(7)), flags=["END_STREAM"]).serialize()
            wire.greet(HeadersFrame(1, wire.block("/echo"), flags=["END_HEADERS"]), data[:9])
            for byte in data[9:]:
                wire.send(bytes((byte,)))
                await asyncio.sleep(TIMEOUT_S / 3)
            return (await wire.next(DataFrame)).data

    assert run(main()) == http2.prefixed(bytes(7))


@pytest.mark.usefixtures("impatient")
def test_a_client_may_be_silent_between_two_messages_of_a_stream(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/many", b"one", end=False)
            await asyncio.sleep(3 * TIMEOUT_S)
            peer.say(stream_id, http2.prefixed(b"two"), end=True)
            return await peer.answered(stream_id)

    assert run(main()).messages == [b"one", b"two"]


@pytest.mark.usefixtures("impatient")
def test_a_message_that_stops_coming_after_a_silence_is_not_waited_for(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/many", b"one", end=False)
            await asyncio.sleep(2.5 * TIMEOUT_S)
            peer.say(stream_id, b"\0\0\0\0\5abc")
            return await asyncio.wait_for(peer.answered(stream_id), 20 * TIMEOUT_S)

    assert run(main()).status == DEADLINE_EXCEEDED


@pytest.mark.usefixtures("impatient")
def test_a_client_that_waits_for_us_or_for_its_answer_owes_nothing(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            paused = peer.begin("/hold", b"one", end=False)
            peer.say(paused, b"\0\0\0\0\5abc")
            hung = peer.begin("/hang", b"one")
            await asyncio.sleep(4 * TIMEOUT_S)
            await peer.round_trip()
            return [peer.answers[stream_id].over for stream_id in (paused, hung)]

    assert run(main()) == [False, False]


STOPPING_S = 0.3


@pytest.fixture
def hurried(monkeypatch):
    """Only a stop of the server makes it impatient."""
    monkeypatch.setattr(connection, "STOPPING_TIMEOUT_S", STOPPING_S)
    monkeypatch.setattr(graceful_close, "STEP_S", 0.2)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("is_new", [False, True], ids=["begun before the stop", "begun in it"])
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_call_that_stops_coming_does_not_hold_up_the_end(run, http2, beginning, is_new):
    path, sent = beginning

    async def main():
        async with http2.listener() as served, http2.wire(served) as wire:
            begins = wire.headers(path), DataFrame(1, sent)
            wire.greet(*(() if is_new else begins))
            await wire.next(SettingsFrame)
            while not (is_new or served.calls):
                await asyncio.sleep(0)
            served.listener.drain()
            if is_new:
                wire.send(*begins)
            await asyncio.wait_for(served.listener.all_closed(60), 10)
            return served.calls[0].ended_by

    assert run(main()) == "flawed: SERVER: The rest of the call did not come in time"


@pytest.mark.usefixtures("hurried")
def test_a_call_that_keeps_coming_in_a_stop_is_waited_for(run, http2):
    async def main():
        async with http2.listener(min_upload_rate=RATE) as served, http2.wire(served) as wire:
            wire.greet(wire.headers("/echo"))
            await wire.next(SettingsFrame)
            served.listener.drain()
            sent = http2.prefixed(bytes(8 * RATE))
            for start in range(0, len(sent), RATE):
                wire.send(DataFrame(1, sent[start : start + RATE]))
                await asyncio.sleep(STOPPING_S / 3)
            wire.send(DataFrame(1, flags=["END_STREAM"]))
            return (await wire.next(DataFrame)).data

    assert run(main()) == http2.prefixed(bytes(8 * RATE))


@pytest.mark.usefixtures("hurried")
def test_a_call_on_an_old_connection_is_waited_for_as_ever(run, http2):
    async def main():
        async with http2.greeted(age_s=0.01) as (_, wire):
            wire.send(wire.headers("/echo"))
            for _ in range(2):  # the second one says that the close has begun
                await wire.next(GoAwayFrame)
            await asyncio.sleep(3 * STOPPING_S)
            wire.send(DataFrame(1, http2.prefixed(b"late"), flags=["END_STREAM"]))
            return (await wire.next(DataFrame)).data

    assert run(main()) == http2.prefixed(b"late")


def half(size):
    """All of a message of so many bytes, but for the last."""
    return b"\0" + (size + 1).to_bytes(4, "big") + bytes(size - 5)


def test_calls_on_their_way_may_have_so_many_bytes_together(run, http2):

    async def main():
        async with (
            http2.listener(limit_bytes=25_000, budgets=Budgets(400_000)) as served,
            http2.peer(served) as peer,
        ):
            await peer.round_trip()
            (connection,) = served.listener.connections
            ids = [peer.begin("/echo", end=False) for _ in range(6)]
            for piece in (half(20_000)[:5000], bytes(15_000)):
                for stream_id in ids[:5]:
                    peer.say(stream_id, piece)
                await peer.round_trip()
            held = connection.budget.held_bytes
            at_once = await peer.call("/echo", b"m")
            peer.say(ids[5], half(20_000))
            refused = await peer.answered(ids[5])
            peer.h2.reset_stream(ids[0])
            peer.say(ids[1], bytes(6), end=True)
            taken = await peer.answered(ids[1])
            whole = await peer.call("/echo", bytes(25_000))
            return (
                held,
                at_once.status,
                refused.status,
                len(taken.messages[0]),
                whole.status,
                connection.budget.held_bytes,
            )

    held, at_once, refused, taken, whole, left = run(main())
    assert (held, at_once) == (100_000, "0")
    assert refused == RESOURCE_EXHAUSTED
    assert (taken, whole) == (20_001, "0")
    assert left == 60_000


def test_messages_that_were_taken_are_not_counted(run, http2):
    async def main():
        async with http2.listener() as served, http2.peer(served) as peer:
            stream_id = peer.begin("/many", bytes(100), bytes(200), end=False)
            await peer.until(lambda: len(peer.answers[stream_id].messages) == 2)
            (connection,) = served.listener.connections
            stream = served.calls[0].stream
            found = [connection.budget.held_bytes]
            for size in (100, 300, 300):
                stream.consumed(size)
                found.append(connection.budget.held_bytes)
            return found

    assert run(main()) == [310, 205, 0, 0]
