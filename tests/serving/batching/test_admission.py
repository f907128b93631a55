"""Requests that are answered at their deadlines, with one timer; and the estimate of service times."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from torchere.serving.batching.admission import Deadlines, ServiceTime
from torchere.serving.batching.request import Request
from torchere.serving.types import NO_DEADLINE


class Watch:
    """Deadlines, a clock that the test moves, and the timers that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        self._ran: list[int] = []
        call_later = loop.call_later

        def counted(delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
            number = len(self._timers)

            def ring() -> None:
                self._ran.append(number)
                callback(*args)

            self._timers.append(call_later(delay_s, ring))
            return self._timers[-1]

        monkeypatch.setattr(loop, "call_later", counted)
        self.now_s = 100.0
        self.expired: list[str] = []
        self.on_expiry: Callable[[], None] = lambda: None
        self.changed = asyncio.Event()
        self.deadlines = Deadlines(self._expire, lambda: self.now_s)

    def _expire(self, request: Request) -> None:
        self.expired.append(request.request_id)
        self.on_expiry()
        self.changed.set()

    def add(self, name: str, left_s: float) -> Request:
        request = Request(name, 0.0)
        request.deadline_s = self.now_s + left_s
        self.deadlines.add(request)
        return request

    async def until(self, count: int) -> None:
        """Wait until so many have expired."""
        while len(self.expired) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30.0)

    @property
    def timers(self) -> int:
        """How many timers run."""
        return sum(not timer.cancelled() for timer in self._timers) - len(self._ran)


def run(test: Callable[[Watch], Coroutine[Any, Any, None]]) -> Callable[[pytest.MonkeyPatch], None]:
    def wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            await test(Watch(monkeypatch))

        asyncio.run(main())

    wrapper.__name__ = test.__name__
    return wrapper


@run
async def test_as_long_as_no_request_has_a_deadline_there_is_no_timer(watch: Watch) -> None:
    watch.deadlines.discard(Request("never added", 0.0))
    assert watch.timers == 0


@run
async def test_any_number_of_requests_share_one_timer(watch: Watch) -> None:
    for number in range(100):
        watch.add(f"later {number}", 3600.0 + number)
        watch.add(f"sooner {number}", 3600.0 - number)
        assert watch.timers == 1


@run
async def test_each_request_expires_at_its_own_deadline(watch: Watch) -> None:
    watch.add("third", 3600.0)
    watch.add("first", 0.001)
    watch.add("second", 0.002)
    watch.now_s += 0.001
    await watch.until(1)
    assert (watch.expired, watch.timers) == (["first"], 1)
    watch.now_s += 0.001
    await watch.until(2)
    assert (watch.expired, watch.timers) == (["first", "second"], 1)


@run
async def test_a_request_that_is_discarded_does_not_expire(watch: Watch) -> None:
    answered = watch.add("answered", 0.001)
    watch.add("late", 0.002)
    watch.deadlines.discard(answered)
    watch.now_s += 1.0
    await watch.until(1)
    assert (watch.expired, watch.timers) == (["late"], 0)


@run
async def test_requests_that_expire_together_expire_in_one_turn_of_the_loop(watch: Watch) -> None:
    for number in range(3):
        watch.add(str(number), 0.001)
    watch.now_s += 0.001
    await watch.until(1)
    assert (sorted(watch.expired), watch.timers) == (["0", "1", "2"], 0)


@run
async def test_a_request_that_is_added_as_another_expires_is_watched(watch: Watch) -> None:
    watch.add("first", 0.001)
    watch.add("far", 3600.0)

    def add_another() -> None:
        if watch.expired == ["first"]:
            watch.add("second", 0.001)

    watch.on_expiry = add_another
    watch.now_s += 0.001
    await watch.until(1)
    assert watch.timers == 1
    watch.now_s += 0.001
    await watch.until(2)
    assert (watch.expired, watch.timers) == (["first", "second"], 1)


@pytest.mark.parametrize("loop_run", [asyncio.run, uvloop.run])
def test_a_timer_that_is_early_is_set_again(loop_run: Any) -> None:
    async def main() -> None:
        looks = itertools.count()
        expired = asyncio.Event()

        def now_s() -> float:
            return 100.0 if next(looks) > 6 else 99.9996  # behind the clock of the loop for a while

        deadlines = Deadlines(lambda request: expired.set(), now_s)
        request = Request("a", 0.0)
        request.deadline_s = 100.0
        deadlines.add(request)
        await asyncio.wait_for(expired.wait(), 30.0)

    loop_run(main())


def test_requests_without_a_deadline_set_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        watch = Watch(monkeypatch)
        request = Request("a", 0.0)
        assert request.deadline_s == NO_DEADLINE
        watch.deadlines.add(request)
        assert watch.timers == 0

    asyncio.run(main())


def after(*runs_s: float) -> ServiceTime:
    service = ServiceTime()
    for run_s in runs_s:
        service.observe(run_s)
    return service


def test_before_anything_ran_everything_is_worth_a_try() -> None:
    assert ServiceTime().answer_s(batches_before=100, executors=1) == 0.0


def test_the_estimate_follows_what_runs_take() -> None:
    assert after(0.1).mean_s == pytest.approx(0.1)
    assert after(0.1, 0.2).mean_s == pytest.approx(0.11)


def test_batches_in_front_are_shared_by_the_executors() -> None:
    service = after(0.1)
    assert service.answer_s(0, 2) == pytest.approx(0.125)
    assert service.answer_s(4, 2) == pytest.approx(0.375)
    assert service.answer_s(4, 0) == pytest.approx(0.625)


def test_an_estimate_that_turns_everybody_away_does_not_last() -> None:
    service = after(10.0)
    for _ in range(100):
        service.dropped()
    assert service.answer_s(0, 1) < 0.1
