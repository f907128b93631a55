"""The parts of sending with httpx that both clients share: settings, retries, deadlines and errors."""

from __future__ import annotations

import math
import os
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx

from torchere.client.errors import ClientError, ConnectionFailed, DeadlineExceeded, Unavailable
from torchere.client.exchange import (
    REFUSALS,
    Answer,
    Api,
    Operation,
    Request,
    bearer,
    check_headers,
    merged,
)
from torchere.client.key_file import find_key, is_loopback

TIMEOUT_HEADER = "x-torchere-timeout-ms"
LIMITS = httpx.Limits()  # one connection per running call; httpx's default limit is 100 connections
_LONGEST_TIMEOUT_MS = 86_400_000  # the longest time-out that the server accepts: one day
_LONGEST_WAIT_S = 1_000_000.0  # socket time-outs end at 24 days; a longer one means no time-out
_SHORTEST_WAIT_S = 0.001  # 0 would make the socket non-blocking
_AGENT = "torchere-client"
_FRAMING = frozenset({"content-length", "transfer-encoding"})  # the transport sets them to match the body
_MAX_PORT = 65_535
_PIECE_BYTES = 1 << 18
_PROXY_VARIABLES = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY"
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)


@dataclass(frozen=True, slots=True)
class Retries:
    """The number of retries of a call and the pauses between them.

    A request is sent again only if it can't have run: after a refused connection, a 429 that does not come
    from the model's handler, or a 503 with the name that servers give to a refusal. The pause before attempt
    n + 1 is the time in `Retry-After`, or else doubles from `first_pause_s`; it is at most `longest_pause_s`,
    and jittered. If a pause would end after the deadline of the call, the last error is raised instead.

    Args:
        most: attempts after the first; 0 disables retries.
        first_pause_s: seconds before the second attempt.
        longest_pause_s: the longest pause in seconds. A longer `Retry-After` ends the retries.
    """

    most: int = 3
    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0

    def __post_init__(self) -> None:
        if self.most < 0 or self.first_pause_s <= 0 or self.longest_pause_s < self.first_pause_s:
            raise ValueError(f"found {self}; expected most >= 0 and 0 < first_pause_s <= longest_pause_s")

    def pause_s(self, error: ClientError, attempt: int, remaining_s: float, dice: float) -> float | None:
        """Return the seconds to wait before the next attempt; None if the request must not be retried.

        Args:
            error: the error of the last attempt.
            attempt: the number of attempts so far, from 1.
            remaining_s: seconds until the deadline.
            dice: a random number from 0 to 1, for the jitter.
        """
        if attempt > self.most or not _may_be_sent_again(error):
            return None
        asked_s = error.retry_after_s if isinstance(error, Unavailable) else None
        if asked_s is None:
            doubled = 2.0 ** min(attempt - 1, 64)  # 2**64 is beyond any pause; 2.0**1024 would overflow
            pause = min(self.first_pause_s * doubled, self.longest_pause_s) * (0.5 + dice / 2)
        elif asked_s <= self.longest_pause_s:
            # Wait at least the time that the server asks for; the jitter spreads the retries of its clients.
            pause = asked_s * (1 + dice / 4)
        else:
            return None
        return pause if pause < remaining_s else None


def _may_be_sent_again(error: ClientError) -> bool:
    if isinstance(error, Unavailable):  # a 503 without a name is a proxy's, perhaps for a request that ran
        return error.status == 429 or error.kind in REFUSALS
    return isinstance(error, ConnectionFailed) and error.refused


@contextmanager
def certificates_named() -> Iterator[None]:
    """Name `SSL_CERT_FILE` in an error of its certificates; the text of OpenSSL's error names no file.

    Raises:
        ValueError: the certificates can't be loaded.
    """
    try:
        yield
    except OSError as err:
        file = os.environ.get("SSL_CERT_FILE")
        if not file:
            raise
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        except OSError as why:
            raise ValueError(f"SSL_CERT_FILE is {file}: {why.strerror or why}") from err
        raise  # the error is about another file, such as SSLKEYLOGFILE's


class Settings:
    """The constructor arguments of a client (see `Client`), which several threads use."""

    def __init__(
        self,
        addresses: Mapping[Api, str],
        tokens: Mapping[Api, str | None],
        timeout_s: float | None,
        retries: Retries | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        self.retries = retries or Retries()
        self._addresses = addresses
        self._tokens = dict(tokens)  # `key` adds the tokens that it finds
        self._timeout_s = timeout_s
        self._headers = headers or {}
        for each in self._addresses.values():
            if not _is_http(each):
                raise ValueError(f"the address is {each!r}; expected http://host:port or https://host:port")
        for given in self._tokens.values():
            if given:
                bearer(given)
        check_headers(self._headers)
        self.seconds(None)

    def http(self, kind: Callable[..., Http], transport: object, direct: Callable[..., object]) -> Http:
        """Return an httpx client that calls servers of this machine without the proxy of the environment.

        The proxy must not get the key of a key file, and would take such an address for its own machine.
        `direct` is the class of a transport without a proxy, used unless the caller gives a transport.

        Raises:
            ValueError: httpx can't use the proxy variables, or the certificates in `SSL_CERT_FILE`.
        """
        addresses = self._addresses.values()
        hosts = [httpx.URL(address).netloc.decode() for address in addresses if is_loopback(address)]
        mounts = {f"all://{host}": None for host in hosts}
        with certificates_named():
            if transport is None and len(hosts) == len(addresses):
                transport = direct(limits=LIMITS)  # so httpx reads no variable that it might refuse
            try:
                return kind(transport=transport, limits=LIMITS, mounts=mounts)
            except (ImportError, ValueError, httpx.InvalidURL) as err:
                raise ValueError(f"{_PROXY_VARIABLES}: found a value that httpx can't use: {err}") from err

    def url(self, request: Request) -> str:
        """Return the URL of a request."""
        return self._addresses[request.api].rstrip("/") + request.path

    def sent_headers(self, request: Request, remaining_s: float) -> dict[str, str]:
        """Return the headers of one attempt; the inference API gets the remaining time in milliseconds.

        Raises:
            ClientError: there is no key, see `key`, or HTTP can't carry a header of the request.
        """
        try:
            check_headers(request.headers)
        except ValueError as err:
            raise ClientError(str(err)) from err
        token = self.key(request.api)
        authorization = {"authorization": bearer(token)} if token else {}
        headers = merged({"user-agent": _AGENT}, authorization, self._headers, request.headers)
        headers = {name: value for name, value in headers.items() if name.lower() not in _FRAMING}
        if request.api == "inference" and remaining_s < math.inf:
            remaining_ms = max(1, min(math.ceil(remaining_s * 1000), _LONGEST_TIMEOUT_MS))
            headers = merged(headers, {TIMEOUT_HEADER: str(remaining_ms)})
        return headers

    def seconds(self, timeout_s: float | None) -> float:
        """Return the time-out of a call in seconds: the call's or the client's; infinity if both are None."""
        wanted = self._timeout_s if timeout_s is None else timeout_s
        if wanted is None:
            return math.inf
        if not wanted > 0:
            raise ValueError(f"found timeout_s={wanted}, expected seconds above 0")
        return wanted

    def key(self, api: Api) -> str:
        """Return the key that requests to an API carry; "" if they carry no key.

        A token that is None is looked up, once, when the first request of its API is sent: no call may fail
        for the key of the other API, which it does not need.

        Raises:
            ClientError: the key file can't be read or has no such key, or the key is malformed.
        """
        token = self._tokens[api]
        if token is None:
            try:
                found = find_key(self._addresses[api], api)
                if found is not None:
                    bearer(found.key)
            except (OSError, ValueError) as err:
                raise ClientError(f"no key for the {api} API: {err}") from err
            token = self._tokens[api] = found.key if found else ""
        return token


class TimeLeft(Mapping[str, float | None]):
    """The httpx time-outs of one attempt: the remaining time of the call at the start of each step.

    A fixed number instead would grant the full time to the connection, the request and the response each.
    """

    def __init__(self, remaining_s: Callable[[], float]) -> None:
        self._remaining_s = remaining_s

    def __getitem__(self, step: str) -> float | None:
        remaining_s = self._remaining_s()
        return None if remaining_s > _LONGEST_WAIT_S else max(remaining_s, _SHORTEST_WAIT_S)

    def __iter__(self) -> Iterator[str]:
        return iter(("pool", "connect", "write", "read"))

    def __len__(self) -> int:
        return 4


class ClientCall:
    """One call of an operation: its deadline, its attempts, and the translation of httpx's errors."""

    def __init__(self, settings: Settings, operation: Operation[object], timeout_s: float | None) -> None:
        self.operation = operation
        self._settings = settings
        self._timeout_s = settings.seconds(timeout_s)
        self._deadline_s = time.monotonic() + self._timeout_s
        self._attempts = 0

    def remaining_s(self) -> float:
        """Return the seconds until the deadline."""
        return self._deadline_s - time.monotonic()

    def check_deadline(self) -> None:
        """Raise DeadlineExceeded if the deadline has passed."""
        if self.remaining_s() <= 0:
            raise self._too_late()

    def built(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Return the request of an attempt.

        Raises:
            ClientError: the deadline has passed, the client is closed, the key is missing, or a header is
                invalid.
        """
        self.check_deadline()
        request = self.operation.request
        headers = self._settings.sent_headers(request, self.remaining_s())
        content: bytes | Iterator[bytes] = request.body
        if isinstance(http, httpx.Client) and len(request.body) > _PIECE_BYTES:
            headers["content-length"] = str(len(request.body))
            content = self._pieces(request.body)
        if http.is_closed:  # otherwise httpx would raise a RuntimeError
            raise ClientError("the client is closed; make another one")
        return http.build_request(
            request.method,
            self._settings.url(request),
            headers=headers,
            content=content,
            extensions={"timeout": TimeLeft(self.remaining_s)},
        )

    def pause_s(self, error: ClientError) -> float:
        """Return the seconds to wait before the next attempt; raise the error if there must be none."""
        self._attempts += 1
        pause_s = self._settings.retries.pause_s(error, self._attempts, self.remaining_s(), random.random())
        if pause_s is None:
            raise error
        return pause_s

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate httpx's exceptions into the errors of this package."""
        url = self._settings.url(self.operation.request)
        try:
            yield
        except httpx.TimeoutException as err:
            raise self._too_late() from err
        except httpx.ConnectError as err:
            raise ConnectionFailed(f"no connection to {url}: {err}", refused=True) from err
        except (httpx.HTTPError, httpx.StreamError) as err:
            if self.remaining_s() <= 0:  # the server enforces the deadline, too, and ends the stream
                raise self._too_late() from err
            raise ConnectionFailed(f"the connection to {url} broke: {str(err) or repr(err)}") from err

    def _pieces(self, body: bytes) -> Iterator[bytes]:
        # The time-out of httpx applies to each send to a blocking socket, not to their sum: a slow connection
        # would never exceed it.
        for start in range(0, len(body), _PIECE_BYTES):
            self.check_deadline()
            yield body[start : start + _PIECE_BYTES]

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within {self._timeout_s:g} s")


def answer_of(response: httpx.Response, body: bytes) -> Answer:
    """Convert a response of httpx, whose body has been read, to this package's type."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(body, headers, response.status_code)


def _is_http(address: str) -> bool:
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL:
        return False
    # The operating system would take a larger port modulo 65536 and reach a different server.
    return url.scheme in ("http", "https") and bool(url.host) and (url.port or 0) <= _MAX_PORT
