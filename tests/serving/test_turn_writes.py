"""What is sent in one turn goes out together, in its order, and no later than the turn."""

import asyncio

import pytest

from torchere.serving.turn_writes import AT_ONCE_BYTES, TurnWrites


class FakeTransport:
    def __init__(self):
        self.written, self.closed = [], False

    def write(self, data):
        self.written.append(bytes(data))

    def writelines(self, buffers):
        self.written.append(b"".join(buffers))

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


def after_a_turn(act):
    """What was written by the end of `act`, and a turn later."""

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


@pytest.mark.parametrize("many", [1, 3])
def test_much_goes_out_as_it_comes_behind_what_is_held(many):
    part = bytes(AT_ONCE_BYTES // many + 1)

    def act(writes):
        writes.write(b"a")
        writes.write_all([part] * many)

    assert after_a_turn(act) == ([b"a" + part * many], [b"a" + part * many])


def test_promptly_is_now_for_the_first_of_a_turn_and_together_for_the_others():
    def act(writes):
        for data in (b"a", b"b", b"c"):
            writes.write_promptly(data)

    assert after_a_turn(act) == ([b"a"], [b"a", b"bc"])


def test_promptly_keeps_the_order_behind_what_is_held():
    def act(writes):
        writes.write(b"a")
        writes.write_promptly(b"b")
        writes.write_promptly(bytes(AT_ONCE_BYTES))

    everything = b"ab" + bytes(AT_ONCE_BYTES)
    assert after_a_turn(act) == ([everything], [everything])


def test_promptly_sends_much_once():
    much = bytes(AT_ONCE_BYTES + 1)
    assert after_a_turn(lambda writes: writes.write_promptly(much)) == ([much], [much])


def test_a_close_sends_what_is_held_and_nothing_later():
    def act(writes):
        writes.write(b"a")
        writes.close()
        writes.write(b"b")

    assert after_a_turn(act) == ([b"a"], [b"a"])
