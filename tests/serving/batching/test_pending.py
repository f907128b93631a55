"""One request on its way."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest

from torchere.serving.batching.pending import Pending
from torchere.serving.batching.unread_parts import UnreadParts
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


def place(made: Pending) -> UnreadParts:
    return UnreadParts(100, made.finish)


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
    async def main():
        asker = Asker()
        waiting = asker.waits_for = make(asker)
        gone = weakref.ref(asker)
        if streamed:
            waiting.add_part(InferResponse(b"part"), place)
        waiting.finish(InferResponse(b"answer"))
        waiting.finish(InferResponse(b"too late"))
        assert len(asker.answers) == 1
        del asker, waiting
        assert gone() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_stream_that_nobody_wants_keeps_no_parts():
    async def main():
        refused = Cancelled("no streams here")
        made = Pending(InferRequest("id", ()), "", 0.0, lambda outcome: made.finish(refused))
        made.add_part(InferResponse(b"first"), place)
        made.add_part(InferResponse(b"second"), place)
        assert made.stream is None

    asyncio.run(main())


def test_a_stream_whose_reader_leaves_without_a_word_is_over():
    async def main():
        asker = Asker()
        made = pending(asker)
        made.add_part(InferResponse(b"first"), place)
        assert made.open
        asker.answers.clear()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not made.open

    asyncio.run(main())
