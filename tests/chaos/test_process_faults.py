"""Every fault of a worker, in every isolation and state; a neighbour that must not notice; a ledger.

The faults are real: signals, native crashes, an interpreter that never comes back, nonsense on the socket.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CRASHES = {
    "kill": "killed by signal 9 (SIGKILL)",
    "crash": "killed by signal 11 (SIGSEGV)",
    "leave": "exited with code 7",
    "talk_nonsense": "sent a frame of 4294967295 bytes",
}
HANGS = ("stop", "spin", "sleep_in_c", "wait_for_a_lock")
TIMEOUT = "no answer within response_timeout=1 s"
BROKEN = 0


@pytest.fixture(scope="module")
def plant(start_server: Any, breaking: Callable[[Any], Any]) -> Iterator[Any]:
    """One server for the module; a neighbour is busy all the time, and at the end the books must agree."""
    plant = breaking(start_server("--disable-token-auth", "--enable-model-api"))
    assert plant.register("neighbour").status == 200
    over = threading.Event()

    def live() -> None:
        number = 0
        while not over.wait(0.005):  # the server stays free for what is tested
            number += 1
            assert plant.ledger.predict("neighbour", f"echo {number}") == (200, str(number))

    failures: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, failures.append
    neighbour = threading.Thread(target=live)
    neighbour.start()
    yield plant
    over.set()
    neighbour.join()
    threading.excepthook = hook
    assert failures == []
    assert set(plant.ledger.statuses("neighbour")) == {200}
    accepted, answered = plant.stop_and_count()
    assert accepted == answered == plant.ledger.accepted


@pytest.fixture(params=["process", "thread"])
def isolation(request: pytest.FixtureRequest) -> str:
    """Whether an executor is a worker process, or a lane of one."""
    value: str = request.param
    return value


@pytest.fixture
def model(plant: Any, isolation: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a model for one test; it is gone afterwards."""
    plant.isolation = isolation
    name = "m" + str(abs(hash(request.node.name)))
    yield name
    assert plant.unregister(name).status in (200, 404)


def comes_back(plant: Any, model: str, cause: str) -> None:
    """The model is ready again, says why it was not, and means it."""
    plant.until_ready(model)
    assert plant.ledger.predict(model, "echo again") == (200, "again")
    assert cause in plant.describe(model)["torchere"]["failure"]
    (loss,) = plant.describe(model)["torchere"]["losses"]
    assert (loss["count"], cause in loss["lastCause"]) == (1, True)


@pytest.mark.parametrize("fault", CRASHES)
def test_a_crash_while_busy_answers_its_request_and_the_worker_comes_back(
    plant: Any, model: str, fault: str
) -> None:
    plant.register(model)
    status, text = plant.ledger.predict(model, f"now {fault}")
    assert (status, "Worker died." in text) == (500, True)
    comes_back(plant, model, CRASHES[fault])


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_while_busy_is_cut_off_in_time(plant: Any, model: str, fault: str) -> None:
    plant.register(model)
    assert plant.ledger.predict(model, f"now {fault}")[0] == 504
    comes_back(plant, model, TIMEOUT)


@pytest.mark.parametrize("fault", ["use_up_memory", "ask_for_too_much"])
def test_a_request_that_needs_too_much_memory_costs_itself_only(plant: Any, model: str, fault: str) -> None:
    plant.register(model)
    pid = plant.ledger.predict(model, "pid")[1]
    status, text = plant.ledger.predict(model, f"now {fault}")
    assert (status, "Out of resources" in text) == (507, True)
    assert plant.ledger.predict(model, "pid") == (200, pid)


@pytest.mark.parametrize("fault", [*CRASHES, *HANGS, "use_up_memory"])
def test_a_stream_that_breaks_is_cut_off_and_never_looks_whole(plant: Any, model: str, fault: str) -> None:
    plant.register(model)
    assert plant.ledger.predict(model, f"part {fault}") == (BROKEN, "onetwo")
    plant.until_ready(model)
    assert plant.ledger.predict(model, "echo again") == (200, "again")


@pytest.mark.parametrize("fault", [*CRASHES, *HANGS, "use_up_memory"])
def test_a_model_that_drains_answers_what_is_in_it_whatever_happens(
    plant: Any, model: str, fault: str
) -> None:
    plant.register(model)
    inside, outcome = plant.ledger.in_background(model, f"held {fault}")
    plant.until_sign(model, "busy")
    leaving = threading.Thread(target=plant.unregister, args=(model,))
    leaving.start()
    # The name is gone at once; what is in goes on.
    plant.until_gone(model)
    plant.order(model, "go")
    inside.join()
    leaving.join()
    expected = 500 if fault in CRASHES else 504 if fault in HANGS else 507
    assert [status for status, _ in outcome] == [expected]


def test_a_model_whose_worker_is_killed_while_it_loads_is_loaded_by_another(plant: Any, model: str) -> None:
    plant.order(model, "load", "kill")
    assert plant.register(model).status == 200
    assert plant.ledger.predict(model, "echo now") == (200, "now")


@pytest.mark.parametrize("fault", [*(fault for fault in CRASHES if fault != "kill"), "use_up_memory"])
def test_a_model_that_breaks_while_it_loads_is_refused_with_the_cause(
    plant: Any, model: str, fault: str
) -> None:
    plant.order(model, "load", fault)
    reply = plant.register(model)
    assert reply.status == (507 if fault == "use_up_memory" else 500)
    assert CRASHES.get(fault, "MemoryError") in reply.json()["detail"]
    assert plant.server.call("GET", f"/readyz/{model}").status == 404
    assert plant.register(model).status == 200
    assert plant.ledger.predict(model, "echo now") == (200, "now")


@pytest.mark.parametrize("fault", HANGS)
def test_a_model_that_hangs_while_it_loads_is_given_up_in_time(plant: Any, model: str, fault: str) -> None:
    plant.order(model, "load", fault)
    reply = plant.register(model, startupTimeout=1)
    assert (reply.status, "startup_timeout=1 s" in reply.json()["detail"]) == (500, True)
    assert plant.server.call("GET", f"/readyz/{model}").status == 404


@pytest.mark.parametrize("fault", CRASHES)
def test_a_crash_while_idle_costs_no_request(plant: Any, model: str, fault: str) -> None:
    plant.register(model)
    assert plant.ledger.predict(model, f"later {fault}")[0] == 200
    pid = plant.describe(model)["workers"][0]["pid"]
    plant.order(model, "go")
    plant.until_replaced(model, {pid})
    plant.order(model, "over")
    comes_back(plant, model, CRASHES[fault])


def test_a_hang_while_idle_is_found_out_before_any_client_waits_for_it(plant: Any, isolation: str) -> None:
    plant.isolation = isolation
    faults = {"stopped": "stop", "in-c": "sleep_in_c", "stopped-outside": ""}
    models = {f"idle-{isolation}-{name}": fault for name, fault in faults.items()}
    for model, fault in models.items():
        plant.register(model, responseTimeout=100)
        if fault:
            plant.ledger.predict(model, f"later {fault}")
            plant.order(model, "go")
        else:
            os.kill(plant.describe(model)["workers"][0]["pid"], signal.SIGSTOP)
    for model in models:
        plant.until_not_ready(model)  # the truth, within seconds
        assert "(suspect)" in plant.server.call("GET", f"/readyz/{model}").json()["reasons"][0]
    for model in models:
        comes_back(plant, model, "no sign of life")
        assert plant.unregister(model).status == 200


def test_a_worker_that_is_stopped_and_goes_on_is_the_same_worker(plant: Any, model: str) -> None:
    plant.register(model)
    pid = plant.describe(model)["workers"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    plant.until_not_ready(model)
    os.kill(pid, signal.SIGCONT)
    plant.until_ready(model)
    assert plant.ledger.predict(model, "pid") == (200, str(pid))


def test_a_request_that_crashes_workers_twice_is_not_run_a_third_time(plant: Any, model: str) -> None:
    plant.register(model)
    statuses = []
    for _ in range(4):
        statuses.append(plant.ledger.predict(model, "now crash")[0])
        plant.until_ready(model)
    assert statuses == [500, 422, 422, 422]
    own = plant.describe(model)["torchere"]
    assert (own["quarantinedRequests"], own["losses"][0]["count"]) == (1, 2)
    assert plant.ledger.predict(model, "echo fine") == (200, "fine")
    saved = list((plant.server.folder / "logs" / "quarantine").iterdir())
    assert len([file for file in saved if model in file.name]) == 1


def test_kills_from_outside_make_no_request_guilty(plant: Any, model: str) -> None:
    plant.register(model, workers=2)
    for _ in range(3):
        killed = {worker["pid"] for worker in plant.describe(model)["workers"]}
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        plant.until_replaced(model, killed)
        plant.until_ready(model)
        assert plant.ledger.predict(model, "echo same") == (200, "same")
    assert "quarantinedRequests" not in plant.describe(model)["torchere"]
