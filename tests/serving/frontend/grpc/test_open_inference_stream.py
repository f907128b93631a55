import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.frontend.grpc.open_inference import IN_FLIGHT, PARTS_AHEAD, InferStream, in_order
from torchere.serving.frontend.grpc.open_inference_messages import TensorMessage
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferResponse


async def given(*items):
    for item in items:
        yield item


def test_answers_leave_in_the_order_of_requests_however_long_they_take():
    async def main():
        gates = [asyncio.Event() for _ in range(3)]
        begun = []

        async def answer(number):
            begun.append(number)
            await gates[number].wait()
            yield number, "a"
            yield number, "b"

        async def open_backwards():
            for gate in reversed(gates):
                gate.set()
                await asyncio.sleep(0)

        opening = asyncio.ensure_future(open_backwards())
        parts = [part async for part in in_order(given(0, 1, 2), answer)]
        await opening
        return parts, begun

    parts, begun = asyncio.run(main())
    assert parts == [(0, "a"), (0, "b"), (1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert begun == [0, 1, 2]


def test_requests_run_side_by_side_and_no_more_than_so_many():
    async def main():
        running, most = 0, 0
        go = asyncio.Event()

        async def answer(number):
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == IN_FLIGHT:
                go.set()
            await go.wait()
            running -= 1
            yield number

        return [part async for part in in_order(given(*range(500)), answer)], most

    parts, most = asyncio.run(main())
    assert parts == list(range(500))
    assert IN_FLIGHT <= most <= IN_FLIGHT + 2  # one that is being answered, one that waits to be put


def test_an_answer_is_not_made_far_ahead_of_its_turn():
    async def main():
        made = 0
        first_done = asyncio.Event()

        async def answer(number):
            nonlocal made
            if number == 0:
                for _ in range(1000):
                    await asyncio.sleep(0)
                first_done.set()
                yield made
                return
            while not first_done.is_set() or made < 100:
                made += 1
                yield number

        parts = [part async for part in in_order(given(0, 1), answer)]
        return parts[0]

    assert asyncio.run(main()) <= PARTS_AHEAD + 1


def test_what_reading_raises_comes_after_the_answers():
    async def broken():
        yield 1
        raise ConnectionResetError("the client is gone")

    async def answer(number):
        yield number

    async def main():
        parts = []
        with pytest.raises(ConnectionResetError):
            async for part in in_order(broken(), answer):
                parts.append(part)
        return parts

    assert asyncio.run(main()) == [1]


def test_closing_ends_all_that_runs():
    async def main():
        begun, ended = [], []

        async def answer(number):
            begun.append(number)
            try:
                yield number
                await asyncio.Event().wait()
            finally:
                ended.append(number)

        stream: Any = in_order(given(1, 2, 3), answer)
        assert await anext(stream) == 1
        for _ in range(10):
            await asyncio.sleep(0)
        await stream.aclose()
        return begun, sorted(ended), len(asyncio.all_tasks())

    assert asyncio.run(main()) == ([1, 2, 3], [1, 2, 3], 1)


def test_an_answer_that_is_ready_as_its_call_is_closed_is_not_counted(monkeypatch):
    held = [0]

    async def main():
        asked, go = asyncio.Event(), asyncio.Event()

        async def parts(stream, request):
            if request.id == "second":
                asked.set()
                await go.wait()
            yield ModelInferResponse(id=request.id)

        def count(size, **_):
            held[0] += size

        monkeypatch.setattr(InferStream, "parts", parts)
        stream = SimpleNamespace(kept_bytes=0, keep=lambda size: None, let_go=lambda size: None)
        stream.hold, stream.release = count, lambda size: count(-size)
        stream.check = lambda size: None
        requests = given(*(TensorMessage(b"", name, ()) for name in ("first", "second")))
        of_call: Any = InferStream
        answers = of_call(None, SimpleNamespace(stream=stream)).answers(requests)
        assert (await anext(answers)).infer_response.id == "first"
        await asked.wait()
        go.set()
        await answers.aclose()
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert held == [0]
