import asyncio

import pytest

from torchere.serving.frontend.rest.disconnect import SWEEP_S, DisconnectWatch


def test_a_request_that_is_answered_at_once_is_never_listened_for():
    listened = []

    async def receive():
        listened.append(True)
        await asyncio.Event().wait()

    async def main():
        watch = DisconnectWatch()
        watched = watch.enter(receive)
        watch.leave(watched)
        for _ in range(3):  # as its timer would
            watch._sweep()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert listened == []


def test_a_request_that_waits_is_cancelled_when_its_client_goes():
    gone = []

    async def receive():
        return {"type": "http.disconnect"}

    async def main():
        watch = DisconnectWatch()
        watched = watch.enter(receive)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.Event().wait(), 20)
        watch.leave(watched)
        gone.append(watched.gone)

    async def task():
        await asyncio.create_task(main())

    asyncio.run(task())
    assert gone == [True]


def test_a_request_that_is_answered_late_stops_its_listener():
    async def receive():
        await asyncio.Event().wait()

    async def main():
        watch = DisconnectWatch()
        watched = watch.enter(receive)
        while watched.listener is None:
            await asyncio.sleep(SWEEP_S)
        listener = watched.listener
        watch.leave(watched)
        with pytest.raises(asyncio.CancelledError):
            await listener
        return watched.gone

    assert asyncio.run(main()) is False
