"""Executors whose client has much to take: they wait with the next part, and their time does not run."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pools import pool_in_service, until

from torchere.serving.errors import Cancelled, ExecutorDied, HandlerFailed
from torchere.serving.types import InferRequest, InferResponse, Parameter
from torchere.serving.workers import messages
from torchere.serving.workers.concurrent_lane import ConcurrentLane
from torchere.serving.workers.executor import BatchReport
from torchere.serving.workers.frames import HEADER
from torchere.serving.workers.run import Run

PARTS = 8
PART_BYTES = 2 * 2**20  # more than a thread may be ahead, and more than a socket holds
RESPONSE_TIMEOUT_S = 0.3
STREAMING = f"""
    from ts.handler_utils.utils import send_intermediate_predict_response
    class Handler:
        def initialize(self, context):
            self.folder = context.system_properties["model_dir"]
        def handle(self, data, context):
            for number in range({PARTS}):
                part = bytes({PART_BYTES})
                send_intermediate_predict_response([part], context.request_ids, "", 200, context)
                open(f"{{self.folder}}/made-{{number}}", "w").close()
            return ["end"]
"""


class Held:
    """An owner of a run that holds its lane from the first part on."""

    def __init__(self, sink):
        self.sink = sink
        self.first = asyncio.Event()
        self.go_on = None
        self.is_over = False

    def run_part(self, run, index, part):
        self.sink.run_part(run, index, part)
        self.first.set()
        return None if self.is_over else self

    def when_over(self, go_on):
        assert self.go_on is None
        self.go_on = go_on

    def over(self):
        self.is_over = True
        assert self.go_on is not None
        self.go_on()

    def run_done(self, run, report):
        self.sink.run_done(run, report)

    def run_returned(self, run):
        self.sink.run_returned(run)


@pytest.fixture
def held_run(make_spec, make_sink, make_request):
    """`held_run(kind, test)`: runs `test(pool, held, folder)` with a batch whose first part has come."""

    def runner(kind, test):
        async def main():
            spec = make_spec(STREAMING, shares_weights=kind == "thread")
            async with pool_in_service(spec, response_timeout_s=RESPONSE_TIMEOUT_S) as pool:
                held = Held(make_sink())
                pool.submit(Run([make_request("x")], held))
                await asyncio.wait_for(held.first.wait(), 30)
                await test(pool, held, Path(spec.archive_dir))

        asyncio.run(main())

    return runner


def made(folder):
    return len(list(folder.glob("made-*")))


KINDS = pytest.mark.parametrize("kind", ["thread", "process"])


@KINDS
def test_a_held_executor_makes_no_more_and_goes_on_later(held_run, kind):
    async def test(pool, held, folder):
        await asyncio.sleep(2 * RESPONSE_TIMEOUT_S)  # in which it is not taken for one that hangs
        assert made(folder) < PARTS / 2
        assert not held.sink.report.done()
        held.over()
        assert (await held.sink.outcome()).body == b"end"
        assert len(held.sink.parts) == PARTS
        assert pool.statuses()[0].losses == 0

    held_run(kind, test)


@KINDS
def test_a_pool_closes_while_an_executor_is_held(held_run, kind):
    async def test(pool, held, folder):
        closing = asyncio.ensure_future(pool.close())
        assert isinstance(await held.sink.outcome(), ExecutorDied)
        held.over()
        await asyncio.wait_for(closing, 30)

    held_run(kind, test)


def test_a_coroutine_that_is_over_ends_its_run_when_its_client_leaves_the_last_parts(
    make_spec, make_sink, make_request
):
    source = STREAMING.replace("def handle", "async def handle").replace(
        "                open", "                await asyncio.sleep(0.01)\n                open"
    )

    async def main():
        spec = make_spec(f"    import asyncio{source}", at_once=8)
        async with pool_in_service(spec, response_timeout_s=30.0) as pool:
            held = Held(make_sink())
            run = Run([make_request("x")], held)
            pool.submit(run)
            while made(Path(spec.archive_dir)) < PARTS:  # the handler is over, and most parts wait
                await asyncio.sleep(0.01)
            run.cancel(0)
            await asyncio.wait_for(asyncio.shield(held.sink.report), 10)
            assert (pool.free, len(held.sink.parts) < PARTS) == (8, True)

    asyncio.run(main())


def concurrent_lane(run_beside: Any, sent: list[Any]) -> ConcurrentLane:
    """A lane that gets one run, whose client has left, and puts what it sends into `sent`."""
    frame = messages.encode_frame(messages.Run(1, 0, (InferRequest("id", ()),)))
    batches = SimpleNamespace(has_more=False, next=lambda: frame[HEADER.size :])
    host = SimpleNamespace(loop=asyncio.get_running_loop(), end_cause="", run_beside=run_beside)
    lane: Any = SimpleNamespace(batches=batches, host=host, send=sent.append, take_share=lambda: None)
    page: Any = SimpleNamespace(
        to_server=None, mark=lambda *_: None, is_held=lambda _: False, all_cancelled=lambda *_: True
    )
    unused: Any = None
    return ConcurrentLane(lane, page, unused, unused)


def test_a_coroutine_whose_client_leaves_before_its_first_step_ends_its_run():
    async def run_beside(*_):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return BatchReport([Cancelled()])

    async def main():
        sent: list[Any] = []
        concurrent = concurrent_lane(run_beside, sent)
        concurrent._take()
        concurrent._look()  # its timer is due in the turn of the loop in which the run arrives
        await until(lambda: sent, 10)

    asyncio.run(main())


def test_a_coroutine_that_fails_outside_of_its_handler_has_a_report():
    async def run_beside(*_):
        raise RuntimeError("a fault of the server")

    async def main():
        sent: list[Any] = []
        concurrent_lane(run_beside, sent)._take()
        await until(lambda: sent, 10)
        done = messages.data_from_worker.decode(sent[0][0][HEADER.size :])
        assert isinstance(done, messages.Done)
        assert isinstance(messages.report_from_done(done, 1).outcomes[0], HandlerFailed)

    asyncio.run(main())


def test_parts_that_were_held_back_and_those_of_a_handlers_thread_keep_their_order():
    is_held, is_overtaken = threading.Event(), threading.Event()
    sent: list[Any] = []

    async def run_beside(request, send_part, is_unwanted):
        is_held.set()
        for number in b"01":
            send_part(0, InferResponse(bytes([number])))
        is_held.clear()
        await asyncio.to_thread(send_part, 0, InferResponse(b"2"))
        return BatchReport([InferResponse(b"3")])

    def send(parts):
        if not sent and threading.current_thread() is not threading.main_thread():
            is_overtaken.wait(0.5)  # the loop looks meanwhile
        sent.append(messages.data_from_worker.decode(parts[0][HEADER.size :]))
        is_overtaken.set()

    async def main():
        concurrent: Any = concurrent_lane(run_beside, sent)
        concurrent._lane.send = send
        concurrent._page.is_held = lambda _: is_held.is_set()
        concurrent._page.all_cancelled = lambda *_: False
        concurrent._take()
        await until(lambda: len(sent) == 4, 10)
        assert [part.part.body for part in sent[:3]] == [b"0", b"1", b"2"]

    asyncio.run(main())


def test_a_run_that_its_lane_does_not_begin_keeps_no_mark_for_its_large_values():
    marks: list[tuple[int, int]] = []
    page: Any = SimpleNamespace(
        to_server=None, mark=lambda place, run_id, now_s: marks.append((place, run_id))
    )
    frame = messages.encode_frame(
        messages.Run(7, 3, (InferRequest("id", (Parameter("x", b""),)),), ((0, 0, 5),))
    )
    batches = SimpleNamespace(
        has_more=False, next=lambda: frame[HEADER.size :], raw=lambda count: memoryview(b"large")
    )
    loop = SimpleNamespace(add_reader=lambda *_: None, call_later=lambda *_: None)
    loop.create_task = lambda coroutine: coroutine.close()
    lane: Any = SimpleNamespace(batches=batches, data=None, host=SimpleNamespace(loop=loop))
    unused: Any = None
    concurrent = ConcurrentLane(lane, page, unused, unused)
    loop.run_forever = concurrent._take  # another run ends the process in the same turn
    concurrent.serve()
    assert marks == [(3, 7), (3, 0)]
