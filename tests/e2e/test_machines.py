"""A model over two machines, which are network namespaces here: one is cut off, killed and restarted."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from namespaces import Host, two_hosts
from servers import RunningServer

ADDING_HANDLER = """
import os
import torch

class Handler:
    def initialize(self, context):
        torch.distributed.init_process_group("gloo")
        assert os.environ["LOCAL_WORLD_SIZE"] == os.environ["GROUP_WORLD_SIZE"] == "2"
        assert os.environ["TORCHELASTIC_RUN_ID"] == "adding-up"

    def handle(self, data, context):
        total = torch.tensor(int(bytes(data[0]["body"])))
        torch.distributed.all_reduce(total)
        return [str(total.item())]
"""
ADDING = """
parallelType: tp
deviceType: cpu
minWorkers: 1
maxWorkers: 1
torchrun:
  nnodes: 2
  nproc-per-node: 2
  rdzv-id: adding-up
"""
ECHO = """
class Handler:
    def initialize(self, context): pass

    def handle(self, data, context):
        return [row["body"] for row in data]
"""
HEARTBEAT_S = 10.0  # a machine that is cut off is missed within it


@dataclass
class Group:
    """A server on the first host, and the ranks of a second one that have joined it."""

    server: RunningServer
    hosts: tuple[Host, Host]
    member: psutil.Process
    log: Path

    def call(self, *arguments: Any, **options: Any) -> Any:
        with self.hosts[0].inside():
            return self.server.call(*arguments, **options)

    def predict(self, number: int = 42) -> Any:
        return self.call("POST", "/predictions/adding", json.dumps(number).encode())

    @property
    def is_ready(self) -> bool:
        return bool(self.call("GET", "/v2/models/adding/ready").status == 200)

    @property
    def last_cause(self) -> str:
        described = self.call("GET", "/models/adding", api="management").json()[0]
        losses = described["torchere"].get("losses") or [{}]
        return str(losses[0].get("lastCause", ""))


def until(condition: Callable[[], Any], what: str, limit_s: float = 60.0) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def group(start_server: Any, pack: Any, store: Path) -> Iterator[Group]:
    """The model `adding` over two hosts with two ranks each, and `echo` on the first one only."""
    pack(
        "adding", {"handler.py": ADDING_HANDLER, "c.yaml": ADDING}, handler="handler.py", configFile="c.yaml"
    )
    pack("echo", {"handler.py": ECHO}, handler="handler.py")
    secret = store.parent / "secret"
    secret.write_text("0123456789abcdef\n")
    with two_hosts() as hosts:
        leader, further = hosts
        log = store.parent / "join.log"
        command = [sys.executable, "-m", "torchere.serving", "join", leader.address]
        command += ["--model-store", str(store), "--secret-file", str(secret)]
        with further.inside(), log.open("w") as output:
            member = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=store.parent)
        properties = f"rendezvous_address={leader.address}\nrendezvous_secret_file={secret}\n"
        with leader.inside():
            server = start_server(
                "--disable-token-auth", "--models", "adding.mar", "echo.mar", properties=properties
            )
        joined = Group(server, hosts, member, log)
        try:
            until(lambda: joined.is_ready, "not ready")
            until(lambda: joined.call("GET", "/v2/models/echo/ready").status == 200, "not ready")
            yield joined
        finally:
            member.send_signal(signal.SIGTERM)
            member.wait(30)
            server.stop()


def test_the_ranks_of_both_machines_run_each_batch(group: Group) -> None:
    assert group.predict().body == b"168"
    assert len(group.member.children()) == 2


def test_what_listens_for_the_group_is_bound_to_its_network(group: Group) -> None:
    for process in [*group.member.children(), *psutil.Process(group.server.process.pid).children(True)]:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip.removeprefix("::ffff:") in (
                    "127.0.0.1",
                    *(host.address for host in group.hosts),
                )


def test_a_machine_that_is_cut_off_makes_the_model_unready_and_it_comes_back(group: Group) -> None:
    ranks = group.member.children()
    answers: list[int] = []
    threading.Thread(target=lambda: answers.append(group.predict().status), daemon=True).start()
    until(lambda: answers, "no answer")
    group.hosts[1].cut()
    began = time.monotonic()
    asked = threading.Thread(target=lambda: answers.append(group.predict().status))
    asked.start()
    until(lambda: not group.is_ready, "a model without a machine is ready")
    assert time.monotonic() - began < HEARTBEAT_S
    assert group.call("POST", "/predictions/echo", b"still here").body == b"still here"
    asked.join(60)
    assert answers == [200, 500]  # "Worker died."
    assert group.last_cause == f"rank 2: its machine {group.hosts[1].address} does not answer"
    until(lambda: not any(rank.is_running() for rank in ranks), "ranks outlive their group")
    assert not group.is_ready
    group.hosts[1].mend()
    until(lambda: group.is_ready, "does not come back")
    assert group.predict().body == b"168"


@pytest.mark.parametrize("rank", [2, 3])
def test_a_rank_of_the_other_machine_that_is_killed_is_named(group: Group, rank: int) -> None:
    ranks = sorted(group.member.children(), key=lambda process: process.pid)
    os.kill(ranks[rank - 2].pid, signal.SIGKILL)
    until(lambda: group.last_cause == f"rank {rank}: killed by signal 9 (SIGKILL)", group.last_cause)
    until(lambda: group.is_ready, "does not come back")
    assert group.predict().body == b"168"


def test_the_leader_comes_back_with_the_same_machines(group: Group) -> None:
    described = group.call("GET", "/models/adding", api="management").json()[0]
    os.kill(described["workers"][0]["pid"], signal.SIGKILL)
    until(lambda: group.last_cause == "rank 0: killed by signal 9 (SIGKILL)", group.last_cause)
    until(lambda: group.is_ready, "does not come back")
    assert group.predict().body == b"168"
