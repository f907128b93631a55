"""Faults of executor threads: what a process survives in a plain server, the rest under a supervisor."""

import os
import signal
import socket
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import psutil
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


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture
def supervised(start_server: Any, breaking: Callable[[Any], Any], pack: Any) -> Any:
    """A supervised server whose addresses stay the same over a restart."""
    rest = free_ports(5)
    properties = (
        f"inference_address=http://127.0.0.1:{rest[0]}\nmanagement_address=http://127.0.0.1:{rest[1]}\n"
        f"metrics_address=http://127.0.0.1:{rest[2]}\n"
        f"grpc_inference_port={rest[3]}\ngrpc_management_port={rest[4]}\nsupervise=true\n"
    )
    return breaking(
        start_server("--disable-token-auth", "--enable-model-api", "--log-files", properties=properties)
    )


def is_down(plant: Any) -> bool:
    try:
        plant.server.call("GET", "/livez")
    except (urllib.error.URLError, ConnectionError):
        return True
    return False


@pytest.mark.timeout(600)  # five starts of a server, and the back-off between them
def test_a_server_that_its_threads_crash_is_back_with_all_it_served(
    supervised: Any, wait_until: Callable[[Callable[[], bool], str], None]
) -> None:
    plant, predict = supervised, supervised.ledger.predict
    for model, isolation in (("guilty", "thread"), ("bystander", "thread"), ("apart", "process")):
        assert plant.register(model, isolation=isolation).status == 200

    def everything_is_back() -> None:
        for model in ("guilty", "bystander", "apart"):
            plant.until_ready(model)
            assert predict(model, "echo back") == (200, "back")

    # Streaming: the answer that had begun is cut off, and what waited elsewhere is cut off with it.
    waiting, outcome = plant.ledger.in_background("bystander", "held kill")
    plant.until_sign("bystander", "busy")
    assert predict("guilty", "part leave")[0] == BROKEN
    waiting.join()
    assert outcome == [(BROKEN, "")]
    everything_is_back()
    assert plant.describe("guilty")["torchere"]["isolation"] == "thread"
    assert "exited with code 7" in plant.server.log()

    # Loading: who crashes the server at that is not loaded again, and the others are.
    plant.order("newcomer", "load", "crash")
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        plant.register("newcomer", isolation="thread")
    everything_is_back()
    assert plant.server.call("GET", "/readyz/newcomer").status == 404
    assert "which ran newcomer:1.0" in plant.server.log()

    # Busy: the second crash of a model takes it out of the threads, and then it crashes alone.
    assert predict("guilty", "now crash") == (BROKEN, "")
    everything_is_back()
    own = plant.describe("guilty")["torchere"]
    assert (own["isolation"], "crashed the server 2 times" in own["isolationReason"]) == ("process", True)
    assert plant.describe("bystander")["torchere"]["isolation"] == "thread"
    assert predict("guilty", "now crash")[0] == 500
    everything_is_back()

    # Idle: somebody kills the server.
    (server,) = psutil.Process(plant.server.process.pid).children()
    server.kill()
    wait_until(lambda: is_down(plant) or not server.is_running(), "the server is killed")
    everything_is_back()
    assert sum(status == BROKEN for _, status, _ in plant.ledger.outcomes) == 3

    # Draining: the end is the end, whatever happens in it; here a thread crashes it.
    inside, _ = plant.ledger.in_background("bystander", "held kill")
    plant.until_sign("bystander", "busy")
    os.kill(plant.server.process.pid, signal.SIGTERM)
    plant.server.follow("draining")
    plant.order("bystander", "go")
    inside.join()
    assert plant.server.process.wait(120) == -signal.SIGKILL
