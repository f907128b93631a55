"""One request on its way."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from torchere.serving.batching.pending import Pending
from torchere.serving.errors import Cancelled
from torchere.serving.frontend.dataplane import Prediction
from torchere.serving.types import InferRequest, InferResponse


class Asker:
    """Holds what it waits for, as frontends do, and is called when it is there."""

    def __init__(self) -> None:
        self.waits_for: object = None
        self.answers: list[object] = []

    def reply(self, outcome: object) -> None:
        self.answers.append(outcome)


def pending(asker: Asker) -> Pending:
    return Pending(InferRequest("id", ()), "", 0.0, asker.reply)


def prediction(asker: Asker) -> Pending:
    plane = SimpleNamespace(settle=lambda prediction, outcome: None)
    made = Prediction(plane, None, None, asker.reply, None)  # type: ignore[arg-type]
    made.pending = Pending(InferRequest("id", ()), "", 0.0, made.answered)
    asker.waits_for = made
    return made.pending


@pytest.mark.parametrize("make", [pending, prediction])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answered_request_and_who_asked_are_freed_without_a_collector(make, streamed):
    asker = Asker()
    waiting = asker.waits_for = make(asker)
    gone = weakref.ref(asker)
    gc.disable()
    try:
        if streamed:
            waiting.add_part(InferResponse(b"part"))
        waiting.finish(InferResponse(b"answer"))
        waiting.finish(InferResponse(b"too late"))
        assert len(asker.answers) == 1
        del asker, waiting
        assert gone() is None
    finally:
        gc.enable()


def test_a_stream_that_nobody_wants_keeps_no_parts():
    made = Pending(InferRequest("id", ()), "", 0.0, lambda outcome: made.finish(Cancelled("no streams here")))
    made.add_part(InferResponse(b"first"))
    made.add_part(InferResponse(b"second"))
    assert made.stream is None
