"""What both transports share: addresses, headers, and httpx's errors in our words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from torchere.client.errors import ConnectionFailed, DeadlineExceeded
from torchere.client.exchange import Answer, Api, Operation, Request, Result
from torchere.client.refusals import refusal
from torchere.client.retries import Retries

TIMEOUT_HEADER = "x-torchere-timeout-ms"
_LONGEST_TIMEOUT_MS = 86_400_000  # the most the server takes: a day
_AGENT = "torchere-client"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a client is made with; see `Client`."""

    address: str
    management_address: str
    token: str | None
    management_token: str | None
    timeout_s: float | None
    retries: Retries
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for address in (self.address, self.management_address):
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"the address is {address!r}; expected http://host:port or https://host:port"
                )
        self.seconds(None)

    def url(self, request: Request) -> str:
        """Where a request goes."""
        base = self.address if request.api == "inference" else self.management_address
        return base.rstrip("/") + request.path

    def sent_headers(self, request: Request, remaining_s: float) -> dict[str, str]:
        """The headers of one attempt; the deadline travels as what is left of it."""
        headers = {"user-agent": _AGENT, **self.headers, **request.headers}
        token = self._token(request.api)
        if token is not None:
            headers.setdefault("authorization", f"Bearer {token}")
        if request.api == "inference" and remaining_s < math.inf:
            remaining_ms = max(1, min(math.ceil(remaining_s * 1000), _LONGEST_TIMEOUT_MS))
            headers[TIMEOUT_HEADER] = str(remaining_ms)
        return headers

    def seconds(self, timeout_s: float | None) -> float:
        """How long a call may take: its own time-out, or the client's; infinity for none."""
        wanted = self.timeout_s if timeout_s is None else timeout_s
        if wanted is None:
            return math.inf
        if not wanted > 0:
            raise ValueError(f"found timeout_s={wanted}, expected seconds above 0")
        return wanted

    def _token(self, api: Api) -> str | None:
        return self.token if api == "inference" else self.management_token


def read(operation: Operation[Result], answer: Answer) -> Result:
    """What an operation makes of an answer.

    Raises:
        AnswerError: the answer is an error.
    """
    if not operation.takes(answer.status):
        raise refusal(answer)
    return operation.read(answer)


def answer_of(response: httpx.Response, body: bytes) -> Answer:
    """Our record of an answer whose body was read."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Answer(response.status_code, headers, body)


def too_late(timeout_s: float) -> DeadlineExceeded:
    """The error of a call whose time is over."""
    return DeadlineExceeded(f"no answer within {timeout_s:g} s")


@contextmanager
def translated(url: str, timeout_s: float) -> Iterator[None]:
    """Turn what httpx raises into this package's errors."""
    try:
        yield
    except httpx.TimeoutException as err:
        raise too_late(timeout_s) from err
    except httpx.ConnectError as err:
        raise ConnectionFailed(f"no connection to {url}: {err}", refused=True) from err
    except (httpx.HTTPError, httpx.StreamError) as err:
        raise ConnectionFailed(f"the connection to {url} broke: {err}") from err
