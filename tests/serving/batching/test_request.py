"""One request, from the door to the answer."""

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import AwaitedRequest

from torchere.serving.batching.request import Ledger, Request
from torchere.serving.batching.unread_parts import UnreadParts
from torchere.serving.errors import Cancelled, HandlerFailed
from torchere.serving.types import InferResponse, StreamedResponse
from torchere.serving.workers.executor import BatchReport
from torchere.serving.workers.run import Run


class Door(Request):
    """A request that keeps its answers."""

    __slots__ = ("answers",)

    def __init__(self):
        super().__init__("id", 0.0)
        self.answers = []

    def reply(self, outcome):
        self.answers.append(outcome)


def place(request):
    return UnreadParts(100, request.finish)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answered_request_is_freed_without_a_collector(streamed):
    class Fleeting(Request):
        __slots__ = ("__weakref__",)

        def reply(self, outcome):
            pass

    async def main():
        request = Fleeting("id", 0.0)
        gone = weakref.ref(request)
        if streamed:
            request.add_part(InferResponse(b"part"), place)
        request.finish(InferResponse(b"answer"))
        request.finish(InferResponse(b"too late"))
        del request
        for _ in range(3):  # the parts that no client takes are dropped in turns of their own
            await asyncio.sleep(0)
        assert gone() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_a_request_is_answered_once_and_its_later_outcomes_are_dropped():
    request = Door()
    request.finish(HandlerFailed("first"))
    request.finish(InferResponse(b"late"))
    assert request.add_part(InferResponse(b"later"), place) is None
    assert [type(answer) for answer in request.answers] == [HandlerFailed]
    assert not request.open


def test_an_answer_is_counted_once_and_an_error_with_its_reason():
    failed = []
    meter: Any = SimpleNamespace(
        in_flight=2, failed=lambda error, request: failed.append((type(error), request))
    )
    ledger = Ledger()
    good, bad = Door(), Door()
    for request, outcome in ((good, InferResponse(b"fine")), (bad, Cancelled())):
        request.meter, request.ledger = meter, ledger
        request.finish(outcome)
        request.finish(outcome)
    assert (meter.in_flight, ledger.answered, failed) == (0, 2, [(Cancelled, bad)])
    assert good.answered_s > 0.0
    assert bad.answered_s == 0.0  # no handler answered it


@pytest.mark.parametrize("outcome", [HandlerFailed(), Cancelled(), InferResponse(b"last")])
def test_a_streamed_answer_is_counted_at_its_end_with_the_error_that_ended_it(outcome):
    async def main():
        request, failed = Door(), []
        meter: Any = SimpleNamespace(in_flight=1, failed=lambda error, request: failed.append(error))
        request.meter, request.ledger = meter, Ledger()
        request.add_part(InferResponse(b"first"), place)
        first_s = request.answered_s
        assert first_s > 0.0
        assert (meter.in_flight, request.ledger.answered, failed) == (1, 0, [])
        request.finish(outcome)
        request.finish(Cancelled("too late"))
        assert (meter.in_flight, request.ledger.answered, request.answered_s) == (0, 1, first_s)
        (answer,) = request.answers
        assert isinstance(answer, StreamedResponse)
        if isinstance(outcome, InferResponse):
            assert ([part async for part in answer.chunks], failed) == ([b"first", b"last"], [])
        else:
            with pytest.raises(type(outcome)):
                _ = [part async for part in answer.chunks]
            assert (failed, request.error) == ([outcome], outcome)

    asyncio.run(main())


def test_a_part_that_lies_among_the_raw_bytes_of_its_worker_is_copied():
    async def main():
        request = Door()
        raw: Any = memoryview(bytearray(b"first, and the part of another"))
        request.add_part(InferResponse(raw[:5]), place)
        request.finish(InferResponse(b"last"))
        (answer,) = request.answers
        assert isinstance(answer, StreamedResponse)
        assert [repr(part) async for part in answer.chunks] == ["b'first'", "b'last'"]

    asyncio.run(main())


def test_a_stream_that_its_client_gives_up_at_once_keeps_no_parts():
    class Refusing(Door):
        def reply(self, outcome):
            self.finish(Cancelled("no streams here"))

    async def main():
        request = Refusing()
        request.add_part(InferResponse(b"first"), place)
        request.add_part(InferResponse(b"second"), place)
        assert request.parts is None

    asyncio.run(main())


def test_a_stream_whose_reader_leaves_without_a_word_is_over():
    async def main():
        request = Door()
        request.add_part(InferResponse(b"first"), place)
        assert request.open
        request.answers.clear()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not request.open

    asyncio.run(main())


def test_a_coroutine_awaits_its_answer_or_gets_the_error_raised():
    async def main():
        good, bad, cancelled = (AwaitedRequest("id", 0.0) for _ in range(3))
        good.finish(InferResponse(b"fine"))
        bad.finish(HandlerFailed("no image"))
        cancelled.future.cancel()
        cancelled.finish(InferResponse(b"late"))
        assert await good.body() == b"fine"
        with pytest.raises(HandlerFailed, match="no image"):
            await bad.future
        assert cancelled.future.cancelled()

    asyncio.run(main())


class Page:
    """A `LanePage` that keeps the requests that were cancelled."""

    def __init__(self):
        self.cancelled = []

    def cancel(self, place, index):
        self.cancelled.append((place, index))


def test_a_request_sets_its_own_cancel_byte_as_long_as_its_run_is_inside():
    owner = SimpleNamespace(run_done=lambda run, report: None)
    requests = [Door(), Door()]
    run = Run(requests, owner)
    for request in requests:
        request.running = run
    requests[1].cancel_run()  # not sent yet
    page: Any = Page()
    run.page = page
    run.place = 7
    requests[1].cancel_run()
    assert page.cancelled == [(7, 1)]
    run.done(BatchReport([InferResponse(b"")] * 2))
    requests[0].cancel_run()  # its place may be another run's by now
    assert page.cancelled == [(7, 1)]
    Door().cancel_run()  # in no run
