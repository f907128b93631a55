"""Everything one server answered, and how it differs from what another one answered. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from conformity.comparison import differences, exposed
from conformity.rest import Answer
from conformity.rpc import RpcAnswer

OURS = frozenset({"torchere", "lastFailure", "detail"})  # members that only our objects have


@dataclass(slots=True)
class Answers:
    """By the name of the case; each case is in one of the three."""

    rest: dict[str, Answer] = field(default_factory=dict)
    grpc: dict[str, RpcAnswer] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # no HTTP answer came: why not

    def of(self, case: str) -> Answer | RpcAnswer | str:
        """The answer to one case."""
        return self.rest.get(case) or self.grpc.get(case) or self.broken[case]

    def cases(self) -> list[str]:
        """The names of all cases."""
        return [*self.grpc, *self.rest, *self.broken]


@dataclass(frozen=True, slots=True)
class Difference:
    """One case that was answered in two ways; the lines say ours first."""

    profile: str
    case: str
    lines: list[str]

    @property
    def kind(self) -> str:
        """What groups it with others that differ in the same manner."""
        return self.lines[0]


def contrast(profile: str, theirs: Answers, ours: Answers) -> Iterator[Difference]:
    """Every case that was answered in two ways."""
    for case in theirs.cases():
        lines = list(_lines(theirs.of(case), ours.of(case)))
        if lines:
            yield Difference(profile, case, lines)


def _lines(want: Answer | RpcAnswer | str, got: Answer | RpcAnswer | str) -> Iterator[str]:
    if isinstance(want, Answer) and isinstance(got, Answer):
        yield from _rest_lines(want, got)
    elif isinstance(want, RpcAnswer) and isinstance(got, RpcAnswer):
        yield from _rpc_lines(want, got)
    elif want != got:
        yield f"answer {got!r:.200}, TorchServe {want!r:.200}"


def _rest_lines(want: Answer, got: Answer) -> Iterator[str]:
    if want.status != got.status:
        yield f"status {got.status}, TorchServe {want.status}"
    for name in sorted(want.headers.keys() | got.headers.keys()):
        if want.headers.get(name) != got.headers.get(name):
            yield f"header {name}: {got.headers.get(name)!r}, TorchServe {want.headers.get(name)!r}"
    if want.has_request_id != got.has_request_id:
        yield f"x-request-id: {got.has_request_id}, TorchServe {want.has_request_id}"
    if want.chunks != got.chunks:
        yield f"chunks of {got.chunks} bytes, TorchServe {want.chunks}"
    yield from _body_lines(want, got)


def _body_lines(want: Answer, got: Answer) -> Iterator[str]:
    if isinstance(want.body, str) and isinstance(got.body, str) and want.body.startswith("# HELP"):
        theirs, ours = exposed(want.body), exposed(got.body)
        for name, family in sorted(theirs.items()):
            if name not in ours:
                yield f"metric family {name} is missing"
            elif family[1] and ours[name] != family:  # the samples of its own first request come too late
                yield f"metric family {name} is {ours[name]}, TorchServe {family}"
        return
    if _is_document(want.body) and _is_document(got.body):
        if _described(want.body) != _described(got.body):
            yield f"it describes {_described(got.body)}, TorchServe {_described(want.body)}"
        return
    lines = list(differences(want.body, got.body, OURS))
    yield from map(_of_torchserve, lines)
    # Members may come in another order, and with them the blanks.
    if not lines and sorted(want.layout) != sorted(got.layout) and not _has_own_members(got.body):
        yield f"layout: {got.layout}, TorchServe {want.layout}"


def _is_document(body: object) -> bool:
    return isinstance(body, dict) and {"openapi", "info", "paths"} <= body.keys()


def _of_torchserve(line: str) -> str:
    return line.replace("was not recorded", "TorchServe does not have").replace("recorded", "TorchServe")


def _described(document: dict[str, Any]) -> tuple[str, str, list[str]]:
    """What clients may rely on of an OpenAPI document: its version and title, and the operations it knows."""
    operations = [
        f"{method} {path} {operation.get('operationId')}"
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    return document["openapi"], document["info"]["title"], sorted(operations)


def _has_own_members(body: object) -> bool:
    if isinstance(body, list):
        return any(map(_has_own_members, body))
    return isinstance(body, dict) and bool(OURS & body.keys() or any(map(_has_own_members, body.values())))


def _rpc_lines(want: RpcAnswer, got: RpcAnswer) -> Iterator[str]:
    if want.code != got.code:
        yield f"code {got.code}, TorchServe {want.code}"
    if want.details != got.details:
        yield f"details {got.details!r}, TorchServe {want.details!r}"
    for line in differences(list(want.messages), list(got.messages), OURS, "messages"):
        yield _of_torchserve(line)
