"""Every fault of a worker, in every isolation and state; a neighbour that must not notice; a ledger.

The faults are real: signals, native crashes, an interpreter that never comes back, nonsense on the socket.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from ranked_model import RANKS, ranks_of, until_born

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
        while not over.wait(0.03):  # the server stays free for what is tested
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


def comes_back(plant: Any, model: str, cause: str, losses: int = 1) -> None:
    """The model is ready again, says why it was not, and means it."""
    plant.until_ready(model)
    assert plant.ledger.predict(model, "echo 7") == (200, "7")
    assert cause in plant.describe(model)["torchere"]["failure"]
    (loss,) = plant.describe(model)["torchere"]["losses"]
    assert (loss["count"], cause in loss["lastCause"]) == (losses, True), loss


# Groups of 2 x 2 ranks, one group for each rank that is lost: they are lost and come back side by side.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
GROUP_TIMEOUT_S, GROUP_STARTUP_S = 2, 8
HEARTBEAT_S = 13  # until an idle worker is given up
REACTION_S = 9.0  # of a busy machine to a loss, until another group starts; a heartbeat would take longer
KILLED, STOPPED = "rank {rank}: killed by signal 9 (SIGKILL)", "rank {rank} is stopped by a signal"
IN_A_BATCH = {"kill": KILLED, "stop": f"no answer within response_timeout={GROUP_TIMEOUT_S} s: {STOPPED}"}


class Groups:
    """The groups, and the processes of each by rank."""

    def __init__(self, plant: Any) -> None:
        self.plant = plant
        self.models = [f"rank-{rank}" for rank in range(RANKS)]
        self.processes: list[list[psutil.Process]] = []
        self.losses = 0  # of each group

    def register(self) -> None:
        """Load all groups at the same time."""
        limits = {"responseTimeout": GROUP_TIMEOUT_S, "startupTimeout": GROUP_STARTUP_S, "ranked": True}
        began_s, self.losses = time.monotonic(), 0
        with ThreadPoolExecutor(RANKS) as threads:
            loads = threads.map(lambda model: self.plant.register(model, **limits), self.models)
            assert [load.status for load in loads] == [200] * RANKS
        self.until_born(began_s)

    def until_born(self, after_s: float) -> float:
        """Wait until each group was started after that time; return the seconds that the last one took."""
        folders = [self.plant.folder(model) for model in self.models]
        self.processes = [list(map(psutil.Process, until_born(folder, after_s))) for folder in folders]
        return max(born_s for folder in folders for _, born_s in ranks_of(folder)) - after_s

    def hold(self) -> list[tuple[threading.Thread, list[tuple[int, str]]]]:
        """Send each group a request that waits in the rank that will be lost; return threads and outcomes."""
        asked = [
            self.plant.ledger.in_background(model, f"held {rank}") for rank, model in enumerate(self.models)
        ]
        for model in self.models:
            self.plant.until_sign(model, "busy")
            (self.plant.folder(model) / "busy").unlink()
        return asked

    def lose(self, fault: str) -> float:
        """Send the signal of a fault to rank R of group R, for each; return the time."""
        now_s = time.monotonic()
        for rank, processes in enumerate(self.processes):
            processes[rank].send_signal(SIGNALS[fault])
        return now_s

    def come_back(self, since_s: float, within_s: float, cause: str, losses: int = 1) -> None:
        """Check that each group was started again within a time, and says why.

        Args:
            since_s: when the ranks were lost.
            within_s: seconds from then to the start of the other group.
            cause: with `{rank}` for the number.
            losses: of each group since the last call.
        """
        before = self.processes
        assert self.until_born(since_s) < within_s
        self.losses += losses
        for rank, model in enumerate(self.models):
            comes_back(self.plant, model, cause.format(rank=rank), self.losses)
        assert not any(is_alive(each) for processes in before for each in processes)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def groups(plant: Any) -> Iterator[Groups]:
    groups = Groups(plant)
    groups.register()
    yield groups
    for model in groups.models:
        plant.unregister(model)


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


def test_a_hang_while_idle_is_found_out_before_any_client_waits_for_it(
    plant: Any, isolation: str, groups: Groups
) -> None:
    plant.isolation = isolation
    stopped_s = groups.lose("stop")
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
    groups.come_back(
        stopped_s, HEARTBEAT_S + REACTION_S, f"hung: idle, and no sign of life for 10 s: {STOPPED}"
    )


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


def test_a_rank_that_is_killed_while_idle_costs_no_request(groups: Groups) -> None:
    groups.come_back(groups.lose("kill"), REACTION_S, KILLED)


@pytest.mark.parametrize("fault", SIGNALS)
def test_a_rank_that_is_lost_in_a_batch_costs_that_batch(groups: Groups, fault: str) -> None:
    held = groups.hold()
    since_s = groups.lose(fault)
    for thread, outcome in held:
        thread.join()
        assert [status for status, _ in outcome] == [500 if fault == "kill" else 504]
    patience_s = 0 if fault == "kill" else GROUP_TIMEOUT_S
    groups.come_back(since_s, REACTION_S + patience_s, IN_A_BATCH[fault])


@pytest.mark.parametrize(
    ("fault", "patience_s", "cause"),
    [
        ("kill", 1, f"{KILLED} while it was loading"),  # after a second loss the server waits for a second
        ("stop", GROUP_STARTUP_S, f"not loaded within startup_timeout={GROUP_STARTUP_S} s: {STOPPED}"),
    ],
)
def test_a_rank_that_is_lost_while_its_group_loads_is_replaced_with_the_others(
    plant: Any, groups: Groups, fault: str, patience_s: float, cause: str
) -> None:
    for model in groups.models:
        plant.order(model, "slow")
    groups.until_born(groups.lose("kill"))
    since_s = groups.lose(fault)
    for model in groups.models:
        (plant.folder(model) / "slow").unlink()
    groups.come_back(since_s, REACTION_S + patience_s, cause, losses=2)


@pytest.mark.parametrize("fault", SIGNALS)
def test_a_rank_that_is_lost_while_its_group_drains_ends_the_drain(
    plant: Any, groups: Groups, fault: str
) -> None:
    held = groups.hold()
    with ThreadPoolExecutor(RANKS) as threads:
        leaving = threads.map(plant.unregister, groups.models)
        for model in groups.models:
            plant.until_gone(model)
        groups.lose(fault)
        assert [left.status for left in leaving] == [200] * RANKS
    for rank, (thread, outcome) in enumerate(held):
        thread.join()
        assert [status for status, _ in outcome] == [500 if fault == "kill" else 504]
        assert plant.server.logs(f"was lost: {IN_A_BATCH[fault].format(rank=rank)}")
    assert not any(is_alive(each) for processes in groups.processes for each in processes)
    groups.register()
