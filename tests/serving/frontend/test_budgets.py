"""Budgets: what is taken is given back once, and each budget refuses for itself."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from torchere.serving.config.server_settings import Limits
from torchere.serving.frontend.budgets import (
    ALL,
    CONNECTION,
    MIN_KEY_FREE_BYTES,
    BudgetExceeded,
    Budgets,
    ConnectionBudget,
    DecodeQueue,
    in_thread,
)
from torchere.serving.frontend.services import budgets_of


def test_a_connection_may_hold_a_part_of_what_all_may():
    budgets = Budgets(4000)
    one = ConnectionBudget(budgets)
    one.take(1000)
    with pytest.raises(BudgetExceeded, match="this connection have more than 1000 bytes"):
        one.take(1)
    for _ in range(3):
        ConnectionBudget(budgets).take(1000)
    with pytest.raises(BudgetExceeded, match="all clients have more than 4000 bytes"):
        ConnectionBudget(budgets).take(1)
    assert budgets.held_bytes == 4000
    assert +budgets.refused == {ALL: 1, CONNECTION: 1}


def test_requests_without_a_key_have_a_smaller_budget_together():
    budgets = Budgets(2**25)
    one, other = ConnectionBudget(budgets), ConnectionBudget(budgets)
    one.take(MIN_KEY_FREE_BYTES, key_free=True)
    with pytest.raises(BudgetExceeded, match="without a key"):
        other.take(1, key_free=True)
    other.take(1)
    one.give_all()
    other.take(1, key_free=True)
    assert (budgets.held_bytes, budgets.key_free_bytes) == (2, 1)


def test_a_lease_outlives_its_connection_and_ends_once():
    budgets = Budgets(4_000_000)
    one = ConnectionBudget(budgets)
    one.take(10)
    lease = one.lease_inflation(10, 500_000)
    one.give_all()
    assert budgets.held_bytes == 10_320  # ten bytes inflate to no more
    lease.end()
    lease.end()
    one.give_all()
    assert (budgets.held_bytes, one.held_bytes) == (0, 0)


def test_there_is_room_for_some_messages_of_the_greatest_size():
    for limits in (Limits(max_request_bytes=2**40), Limits(max_held_bytes=1)):
        budgets = budgets_of(limits)
        assert budgets.connection_limit_bytes >= 4 * limits.max_request_bytes
        assert budgets.limit_bytes >= budgets.connection_limit_bytes


def test_a_setting_says_how_much_all_may_hold():
    assert budgets_of(Limits(max_held_bytes=2**40)).limit_bytes == 2**40


def test_nothing_is_held_after_any_sequence_of_steps():
    chance = random.Random(7)
    budgets = Budgets(20_000)
    connections: list[tuple[ConnectionBudget, list[Any], list[Any]]] = [
        (ConnectionBudget(budgets), [], []) for _ in range(5)
    ]
    for _ in range(5000):
        budget, taken, leases = chance.choice(connections)
        step, size, free = chance.random(), chance.randrange(3000), chance.random() < 0.3
        try:
            if step < 0.4:
                budget.take(size, free)
                taken.append((size, free))
            elif step < 0.6:
                leases.append(budget.lease_inflation(size, 2000))
            elif step < 0.8 and taken:
                budget.give(*taken.pop())
            elif leases:
                leases.pop().end()
            else:
                budget.give_all()
                taken.clear()
        except BudgetExceeded:
            pass
        assert 0 <= budgets.key_free_bytes <= budgets.held_bytes <= budgets.limit_bytes
    for budget, _, leases in connections:
        budget.give_all()
        for lease in leases:
            lease.end()
    assert (budgets.held_bytes, budgets.key_free_bytes) == (0, 0)
    assert budgets.refused.total() > 0


def test_functions_run_one_at_a_time_in_order_and_withdrawn_ones_not_at_all():
    first_may_end = threading.Event()
    began, results = [], []

    def work(number):
        began.append(number)
        first_may_end.wait(20)
        if number == 3:
            raise ValueError(number)
        return number

    async def main():
        queue = DecodeQueue()
        ended = asyncio.Event()

        def then(future):
            results.append(future.exception() or future.result())
            if len(results) == 3:
                ended.set()

        asked = [queue.add(partial(work, number), then, "client") for number in range(5)]
        while not began:
            await asyncio.sleep(0)
        asked[0].withdraw()  # it runs, but its result is dropped
        asked[2].withdraw()
        assert began == [0]
        first_may_end.set()
        await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(main())
    assert began == [0, 1, 3, 4]
    assert (results[0], str(results[1]), results[2]) == (1, "3", 4)


def test_a_client_with_many_functions_keeps_others_waiting_for_one_of_its_own():
    began: list[str] = []

    async def main():
        queue = DecodeQueue()
        ended = asyncio.Event()

        def then(_):
            if len(began) == 7:
                ended.set()

        names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
        asked = {name: queue.add(partial(began.append, name), then, name[0]) for name in names}
        await asyncio.wait_for(ended.wait(), 20)
        assert not queue._waiting
        return asked

    asyncio.run(main())
    assert began == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


def test_a_function_that_is_awaited_has_its_turn_too():
    ended: list[int] = []

    async def main():
        queue = DecodeQueue()
        assert await queue.run(partial(int, "7"), "client") == 7
        with pytest.raises(ValueError, match="seven"):
            await queue.run(partial(int, "seven"), "client")
        go_on = threading.Event()
        first = asyncio.ensure_future(queue.run(partial(go_on.wait, 20), "client"))
        second = asyncio.ensure_future(queue.run(partial(ended.append, 2), "client"))
        await asyncio.sleep(0)
        second.cancel()  # it is withdrawn
        await asyncio.sleep(0)
        go_on.set()
        assert await first
        await queue.run(partial(ended.append, 3), "client")

    asyncio.run(main())
    assert ended == [3]


def test_a_function_for_which_no_thread_can_be_started_does_not_run_later(monkeypatch):
    ran: list[str] = []
    go_on = threading.Event()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        only = loop.run_in_executor(None, go_on.wait, 10)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                await in_thread(lambda: ran.append("late"))
        go_on.set()
        await only
        await loop.run_in_executor(None, time.sleep, 0)

    asyncio.run(main())
    assert ran == []


@pytest.mark.usefixtures("no_thread")
def test_functions_for_which_no_thread_can_be_started_fail_and_later_ones_run(monkeypatch):
    async def main():
        queue = DecodeQueue()
        asked = [asyncio.ensure_future(queue.run(partial(int, "7"), name)) for name in "ab"]
        failed = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
        monkeypatch.undo()
        return failed, await asyncio.wait_for(queue.run(partial(int, "7"), "a"), 20)

    failed, result = asyncio.run(main())
    assert [str(error) for error in failed] == ["can't start new thread"] * 2
    assert result == 7
