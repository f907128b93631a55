"""The rule as a table, and the watch with time that the test lets pass."""

import asyncio

import pytest

from torchere.serving.workers.heartbeat import Heartbeat, HeartbeatSettings

SETTINGS = HeartbeatSettings(ask_every_s=2.0, suspect_after_s=3.0, dead_after_s=10.0)  # ticks of 1 s


@pytest.mark.parametrize(
    ("idle", "quiet_s", "ticks", "steps"),
    [
        (True, 1.9, 1, []),
        (True, 2.0, 1, ["asked"]),
        (False, 100.0, 1, []),  # busy: the response time-out watches it
        (True, 100.0, 3, ["asked"]),
        (True, 100.0, 4, ["asked", "suspect"]),
        (True, 100.0, 10, ["asked", "suspect"]),
        (True, 100.0, 11, ["asked", "suspect", "dead after 10 s"]),
    ],
)
def test_an_idle_worker_is_asked_then_suspected_then_replaced_and_a_busy_one_never_asked(
    idle: bool, quiet_s: float, ticks: int, steps: list[str]
) -> None:
    assert asyncio.run(steps_of(ticks, quiet_s, idle_ticks=ticks if idle else 0)) == steps


def test_a_worker_that_was_asked_before_it_got_a_batch_has_to_answer() -> None:
    assert asyncio.run(steps_of(ticks=4, quiet_s=100.0, idle_ticks=1)) == ["asked", "suspect"]


async def steps_of(ticks: int, quiet_s: float, idle_ticks: int) -> list[str]:
    """Return what a heartbeat does in so many ticks after a silence; the worker is idle in the first ones."""
    steps: list[str] = []
    heartbeat = Heartbeat(
        SETTINGS,
        idle=lambda: tick <= idle_ticks,
        ask=lambda: steps.append("asked"),
        on_change=lambda: steps.append("suspect"),
        on_dead=lambda silent_s: steps.append(f"dead after {silent_s:g} s"),
        now=lambda: quiet_s + tick - 1 if tick else 0.0,
    )
    tick = 0
    heartbeat.answered()
    while tick < ticks:
        tick += 1
        heartbeat._tick()
    heartbeat.stop()
    return steps


class Worker:
    """Counts what its heartbeat does; answers as long as it is alive."""

    def __init__(self, settings: HeartbeatSettings) -> None:
        self.alive = True
        self.asked = asyncio.Event()
        self.changes: list[bool] = []
        self.dead: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.heartbeat = Heartbeat(
            settings,
            idle=lambda: True,
            ask=self._ask,
            on_change=lambda: self.changes.append(self.heartbeat.suspect),
            on_dead=self.dead.set_result,
            now=asyncio.get_running_loop().time,
        )

    def _ask(self) -> None:
        self.asked.set()
        if self.alive:
            self.heartbeat.answered()


def test_a_worker_that_answers_is_never_suspect_and_one_that_stops_is_replaced() -> None:
    async def main() -> None:
        worker = Worker(HeartbeatSettings(0.02, 0.03, 0.1))
        worker.heartbeat.start()
        assert not worker.asked.is_set()  # it has just said something
        await asyncio.wait_for(worker.asked.wait(), 10)
        assert worker.changes == []
        worker.alive = False
        assert await asyncio.wait_for(worker.dead, 10) == pytest.approx(0.1)
        assert worker.changes == [True]

    asyncio.run(main())


async def suspect_worker() -> Worker:
    """One that has not answered."""
    worker = Worker(HeartbeatSettings(0.02, 0.02, 1000.0))
    worker.alive = False
    worker.heartbeat.start()
    while not worker.heartbeat.suspect:
        await asyncio.sleep(0)
    return worker


def test_a_late_answer_lifts_the_suspicion() -> None:
    async def main() -> None:
        worker = await suspect_worker()
        worker.heartbeat.answered()
        worker.heartbeat.stop()
        assert worker.changes == [True, False]

    asyncio.run(main())


def test_a_new_worker_begins_with_no_suspicion_no_open_question_and_one_watch() -> None:
    async def main() -> None:
        worker = await suspect_worker()
        before = worker.heartbeat._timer
        worker.heartbeat.start()
        assert before is not None and before.cancelled()
        assert not worker.heartbeat.suspect
        assert worker.heartbeat._unanswered_ticks is None
        worker.heartbeat.stop()
        assert worker.changes == [True]  # the worker before it gave no sign of life again

    asyncio.run(main())
