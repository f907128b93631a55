"""Replays what was recorded from TorchServe 0.12.0 against a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from conformity.comparison import differences, families
from conformity.deviations import deviations
from conformity.rest import Answer, recorded_answer, recorded_case, send
from conformity.rpc import RpcAnswer, call, recorded_rpc_answer, rpc_differences
from conformity.servers import Server

FOLDER = Path(__file__).parents[1] / "recordings"
SETTLE_S = 30.0  # what a recording waited for with a fixed pause has to come about in this time
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Got = TypeVar("Got")


def records(name: str) -> list[dict[str, Any]]:
    """The entries of a recording, in order: cases, and pauses between them."""
    loaded: list[dict[str, Any]] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


def rest_names() -> list[str]:
    """The names of the REST cases, in order."""
    return [record["request"]["name"] for record in records("rest.json") if "request" in record]


def rpc_names() -> list[str]:
    """The names of the gRPC cases, in order."""
    return [record["name"] for record in records("grpc.json")]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One case: what should have been answered, and what was; the lines say how that differs."""

    problems: list[str]


def replay_rest(server: Server) -> dict[str, Exchange]:
    """Send every REST case, in order; later ones rely on earlier ones.

    Where the recording paused, the next case is repeated until it is answered as recorded, or time is up.
    """
    exchanges: dict[str, Exchange] = {}
    paused = False
    for record in records("rest.json"):
        if "pause" in record:
            paused = True
            continue
        case = recorded_case(record["request"])

        def problems() -> list[str]:
            return rest_problems(record, send(case, server.rest))  # noqa: B023  # called in this turn only

        exchanges[case.name] = Exchange(_settled(problems, server) if paused else problems())
        paused = False
    return exchanges


def _settled(problems: Callable[[], list[str]], server: Server) -> list[str]:
    deadline_s = time.monotonic() + SETTLE_S
    while (found := problems()) and time.monotonic() < deadline_s:
        server.pace()
    return found


def rest_problems(record: Mapping[str, Any], got: Answer) -> list[str]:
    """How an answer differs from the recorded one, where no deviation allows it."""
    table = deviations()
    deviation = table.rest.get(record["request"]["name"])
    response = {**record["response"], **(deviation.answer if deviation else {})}
    want = recorded_answer(response)
    if got.status != want.status:
        return [f"status {got.status}, expected {want.status}: {got.body!r:.300}"]
    problems = [
        f"header {name} is {got.headers.get(name)!r}, expected {want.headers.get(name)!r}"
        for name in ("content-type", "transfer-encoding", "x-answer")
        if got.headers.get(name) != want.headers.get(name)
    ]
    if want.has_request_id and not got.has_request_id:
        problems.append("there is no x-request-id")
    if "note" in response:
        is_document = isinstance(got.body, dict) and {"openapi", "info", "paths"} <= got.body.keys()
        return problems + ([] if is_document else ["not an OpenAPI document"])
    if record["request"].get("port") == "metrics":
        missing = families(want.body) - families(got.body)
        return problems + [f"metric family {name} is missing" for name in sorted(missing)]
    return problems + list(differences(want.body, got.body, table.members.keys()))


def replay_grpc(server: Server) -> dict[str, Exchange]:
    """Make every recorded gRPC call, in order; some rely on what REST registered."""
    return {
        record["name"]: Exchange(rpc_problems(record, call(record, server.grpc)))
        for record in records("grpc.json")
    }


def rpc_problems(record: Mapping[str, Any], got: RpcAnswer) -> list[str]:
    """How the end of a call differs from the recorded one, where no deviation allows it."""
    table = deviations()
    deviation = table.grpc.get(record["name"])
    want = recorded_rpc_answer({**record["response"], **(deviation.answer if deviation else {})})
    return list(rpc_differences(want, got, table.members.keys()))
