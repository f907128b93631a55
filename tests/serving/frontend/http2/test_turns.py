"""However much a client sends at once: others have their turn in between, and nothing of it is lost."""

import asyncio
import contextlib
import time

import pytest
from hyperframe.frame import DataFrame, SettingsFrame

from torchere.serving.frontend.http2 import connection, listener
from torchere.serving.io import loop_time

CALLS = 200
BOUNDS = {
    "one read of many calls": [(connection, "TURN_S", 0), (connection, "STEP_FRAMES", 1)],
    "many reads in a row": [(connection, "AGAIN_S", 0), (listener, "READ_BUFFER_BYTES", 20)],
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_many_calls_that_come_at_once_leave_turns_to_others(run, http2, monkeypatch, bounds):
    for module, name, value in bounds:
        monkeypatch.setattr(module, name, value)
    taken = set()

    async def main():
        loop = asyncio.get_running_loop()
        async with http2.listener() as served, http2.wire(served) as wire:

            def turn():
                taken.add(len(served.calls))
                if len(served.calls) < CALLS:
                    loop.call_soon(turn)

            turn()
            wire.greet(wire.calls("/echo", CALLS, flags=5))
            return [(await wire.next(DataFrame)).stream_id for _ in range(CALLS)]

    assert run(main()) == list(range(1, 2 * CALLS, 2))
    assert len(taken) > CALLS / 4


@pytest.mark.parametrize("landing_bytes", [20, 262_144])
def test_calls_that_come_at_once_and_are_quick_are_taken_in_one_turn(run, http2, monkeypatch, landing_bytes):
    monkeypatch.setattr(listener, "READ_BUFFER_BYTES", landing_bytes)
    for name, value in (("TURN_S", 60), ("AGAIN_S", 60), ("STEP_FRAMES", 1)):
        monkeypatch.setattr(connection, name, value)
    monkeypatch.setattr(loop_time, "SHARED_TURN_S", 60)
    turns = []

    async def main():
        async with http2.greeted() as (served, wire):
            await wire.next(SettingsFrame)
            (one,) = served.listener.connections
            monkeypatch.setattr(one, "_receive_deferred", lambda: turns.append("another"))
            wire.send(wire.calls("/echo", CALLS, flags=5))
            return [(await wire.next(DataFrame)).stream_id for _ in range(CALLS)]

    assert run(main()) == list(range(1, 2 * CALLS, 2))
    assert turns == []


def test_what_comes_while_some_is_put_off_waits_behind_it(run, http2, monkeypatch):
    for module, name, value in BOUNDS["one read of many calls"]:
        monkeypatch.setattr(module, name, value)

    async def main():
        async with http2.greeted() as (served, wire):
            await wire.next(SettingsFrame)
            (one,) = served.listener.connections
            sent = wire.calls("/echo", CALLS, flags=5)
            for part in (sent[:1000], sent[1000:]):  # as TLS of Python 3.10 does
                served.listener.read_buffer[: len(part)] = part
                one.buffer_updated(len(part))
            return [(await wire.next(DataFrame)).stream_id for _ in range(CALLS)]

    assert run(main()) == list(range(1, 2 * CALLS, 2))


def test_a_client_that_leaves_before_its_turn_is_let_go(run, http2, monkeypatch):
    for module, name, value in BOUNDS["one read of many calls"]:
        monkeypatch.setattr(module, name, value)

    async def main():
        async with http2.listener() as served:
            async with http2.wire(served) as wire:
                wire.greet(wire.calls("/echo", CALLS, flags=5))
                while not served.calls:
                    await asyncio.sleep(0)
                wire.writer.transport.abort()
            while served.listener.connections:
                await asyncio.sleep(0.001)
            return len(served.calls)

    assert 0 < run(main()) <= CALLS


CONNECTIONS = 40


def test_many_connections_share_a_turn_and_none_is_forgotten(run, http2, monkeypatch):
    """A pass over 40 connections, two calls of 2 ms on each, would keep the loop for 160 ms."""
    monkeypatch.setattr(loop_time, "SHARED_TURN_S", 0.004)
    longest_s = 0.0

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            served = await stack.enter_async_context(http2.listener())
            opened = served.listener.open_call

            def slow(stream):
                end_s = time.thread_time() + 0.002
                while time.thread_time() < end_s:
                    continue
                return opened(stream)

            served.listener.open_call = slow
            wires = [await stack.enter_async_context(http2.wire(served)) for _ in range(CONNECTIONS)]
            for wire in wires:
                wire.greet()
                await wire.next(SettingsFrame)

            async def watch():
                nonlocal longest_s
                while True:
                    began_s = time.thread_time()
                    await asyncio.sleep(0)
                    longest_s = max(longest_s, time.thread_time() - began_s)

            watching = asyncio.ensure_future(watch())
            for wire in wires:
                wire.send(wire.calls("/echo", 2, flags=5))
            for wire in wires:
                assert [(await wire.next(DataFrame)).stream_id for _ in range(2)] == [1, 3]
            watching.cancel()

    run(main())
    assert longest_s < 0.1
