"""The rule as a table, and the watch with time that the test lets pass."""

import asyncio

import pytest

from torchere.serving.workers.heartbeat import Heartbeat, HeartbeatSettings, Step, next_step

SETTINGS = HeartbeatSettings(ask_every_s=2.0, suspect_after_s=3.0, dead_after_s=10.0)


@pytest.mark.parametrize(
    ("idle", "quiet_s", "unanswered_s", "step"),
    [
        (True, 1.9, None, Step.NOTHING),
        (True, 2.0, None, Step.ASK),
        (False, 100.0, None, Step.NOTHING),  # busy: the response time-out watches it
        (True, 100.0, 2.9, Step.NOTHING),
        (True, 100.0, 3.0, Step.SUSPECT),
        (False, 100.0, 3.0, Step.SUSPECT),  # it was asked before it got the batch
        (True, 100.0, 10.0, Step.REPLACE),
    ],
)
def test_an_idle_worker_is_asked_then_suspected_then_replaced_and_a_busy_one_never_asked(
    idle: bool, quiet_s: float, unanswered_s: float | None, step: Step
) -> None:
    assert next_step(idle, quiet_s, unanswered_s, SETTINGS) is step


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
