"""ASGI apps built in a thread, on the first request or after startup."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

_ONE_AT_A_TIME = threading.Lock()  # while building, the framework silences warnings of the whole process
WITHIN_S = 2.0  # models that take longer to load do not delay the rest of the REST API
FIRST_ANSWERS_S = 0.5  # left to the first predictions of clients that waited: these read the weights


class DeferredApp:
    """An ASGI app made by `build` on the first request, or earlier by `built`.

    Serves one event loop. `build` is called at most once, in a thread, because it imports modules. If it
    raises, every request raises its error.
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
        """Return the app, building it if needed. Cancelling one caller does not affect the others."""
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
    """Build the apps `answers_s` seconds after all of `loaded` are done or `within_s` seconds have passed.

    Building holds the GIL for half a second, which the first predictions need more. An earlier request for an
    app builds it at once.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*loaded), within_s)
    await asyncio.sleep(answers_s)
    for app in apps:
        await app.built()
    gc.freeze()  # the framework's objects live as long as the process: exclude them from collections
