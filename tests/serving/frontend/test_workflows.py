"""Runs of workflows over a fake data plane: what a run may hold, and when it ends."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from torchere.serving.config.server_settings import SnapshotWorkflow
from torchere.serving.config.workflow_spec import read_workflow_spec
from torchere.serving.errors import CutOff, HandlerFailed, StepFailed, Unavailable
from torchere.serving.frontend import workflows
from torchere.serving.frontend.budgets import Budgets
from torchere.serving.frontend.rest.connection import Connection
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.registry.workflows import Workflow
from torchere.serving.types import InferRequest, InferResponse, Parameter, StreamedResponse

MODELS = "models:\n  retry-attempts: 0\n  one: {url: one.mar}\n  two: {url: two.mar}\n  three: {url: x.mar}\n"


def plane_of(planes: Any, dag: str, retry_attempts: int = 0) -> Any:
    """The plane with the workflow `flow`, whose steps are all known to the data plane."""
    plane = planes.control.workflows
    models = MODELS.replace("retry-attempts: 0", f"retry-attempts: {retry_attempts}")
    plane.known._workflows["flow"] = Workflow(
        "flow", SnapshotWorkflow("flow.war"), read_workflow_spec(f"{models}dag:\n{dag}")
    )
    planes.data.check_exists = lambda *_: None
    return plane


def request(body: bytes = b"x") -> InferRequest:
    return InferRequest("an-id", (Parameter("body", body),))


async def _parts(count: int, taken: list[int]) -> AsyncIterator[bytes]:
    for number in range(count):
        taken.append(number)
        yield b"x" * 300


def test_the_parts_of_a_step_have_together_the_limit_of_a_response(planes):
    taken: list[int] = []

    async def streams(_: InferRequest) -> StreamedResponse:
        return StreamedResponse(InferResponse(b""), _parts(1_000, taken))

    planes.data.behave = streams
    plane = plane_of(planes, "  one: [two]\n")
    with pytest.raises(StepFailed, match="Error executing one") as failed:
        asyncio.run(plane.infer("flow", request()))
    assert failed.value.detail == "The answer has more than max_response_size=1000 bytes."
    assert len(taken) == 4


def test_a_step_that_may_have_run_when_it_was_cut_off_is_no_refusal_of_the_whole(planes: Any) -> None:
    async def cut_off(asked: InferRequest) -> InferResponse:
        raise CutOff("Model flow__one was unloaded.")

    planes.data.behave = cut_off
    with pytest.raises(CutOff, match="Error executing one: Model flow__one was unloaded"):
        asyncio.run(plane_of(planes, "  one: [two]\n").infer("flow", request()))


def test_results_count_for_the_budget_until_the_steps_that_take_them_are_over(planes):
    budgets = Budgets(1_000)
    held: list[tuple[int, int]] = []  # length of the input, bytes held meanwhile

    async def longer(asked: InferRequest) -> InferResponse:
        size = sum(len(each.value) for each in asked.parameters)
        held.append((size, budgets.held_bytes))
        return InferResponse(b"x" * (size + 100))

    planes.data.behave = longer
    plane = plane_of(planes, "  one: [two]\n  two: [three]\n")
    assert len(asyncio.run(plane.infer("flow", request(), budgets)).body) == 301
    assert held == [(1, 0), (101, 101), (201, 201)]
    assert budgets.held_bytes == 0
    with pytest.raises(Unavailable, match="Error executing three: Unfinished calls of all clients have"):
        asyncio.run(plane.infer("flow", request(b"x" * 300), budgets))  # 500 of two, 600 of three
    assert budgets.held_bytes == 0
    assert budgets.refused["all"] == 1


def test_a_step_is_tried_again_after_pauses_that_grow(planes, monkeypatch):
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    async def fails(_: InferRequest) -> InferResponse:
        raise HandlerFailed()

    monkeypatch.setattr(workflows, "_pause", pause)
    planes.data.behave = fails
    plane = plane_of(planes, "  one: [two]\n", retry_attempts=8)
    with pytest.raises(StepFailed):
        asyncio.run(plane.infer("flow", request()))
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_an_input_that_a_handler_refuses_is_not_tried_again(planes):
    async def refuses(_: InferRequest) -> InferResponse:
        raise HandlerFailed("no picture", 400)

    planes.data.behave = refuses
    plane = plane_of(planes, "  one: [two]\n", retry_attempts=8)
    with pytest.raises(HandlerFailed, match="Error executing one: no picture") as refused:
        asyncio.run(plane.infer("flow", request()))
    assert refused.value.status == 400
    assert len(planes.data.asked) == 1


@pytest.mark.parametrize("status", [408, 425, 429])
def test_a_handler_that_asks_for_another_attempt_gets_it(planes, monkeypatch, status):
    monkeypatch.setattr(workflows, "FIRST_PAUSE_S", 0.0)

    async def busy(_: InferRequest) -> InferResponse:
        raise HandlerFailed("busy", status)

    planes.data.behave = busy
    plane = plane_of(planes, "  one: [two]\n", retry_attempts=2)
    with pytest.raises(HandlerFailed, match="Error executing one: busy") as failed:
        asyncio.run(plane.infer("flow", request()))
    assert failed.value.status == status
    assert len(planes.data.asked) == 3


def test_long_results_of_several_leaves_are_joined_beside_the_event_loop(planes, monkeypatch):
    threads: list[threading.Thread] = []
    join = workflows._answer

    def joined(leaves: Any) -> InferResponse:
        threads.append(threading.current_thread())
        return join(leaves)

    monkeypatch.setattr(workflows, "_answer", joined)
    plane = plane_of(planes, "  one: [two, three]\n")
    for numbers in ([1.5], [1.5] * 20_000):
        answer = asyncio.run(plane.infer("flow", request(json.dumps(numbers).encode())))
        members = {"two": numbers, "three": numbers}
        assert answer.body == json.dumps(members, indent=2).encode() + b"\n"
    assert [each is threading.main_thread() for each in threads] == [True, False]


def test_a_client_that_disconnects_withdraws_the_steps_that_run_and_starts_no_others(planes):
    async def main() -> None:
        began = asyncio.Event()

        async def waits(_: InferRequest) -> None:
            began.set()
            await asyncio.Event().wait()

        planes.data.behave = waits
        plane_of(planes, "  one: [two]\n")
        listener = listener_of(frozenset({"inference"}), planes.data, planes.control, planes.services())
        connection = Connection(listener)
        connection.connection_made(_Transport())
        head = b"POST /wfpredict/flow HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\nx"
        connection.get_buffer(-1)[: len(head)] = head
        connection.buffer_updated(len(head))
        await asyncio.wait_for(began.wait(), 20)
        connection.connection_lost(None)
        await asyncio.wait_for(asyncio.gather(*listener.tasks), 5)

    asyncio.run(main())
    assert planes.data.withdrawn == 1
    assert [model for model, _, _ in planes.data.asked] == ["flow__one"]


class _Transport(asyncio.Transport):
    """Takes no notice of what is written."""

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass
