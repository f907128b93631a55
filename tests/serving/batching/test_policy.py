"""The dispatch policy as a table: what waits, and what is free; and when the batch is due."""

import pytest

from torchere.serving.batching.policy import NOT_DUE, QueueView, due_s
from torchere.serving.config.server_settings import BatchSettings

FOUR = BatchSettings(max_batch_size=4, max_queue_delay_ms=100)
EAGER = BatchSettings(max_batch_size=4, max_queue_delay_ms=100, dispatch="eager")
ONE = BatchSettings(max_batch_size=1, max_queue_delay_ms=100)

CASES = {
    "an empty queue waits for nothing": (QueueView(0, False, 0.0, 3), FOUR, NOT_DUE),
    "without a free executor nothing is dispatched": (QueueView(4, False, 0.0, 0), FOUR, NOT_DUE),
    "a full batch goes at once": (QueueView(4, False, 9.99, 1), FOUR, 9.99),
    "a young batch waits for company": (QueueView(2, False, 9.95, 1), FOUR, 9.95 + 0.1),
    "the delay counts from the oldest request": (QueueView(3, False, 1.0, 1), FOUR, 1.1),
    "nothing joins a group that another one follows": (QueueView(2, True, 9.99, 1), FOUR, 9.99),
    "batch size one never waits": (QueueView(1, False, 10.0, 1), ONE, 10.0),
    "eager dispatch never waits while an executor idles": (QueueView(1, False, 10.0, 1), EAGER, 10.0),
    "eager dispatch waits for an executor": (QueueView(4, False, 10.0, 0), EAGER, NOT_DUE),
}


@pytest.mark.parametrize(("view", "settings", "expected"), CASES.values(), ids=CASES.keys())
def test_when_a_batch_is_due(view: QueueView, settings: BatchSettings, expected: float) -> None:
    assert due_s(view, settings) == expected
