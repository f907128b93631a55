"""Faults of executor threads that their process survives."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

BROKEN = 0
HANGS = ("spin", "wait_for_a_lock")  # those that can be ended, so that the thread is not lost for good


@pytest.fixture(scope="module")
def plant(start_server: Any, breaking: Callable[[Any], Any]) -> Iterator[Any]:
    """One server for what threads survive; at the end the books must agree."""
    plant = breaking(start_server("--disable-token-auth", "--enable-model-api"))
    yield plant
    accepted, answered = plant.stop_and_count()
    assert accepted == answered == plant.ledger.accepted


@pytest.fixture
def model(plant: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a model for one test; its threads are let go and it is gone afterwards."""
    name = "m" + str(abs(hash(request.node.name)))
    yield name
    plant.order(name, "over")
    assert plant.unregister(name).status in (200, 404)


@pytest.mark.parametrize("fault", HANGS)
def test_a_thread_that_hangs_is_left_behind_and_another_takes_its_place(
    plant: Any, model: str, fault: str
) -> None:
    plant.register(model, isolation="thread")
    for hangs in (1, 2, 3):
        assert plant.ledger.predict(model, f"now {fault} {hangs}")[0] == 504
        plant.until_ready(model)
        assert plant.ledger.predict(model, "echo on") == (200, "on")
        (loss,) = plant.describe(model)["torchere"]["losses"]
        assert (loss["count"], "response_timeout=1 s" in loss["lastCause"]) == (hangs, True)
    assert plant.ledger.predict(model, f"now {fault}")[0] == 504  # enough: it would go on for ever
    answer = plant.server.call("GET", f"/readyz/{model}")
    assert (answer.status, "all hang" in answer.json()["reasons"][0]) == (503, True)
    plant.order(model, "over")
    plant.until_ready(model)
    assert plant.ledger.predict(model, "echo back") == (200, "back")


def test_a_thread_that_runs_out_of_memory_costs_its_request_only(plant: Any, model: str) -> None:
    plant.register(model, isolation="thread")
    assert plant.ledger.predict(model, "now ask_for_too_much")[0] == 507
    assert plant.ledger.predict(model, "echo on") == (200, "on")


@pytest.mark.parametrize("fault", [*HANGS, "ask_for_too_much"])
def test_a_stream_that_breaks_is_cut_off(plant: Any, model: str, fault: str) -> None:
    plant.register(model, isolation="thread")
    assert plant.ledger.predict(model, f"part {fault}") == (BROKEN, "onetwo")


@pytest.mark.parametrize("fault", [*HANGS, "ask_for_too_much"])
def test_a_model_that_drains_answers_what_is_in_it(plant: Any, model: str, fault: str) -> None:
    plant.register(model, isolation="thread")
    inside, outcome = plant.ledger.in_background(model, f"held {fault}")
    plant.until_sign(model, "busy")
    plant.order(model, "go")
    assert plant.unregister(model).status == 200
    inside.join()
    assert [status for status, _ in outcome] == [507 if fault == "ask_for_too_much" else 504]


def test_a_model_that_hangs_while_it_loads_is_given_up_in_time(plant: Any, model: str) -> None:
    plant.order(model, "load", "wait_for_a_lock")
    reply = plant.register(model, isolation="thread", startupTimeout=1)
    assert (reply.status, "startup_timeout=1 s" in reply.json()["detail"]) == (500, True)
    plant.order(model, "over")
    assert plant.register(model, isolation="thread").status == 200
    assert plant.ledger.predict(model, "echo on") == (200, "on")
