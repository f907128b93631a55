"""What goes over the wire and comes back, without a transport: records both clients share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from torchere.client.errors import UnreadableAnswer

Api = Literal["inference", "management"]
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

JSON = "application/json"
REQUEST_ID = "x-request-id"
# What is raised where an answer of JSON is of another form than expected; of Infinity no int can be made.
OTHER_FORM = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. `path` is quoted and starts with "/"; no two names of headers differ only in case."""

    method: str
    path: str
    api: Api = "inference"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole HTTP answer; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            UnreadableAnswer: it is none.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as err:
            raise UnreadableAnswer(f"expected JSON, found {self.body[:200]!r}: {err}") from err

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object.

        Raises:
            UnreadableAnswer: it is none.
        """
        value = self.json()
        if not isinstance(value, dict):
            raise UnreadableAnswer(f"expected a JSON object, found {self.body[:200]!r}")
        return value


@dataclass(frozen=True, slots=True)
class Operation(Generic[Result_co]):
    """A request, and how to read its answer.

    `read` gets answers whose status is in `accepted` or a 2xx; every other one is raised as an error.
    """

    request: Request
    read: Callable[[Answer], Result_co]
    accepted: frozenset[int] = frozenset()

    def takes(self, status: int) -> bool:
        """Whether an answer of this status is given to `read`."""
        return 200 <= status < 300 or status in self.accepted


def reading(read: Callable[[Any], Result]) -> Callable[[Answer], Result]:
    """What reads an answer of JSON by `read`; an answer of another form raises UnreadableAnswer."""

    def read_json(answer: Answer) -> Result:
        value = answer.json()
        try:
            return read(value)
        except OTHER_FORM as err:
            raise UnreadableAnswer(f"the answer is of another form: {answer.body[:200]!r}: {err!r}") from err

    return read_json


def path(*segments: str) -> str:
    """A path of quoted segments; empty ones are left out."""
    return "/" + "/".join(quote(segment, safe="") for segment in segments if segment)


def merged(*several: Mapping[str, str]) -> dict[str, str]:
    """Headers as one mapping: of names that differ at most in case the last counts, in its spelling."""
    found = {name.lower(): (name, value) for headers in several for name, value in headers.items()}
    return dict(found.values())


def json_body(value: object) -> bytes:
    """`value` as compact JSON in UTF-8; arrays and tensors become lists.

    Raises:
        TypeError, ValueError: it holds what JSON has no form for.
    """
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=_as_list).encode()


def _as_list(value: object) -> object:
    as_list = getattr(value, "tolist", None)  # of NumPy, torch and pandas, none of which is needed here
    if as_list is None:
        raise TypeError(
            f"a {type(value).__name__} has no form in JSON; expected numbers, texts, lists, dicts"
        )
    return as_list()
