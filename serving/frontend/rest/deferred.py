"""ASGI apps that are built once somebody needs them, or when the start is over, beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

_ONE_AT_A_TIME = threading.Lock()  # the framework silences warnings for the whole process meanwhile
WITHIN_S = 2.0  # models that take longer to load do not hold up the rest of the REST API
FIRST_ANSWERS_S = 0.5  # for who waited for the models and asks now; those answers read the weights


class DeferredApp:
    """Answers as the app that `build` makes; its first request waits for that, or `built` was there before.

    Serves one event loop. `build` is called at most once, in a thread: it imports. What it raises comes out
    of every request.
    """

    def __init__(self, build: Callable[[], ASGIApp]) -> None:
        self._build = build
        self._app: ASGIApp | None = None
        self._building: asyncio.Future[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        app = self._app or await self.built()
        await app(scope, receive, send)

    async def built(self) -> ASGIApp:
        """The app. Whoever waits may be cancelled: the others go on waiting."""
        if self._building is None:
            self._building = asyncio.ensure_future(asyncio.to_thread(self._build_alone))
        self._app = await asyncio.shield(self._building)
        return self._app

    def _build_alone(self) -> ASGIApp:
        with _ONE_AT_A_TIME:
            return self._build()


async def build_after(
    loaded: Iterable[Awaitable[object]],
    apps: Sequence[DeferredApp],
    within_s: float = WITHIN_S,
    answers_s: float = FIRST_ANSWERS_S,
) -> None:
    """Build the apps once all that is `loaded` is there, or `within_s` have passed, and `answers_s` on top.

    It takes half a second of the GIL, which the first predictions need more. Who asks for an app sooner has
    it built at once.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*loaded), within_s)
    await asyncio.sleep(answers_s)
    for app in apps:
        await app.built()
    gc.freeze()  # the framework's objects live as long as we do: never walk them again
