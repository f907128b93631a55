"""The transports, synchronous and asyncio: send operations with httpx, retry them and enforce deadlines."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator

import httpx

from torchere.client.errors import ClientError
from torchere.client.exchange import Operation, Request, Result
from torchere.client.wire import Settings, TimeLeft, answer_of, read, too_late, translated

_PIECE_BYTES = 1 << 18


class Blocking:
    """Sends operations; thread-safe, because httpx's client is and there is no other mutable state."""

    def __init__(self, settings: Settings, http: httpx.Client) -> None:
        self._settings = settings
        self._http = http

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def run(self, operation: Operation[Result], timeout_s: float | None) -> Result:
        """Send an operation, retry it as `Retries` allows within its deadline, and return its result.

        Raises:
            ClientError: the error of the last attempt.
        """
        allowed_s = self._settings.seconds(timeout_s)
        deadline_s = time.monotonic() + allowed_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._attempt(operation, deadline_s, allowed_s)
            except ClientError as error:
                self._pause_or_raise(error, attempt, deadline_s)

    def stream(self, operation: Operation[object], timeout_s: float | None) -> Generator[bytes, None, None]:
        """Yield the parts of a response as they arrive; retry only before the first part."""
        allowed_s = self._settings.seconds(timeout_s)
        deadline_s = time.monotonic() + allowed_s
        attempt = 0
        while True:
            attempt += 1
            begun = False
            try:
                for part in self._parts(operation, deadline_s, allowed_s):
                    begun = True
                    yield part
                return
            except ClientError as error:
                if begun:
                    raise
                self._pause_or_raise(error, attempt, deadline_s)

    def _pause_or_raise(self, error: ClientError, attempt: int, deadline_s: float) -> None:
        remaining_s = deadline_s - time.monotonic()
        pause_s = self._settings.retries.pause_s(error, attempt, remaining_s, random.random())
        if pause_s is None:
            raise error
        time.sleep(pause_s)

    def _attempt(self, operation: Operation[Result], deadline_s: float, allowed_s: float) -> Result:
        with translated(self._settings.url(operation.request), deadline_s, allowed_s):
            response = self._send(operation.request, deadline_s, allowed_s)
            try:
                body = b"".join(_within(response, deadline_s, allowed_s))
            finally:
                response.close()
        return read(operation, answer_of(response, body))

    def _parts(self, operation: Operation[object], deadline_s: float, allowed_s: float) -> Iterator[bytes]:
        with translated(self._settings.url(operation.request), deadline_s, allowed_s):
            response = self._send(operation.request, deadline_s, allowed_s)
            try:
                if not operation.takes(response.status_code):
                    read(operation, answer_of(response, b"".join(_within(response, deadline_s, allowed_s))))
                yield from _within(response, deadline_s, allowed_s)
            finally:
                response.close()

    def _send(self, request: Request, deadline_s: float, allowed_s: float) -> httpx.Response:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise too_late(allowed_s)
        headers = self._settings.sent_headers(request, remaining_s)
        content: bytes | Iterator[bytes] = request.body
        if len(request.body) > _PIECE_BYTES:
            headers["content-length"] = str(len(request.body))
            content = _pieces(request.body, deadline_s, allowed_s)
        built = self._http.build_request(
            request.method,
            self._settings.url(request),
            headers=headers,
            content=content,
            extensions={"timeout": TimeLeft(lambda: deadline_s - time.monotonic())},
        )
        return self._http.send(built, stream=True)


def _pieces(body: bytes, deadline_s: float, allowed_s: float) -> Iterator[bytes]:
    # The time-out of httpx applies to each send to the socket, not to their sum: a slow connection would
    # never exceed it.
    for start in range(0, len(body), _PIECE_BYTES):
        if time.monotonic() > deadline_s:
            raise too_late(allowed_s)
        yield body[start : start + _PIECE_BYTES]


def _within(response: httpx.Response, deadline_s: float, allowed_s: float) -> Iterator[bytes]:
    # The time-out of httpx applies to each read, not to their sum: a server that sends one byte a second
    # would never exceed it.
    for part in response.iter_bytes():
        yield part
        if time.monotonic() > deadline_s:
            raise too_late(allowed_s)


class Awaiting:
    """Sends operations; any number at once, on one event loop. Cancelling a call closes its connection."""

    def __init__(self, settings: Settings, http: httpx.AsyncClient) -> None:
        self._settings = settings
        self._http = http

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def run(self, operation: Operation[Result], timeout_s: float | None) -> Result:
        """Send an operation, retry it as `Retries` allows within its deadline, and return its result.

        Raises:
            ClientError: the error of the last attempt.
        """
        allowed_s = self._settings.seconds(timeout_s)
        deadline_s = time.monotonic() + allowed_s
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._attempt(operation, deadline_s, allowed_s)
            except ClientError as error:
                await self._pause_or_raise(error, attempt, deadline_s)

    async def stream(
        self, operation: Operation[object], timeout_s: float | None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a response as they arrive; retry only before the first part."""
        allowed_s = self._settings.seconds(timeout_s)
        deadline_s = time.monotonic() + allowed_s
        attempt = 0
        while True:
            attempt += 1
            begun = False
            try:
                async for part in self._parts(operation, deadline_s, allowed_s):
                    begun = True
                    yield part
                return
            except ClientError as error:
                if begun:
                    raise
                await self._pause_or_raise(error, attempt, deadline_s)

    async def _pause_or_raise(self, error: ClientError, attempt: int, deadline_s: float) -> None:
        remaining_s = deadline_s - time.monotonic()
        pause_s = self._settings.retries.pause_s(error, attempt, remaining_s, random.random())
        if pause_s is None:
            raise error
        await asyncio.sleep(pause_s)

    async def _attempt(self, operation: Operation[Result], deadline_s: float, allowed_s: float) -> Result:
        with translated(self._settings.url(operation.request), deadline_s, allowed_s):
            response = await self._send(operation.request, deadline_s, allowed_s)
            try:
                body = await _whole(response, deadline_s, allowed_s)
            finally:
                await response.aclose()
        return read(operation, answer_of(response, body))

    async def _parts(
        self, operation: Operation[object], deadline_s: float, allowed_s: float
    ) -> AsyncIterator[bytes]:
        with translated(self._settings.url(operation.request), deadline_s, allowed_s):
            response = await self._send(operation.request, deadline_s, allowed_s)
            try:
                if not operation.takes(response.status_code):
                    read(operation, answer_of(response, await _whole(response, deadline_s, allowed_s)))
                async for part in _awaited_within(response, deadline_s, allowed_s):
                    yield part
            finally:
                await response.aclose()

    async def _send(self, request: Request, deadline_s: float, allowed_s: float) -> httpx.Response:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise too_late(allowed_s)
        built = self._http.build_request(
            request.method,
            self._settings.url(request),
            headers=self._settings.sent_headers(request, remaining_s),
            content=request.body,
            extensions={"timeout": TimeLeft(lambda: deadline_s - time.monotonic())},
        )
        return await self._http.send(built, stream=True)


async def _whole(response: httpx.Response, deadline_s: float, allowed_s: float) -> bytes:
    return b"".join([part async for part in _awaited_within(response, deadline_s, allowed_s)])


async def _awaited_within(
    response: httpx.Response, deadline_s: float, allowed_s: float
) -> AsyncIterator[bytes]:
    # The time-out of httpx applies to each read, not to their sum: a server that sends one byte a second
    # would never exceed it.
    async for part in response.aiter_bytes():
        yield part
        if time.monotonic() > deadline_s:
            raise too_late(allowed_s)
