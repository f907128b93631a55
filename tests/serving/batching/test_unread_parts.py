"""How much of a streamed answer may lie unread, and what becomes of one that is read too slowly."""

import asyncio
import functools
import gc
import time
import weakref

import pytest

from torchere.serving.batching import unread_parts
from torchere.serving.batching.unread_parts import UnreadOfAll, UnreadParts
from torchere.serving.errors import Cancelled, HandlerFailed, LeftUnread

STEP = 10
LIMIT = 40
PART = bytes(STEP)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(unread_parts, "STEP_BYTES", STEP)
    monkeypatch.setattr(unread_parts, "LEAST_PART_BYTES", 1)


class Given:
    """Parts, and why they were given up."""

    def __init__(self, count=0, of_all=None):
        self.reasons: list[object] = []
        self.parts = UnreadParts(LIMIT, self.reasons.append, of_all or UnreadOfAll())
        for _ in range(count):
            self.parts.add(PART)


def run(test):
    @functools.wraps(test)
    def wrapper(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 20))

    return wrapper


@run
async def test_an_executor_that_waits_goes_on_at_the_latest_when_all_is_read(monkeypatch):
    monkeypatch.setattr(unread_parts, "STEP_BYTES", 2 * LIMIT)
    given = Given(5)
    held = []
    for _ in range(5):
        held.append(given.parts.held)
        await given.parts.take()
    assert (held, given.parts.held) == ([True] * 5, False)


@run
async def test_up_to_the_limit_nobody_waits():
    given = Given(4)
    assert not given.parts.held
    given.parts.end()
    given.parts.end(HandlerFailed())  # without effect on what has ended
    assert [await given.parts.take() for _ in range(5)] == [PART] * 4 + [None]
    assert given.reasons == []


@run
async def test_who_reads_faster_than_parts_come_waits_for_each_and_for_the_end():
    given = Given()
    for come, expected in ((functools.partial(given.parts.add, PART), PART), (given.parts.end, None)):
        reading = asyncio.ensure_future(given.parts.take())
        await asyncio.sleep(0)
        assert not reading.done()
        come()
        assert await reading == expected


@run
async def test_a_held_executor_goes_on_once_the_client_has_taken_a_step():
    given, went_on = Given(5), []
    assert given.parts.held
    given.parts.when_over(lambda: went_on.append(given.parts.unread_bytes))
    await given.parts.take()
    assert went_on == []
    await given.parts.take()
    assert went_on == [LIMIT - STEP]
    assert not given.parts.held


@run
async def test_a_part_of_any_length_passes_to_a_client_that_reads():
    given = Given()
    given.parts.add(bytes(10 * LIMIT))
    assert given.parts.held
    assert await given.parts.take() == bytes(10 * LIMIT)
    assert not given.parts.held


def impatient(monkeypatch):
    monkeypatch.setattr(unread_parts, "HELD_S", 0.01)


def test_a_client_that_does_not_take_a_step_in_time_is_given_up(monkeypatch):
    impatient(monkeypatch)

    async def main():
        given, gone_on = Given(5), asyncio.Event()
        given.parts.when_over(gone_on.set)
        await given.parts.take()  # less than a step below the limit
        await gone_on.wait()
        given.parts.add(PART)
        assert given.parts.unread_bytes == 0
        with pytest.raises(LeftUnread) as told:
            await given.parts.take()
        assert told.value.detail == "40 bytes of it lay unread in the server"
        await asyncio.sleep(0)
        assert [type(reason) for reason in given.reasons] == [LeftUnread]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_client_that_took_a_step_in_time_is_not_given_up_later(monkeypatch):
    impatient(monkeypatch)

    async def main():
        given = Given(5)
        for _ in range(2):
            await given.parts.take()
        later, given_up = Given(5), asyncio.Event()
        later.parts.when_over(given_up.set)
        await given_up.wait()
        assert (given.parts.unread_bytes, given.parts.held) == (3 * STEP, False)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_client_that_reads_loses_nothing_when_the_loop_stood_still(monkeypatch):
    impatient(monkeypatch)

    async def main():
        given, taken = Given(5), []

        async def take():
            while (part := await given.parts.take()) is not None:
                taken.append(part)
                await asyncio.sleep(0)  # its socket takes one part in a turn of the loop

        await asyncio.sleep(0)
        reading = asyncio.ensure_future(take())
        time.sleep(0.05)  # longer than it may take
        await asyncio.sleep(0.005)
        given.parts.end()
        await reading
        assert taken == [PART] * 5
        assert given.reasons == []

    asyncio.run(asyncio.wait_for(main(), 20))


@run
async def test_tiny_parts_count_for_the_memory_that_each_takes(monkeypatch):
    monkeypatch.setattr(unread_parts, "LEAST_PART_BYTES", STEP)
    given = Given()
    for _ in range(5):
        given.parts.add(b"")
    assert (given.parts.unread_bytes, given.parts.held) == (5 * STEP, True)
    for _ in range(5):
        assert await given.parts.take() == b""
    assert (given.parts.unread_bytes, given.parts.held) == (0, False)


@run
async def test_who_makes_parts_and_can_not_wait_is_given_up_at_twice_the_limit():
    given = Given(9)
    assert given.parts.unread_bytes == 90
    given.parts.add(PART)
    assert given.parts.unread_bytes == 0
    with pytest.raises(LeftUnread):
        await given.parts.take()
    given.parts.end(HandlerFailed())
    await asyncio.sleep(0)
    assert len(given.reasons) == 1


@run
async def test_an_answer_that_ends_while_its_executor_is_held_is_there_as_a_whole():
    given, went_on = Given(6), []
    given.parts.when_over(lambda: went_on.append(True))
    given.parts.end(HandlerFailed())
    assert went_on == [True]
    assert [await given.parts.take() for _ in range(6)] == [PART] * 6
    with pytest.raises(HandlerFailed):
        await given.parts.take()
    assert given.reasons == []


@run
async def test_parts_that_nobody_reads_any_more_are_dropped_and_whoever_makes_them_goes_on():
    given, went_on = Given(6), []
    given.parts.when_over(lambda: went_on.append(True))
    given.parts.abandon()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (given.parts.unread_bytes, went_on) == (0, [True])
    assert [type(reason) for reason in given.reasons] == [Cancelled]


@run
async def test_a_client_that_leaves_is_told_of_unless_it_has_all():
    waits, has_all = Given(), Given()
    has_all.parts.end()
    for given in (waits, has_all):
        given.parts.abandon()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [type(reason) for reason in waits.reasons] == [Cancelled]
    assert has_all.reasons == []


class Watched(UnreadOfAll):
    """Tells when it is freed."""


@run
async def test_parts_that_were_given_up_are_freed_without_a_collector():
    given = Given(10, Watched())
    gone = weakref.ref(given.parts._of_all)  # which only the parts hold, and they can't be watched themselves
    gc.disable()
    try:
        with pytest.raises(LeftUnread):
            await given.parts.take()
        await asyncio.sleep(0)
        del given
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def of_all(monkeypatch):
    monkeypatch.setattr(unread_parts, "ALL_BYTES", 2 * LIMIT)
    monkeypatch.setattr(unread_parts, "ALL_ANSWERS", 1)
    return UnreadOfAll()


@run
async def test_what_lies_here_of_all_streams_is_counted_whatever_becomes_of_it(of_all):
    one, two, three = (Given(2, of_all) for _ in range(3))
    assert of_all.unread_bytes == 6 * STEP
    await one.parts.take()
    assert of_all.unread_bytes == 5 * STEP
    two.parts.abandon()
    await asyncio.sleep(0)
    assert of_all.unread_bytes == 3 * STEP
    three.parts.lose()
    one.parts.end()
    await one.parts.take()
    assert of_all.unread_bytes == 0


@run
async def test_when_too_much_lies_here_of_all_streams_one_that_gets_more_is_held_until_its_client_takes_it(
    of_all,
):
    others = [Given(4, of_all), Given(4, of_all)]
    assert not any(other.parts.held for other in others)
    given = Given(1, of_all)
    assert given.parts.held
    await given.parts.take()
    assert not given.parts.held
    for _ in range(3):  # the last two were on their way
        given.parts.add(PART)
    assert given.parts.held
    await given.parts.take()
    assert not given.parts.held


def test_a_stream_is_held_no_longer_when_less_lies_here_of_the_others(monkeypatch, of_all):
    monkeypatch.setattr(unread_parts, "HELD_S", 1.0)

    async def main():
        others = [Given(4, of_all), Given(4, of_all)]
        given, gone_on = Given(1, of_all), asyncio.Event()
        given.parts.when_over(gone_on.set)
        await others[0].parts.take()
        await gone_on.wait()
        assert given.parts.unread_bytes == STEP
        assert given.reasons == []

    asyncio.run(asyncio.wait_for(main(), 20))


def test_of_too_many_streams_one_that_gets_more_and_is_not_read_is_given_up(monkeypatch, of_all):
    impatient(monkeypatch)

    async def main():
        others = [Given(4, of_all), Given(4, of_all)]
        given, gone_on = Given(1, of_all), asyncio.Event()
        given.parts.when_over(gone_on.set)
        await gone_on.wait()
        with pytest.raises(LeftUnread):
            await given.parts.take()
        await asyncio.sleep(0)
        assert [type(reason) for reason in given.reasons] == [LeftUnread]
        assert of_all.unread_bytes == sum(other.parts.unread_bytes for other in others) == 8 * STEP

    asyncio.run(asyncio.wait_for(main(), 20))


@run
async def test_of_too_many_streams_those_are_given_up_that_nobody_has_read_for_long(monkeypatch, of_all):
    monkeypatch.setattr(unread_parts, "IDLE_S", 0.0)
    read, unread = Given(4, of_all), Given(4, of_all)
    unread.parts.end()
    await read.parts.take()
    given = Given(2, of_all)
    assert (of_all.unread_bytes, unread.parts.unread_bytes, given.parts.held) == (5 * STEP, 0, False)
    with pytest.raises(LeftUnread):
        await unread.parts.take()
    await asyncio.sleep(0)
    assert [type(reason) for reason in unread.reasons] == [LeftUnread]
    assert [await read.parts.take() for _ in range(3)] == [PART] * 3


@run
async def test_for_the_others_one_is_given_up_that_is_not_read_on_and_none_that_has_nothing_here(
    monkeypatch, of_all
):
    monkeypatch.setattr(unread_parts, "IDLE_S", 0.0)
    has_all, begun = Given(1, of_all), Given(4, of_all)
    await has_all.parts.take()
    await begun.parts.take()
    others = [Given(3, of_all), Given(3, of_all)]
    await asyncio.sleep(0)
    assert [type(reason) for reason in begun.reasons] == [LeftUnread]
    assert has_all.reasons == []
    assert [other.parts.unread_bytes for other in others] == [3 * STEP] * 2


@run
async def test_a_stream_that_is_given_up_as_it_gets_more_holds_its_executor_up_no_longer(monkeypatch, of_all):
    given, other = Given(1, of_all), Given(0, of_all)
    other.parts.add(bytes(2 * LIMIT))
    monkeypatch.setattr(unread_parts, "IDLE_S", 0.0)
    given.parts.add(PART)
    assert not given.parts.held
    with pytest.raises(LeftUnread):
        await given.parts.take()
