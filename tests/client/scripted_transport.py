"""Both clients over a transport that answers from a script, with a clock that moves only when told."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from torchere.client import AsyncClient, Client

Step = httpx.Response | Exception
Call = Callable[[Any], Any]


class Server:
    """Answers requests from a list, and keeps what came; the last step answers all further requests."""

    def __init__(self, *steps: Step) -> None:
        self.requests: list[httpx.Request] = []
        self._steps = list(steps)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        if isinstance(step, Exception):
            raise step
        return httpx.Response(step.status_code, headers=step.headers, content=step.content)


class Caller:
    """Makes the same call with one of the clients: `call(server, lambda client: client.predict("m"))`."""

    def __init__(self, asynchronous: bool) -> None:
        self._asynchronous = asynchronous

    def __call__(self, server: Server, call: Call, **options: Any) -> Any:
        transport = httpx.MockTransport(server)
        if self._asynchronous:
            return asyncio.run(_awaited(AsyncClient(transport=transport, **options), call))
        with Client(transport=transport, **options) as client:
            return _collected(call(client))


async def _awaited(client: AsyncClient, call: Call) -> Any:
    async with client:
        made = call(client)
        if hasattr(made, "__aiter__"):
            return [part async for part in made]
        return await made


def _collected(made: Any) -> Any:
    return list(made) if isinstance(made, Iterator) else made


class Clock:
    """Stands in for `time` and `asyncio.sleep` in the transports and what they share."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.pauses_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


class TimeModule:
    def __init__(self, clock: Clock) -> None:
        self.monotonic = clock.monotonic
        self.sleep = clock.sleep
        self.time = time.time


class AsyncioModule:
    def __init__(self, clock: Clock) -> None:
        self.sleep = clock.sleep_async
