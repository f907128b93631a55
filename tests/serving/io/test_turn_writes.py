"""What is sent in one turn goes out together, in its order, and no later than the turn."""

import asyncio
import socket

import pytest
import uvloop

from torchere.serving.io.turn_writes import AT_ONCE_BYTES, TurnWrites, write_together


class FakeTransport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.written, self.closed = [], False

    def write(self, data):
        self.written.append(bytes(data))

    def writelines(self, buffers):
        self.written.append(tuple(buffers))

    def get_write_buffer_limits(self):
        return 16_384, 65_536

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


def after_a_turn(act):
    """What was written by the end of `act`, and a turn later: joined, or as a tuple where it is much."""

    async def main():
        transport, writes = FakeTransport(), TurnWrites()
        writes.begin(transport)
        act(writes)
        at_once = list(transport.written)
        await asyncio.sleep(0)
        return at_once, transport.written

    return asyncio.run(main())


def test_writes_of_one_turn_are_one():
    def act(writes):
        writes.write(b"a")
        writes.write_all([b"b", memoryview(b"c")])
        writes.write(b"d")

    assert after_a_turn(act) == ([], [b"abcd"])


def test_a_flush_sends_at_once_and_the_end_of_the_turn_nothing_more():
    def act(writes):
        writes.expect_flush()
        writes.write(b"a")
        writes.flush()

    assert after_a_turn(act) == ([b"a"], [b"a"])


def test_what_comes_after_a_flush_goes_out_with_the_turn():
    def act(writes):
        writes.write(b"a")
        writes.flush()
        writes.write(b"b")

    assert after_a_turn(act) == ([b"a"], [b"a", b"b"])


def test_each_turn_ends_with_what_came_in_it():
    async def main():
        transport, writes = FakeTransport(), TurnWrites()
        writes.begin(transport)
        for data in (b"a", b"b"):
            writes.write(data)
            await asyncio.sleep(0)
        return transport.written

    assert asyncio.run(main()) == [b"a", b"b"]


def test_the_end_of_the_turn_sends_nothing_for_whoever_flushes_by_himself():
    def act(writes):
        writes.expect_flush()
        writes.write(b"a")

    assert after_a_turn(act) == ([], [])


@pytest.mark.parametrize("many", [1, 3])
def test_much_goes_out_as_it_comes_behind_what_is_held(many):
    part = bytes(AT_ONCE_BYTES // many + 1)

    def act(writes):
        writes.write(b"a")
        writes.write_all([part] * many)

    assert after_a_turn(act) == ([(b"a", *[part] * many)], [(b"a", *[part] * many)])


def test_little_behind_much_waits_for_the_end_of_the_turn():
    much = bytes(AT_ONCE_BYTES + 1)

    def act(writes):
        for data in (much, b"a", b"b"):
            writes.write(data)

    assert after_a_turn(act) == ([(much,)], [(much,), b"ab"])


def test_a_close_sends_what_is_held_and_nothing_later():
    def act(writes):
        writes.write(b"a")
        writes.close()
        writes.write(b"b")

    assert after_a_turn(act) == ([b"a"], [b"a"])


@pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_what_does_not_go_out_together_pauses_the_writer(new_loop):
    class Writer(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport
            write_together(transport, (b"head", bytes(32 * 2**20)))

        def pause_writing(self):
            paused.set()
            self.transport.abort()

        def connection_lost(self, exc):
            lost.set()

    async def main():
        server = await asyncio.get_running_loop().create_server(Writer, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()):  # and takes nothing
            await asyncio.wait_for(lost.wait(), 30)
        assert paused.is_set()
        server.close()

    loop = new_loop()
    paused, lost = asyncio.Event(), asyncio.Event()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
