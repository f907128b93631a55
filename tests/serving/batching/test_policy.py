"""The dispatch policy as a table: what waits, what is free, what time it is; and what follows."""

import pytest

from torchere.serving.batching.policy import Action, Dispatch, Idle, QueueView, WaitUntil, plan
from torchere.serving.config.server_settings import BatchSettings

FOUR = BatchSettings(max_batch_size=4, max_queue_delay_ms=100)
EAGER = BatchSettings(max_batch_size=4, max_queue_delay_ms=100, dispatch="eager")
ONE = BatchSettings(max_batch_size=1, max_queue_delay_ms=100)

CASES = {
    "an empty queue waits for nothing": (QueueView(0, False, 0.0, 3), FOUR, 10.0, Idle()),
    "without a free executor nothing is dispatched": (QueueView(9, False, 0.0, 0), FOUR, 10.0, Idle()),
    "a full batch goes at once": (QueueView(4, False, 9.99, 1), FOUR, 10.0, Dispatch(4)),
    "more than a batch goes in batches": (QueueView(7, False, 9.99, 1), FOUR, 10.0, Dispatch(4)),
    "a young batch waits for company": (QueueView(2, False, 9.95, 1), FOUR, 10.0, WaitUntil(9.95 + 0.1)),
    "the delay counts from the oldest request": (QueueView(2, False, 9.9, 1), FOUR, 10.0, Dispatch(2)),
    "an old batch goes as it is": (QueueView(3, False, 1.0, 1), FOUR, 10.0, Dispatch(3)),
    "nothing joins a group that another one follows": (QueueView(2, True, 9.99, 1), FOUR, 10.0, Dispatch(2)),
    "batch size one never waits": (QueueView(1, False, 10.0, 1), ONE, 10.0, Dispatch(1)),
    "eager dispatch never waits while an executor idles": (
        QueueView(1, False, 10.0, 1),
        EAGER,
        10.0,
        Dispatch(1),
    ),
    "eager dispatch still batches what is there": (QueueView(9, False, 10.0, 1), EAGER, 10.0, Dispatch(4)),
    "eager dispatch waits for an executor": (QueueView(9, False, 10.0, 0), EAGER, 10.0, Idle()),
}


@pytest.mark.parametrize(("view", "settings", "now_s", "expected"), CASES.values(), ids=CASES.keys())
def test_plan(view: QueueView, settings: BatchSettings, now_s: float, expected: Action) -> None:
    assert plan(view, settings, now_s) == expected
