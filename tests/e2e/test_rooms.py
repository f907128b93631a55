"""A server whose models share one worker process by default, and what that means for each of them."""

import io
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

NAMES = [f"net{number}" for number in range(5)]
OWN = """
import os

def handle(data, context):
    return [str(os.getpid())] * len(data or ())
"""


class Net(torch.nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], pack: Any) -> Any:
    for number, name in enumerate(NAMES):
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(Net(number)), buffer)
        pack(name, {"net.pt": buffer.getvalue()}, handler="base_handler", serializedFile="net.pt")
    pack("own", {"own.py": OWN}, handler="own.py")
    pack(
        "apart",
        {"net.pt": buffer.getvalue(), "c.yaml": "isolation: thread\n"},
        handler="base_handler",
        serializedFile="net.pt",
        configFile="c.yaml",
    )
    models = ",".join(f"{name}.mar" for name in (*NAMES, "own", "apart"))
    properties = "default_isolation=shared\nservice_envelope=body\n"
    return start_server(
        "--disable-token-auth", "--enable-model-api", "--models", models, properties=properties
    )


def describe(server: Any, name: str) -> Any:
    return server.call("GET", f"/models/{name}", api="management").json()[0]


def pid_of(server: Any, name: str) -> int:
    """The process of its one worker, once it is ready."""
    until_s = time.monotonic() + 50
    while (worker := describe(server, name)["workers"][0])["status"] != "READY":
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return int(worker["pid"])


def predict(server: Any, name: str) -> Any:
    headers = {"content-type": "application/json"}
    return server.call("POST", f"/predictions/{name}", json.dumps([1, 2]).encode(), headers=headers)


def answers(server: Any, names: list[str]) -> list[Any]:
    return [predict(server, name).json() for name in names]


def test_all_models_without_python_answer_from_one_process(server: Any) -> None:
    assert answers(server, NAMES) == [[number, 2 * number] for number in range(5)]
    assert len({pid_of(server, name) for name in NAMES}) == 1
    assert {describe(server, name)["torchere"]["isolation"] for name in NAMES} == {"shared"}


def test_models_that_can_not_share_or_say_otherwise_have_processes_of_their_own(server: Any) -> None:
    assert describe(server, "own")["torchere"]["isolation"] == "process"
    assert describe(server, "apart")["torchere"]["isolation"] == "thread"
    assert len({pid_of(server, name) for name in ("own", "apart", NAMES[0])}) == 3
    assert server.logs(
        "model own version 1.0 can't share a process with other models and gets isolation: process"
    )


def test_a_model_that_is_unregistered_leaves_the_others_alone(server: Any) -> None:
    pid = pid_of(server, NAMES[0])
    threads = psutil.Process(pid).num_threads()
    assert server.call("DELETE", "/models/net4", api="management").status == 200
    assert psutil.Process(pid).num_threads() < threads
    assert answers(server, NAMES[:4]) == [[number, 2 * number] for number in range(4)]
    assert server.register("net4.mar", initial_workers=1, synchronous="true").status == 200
    assert predict(server, "net4").json() == [4, 8]
    assert pid_of(server, "net4") == pid


def test_models_come_back_together_and_after_the_second_loss_apart(server: Any) -> None:
    before = pid_of(server, NAMES[0])
    os.kill(before, signal.SIGKILL)
    server.follow("its process is a shared one")
    assert answers_soon(server) == [[number, 2 * number] for number in range(5)]
    together = {pid_of(server, name) for name in NAMES}
    assert len(together) == 1
    assert before not in together
    os.kill(together.pop(), signal.SIGKILL)
    for name in NAMES:
        server.follow(f"model {name} version 1.0 gets a process of its own")
    assert answers_soon(server) == [[number, 2 * number] for number in range(5)]
    assert len({pid_of(server, name) for name in NAMES}) == 5
    assert {describe(server, name)["torchere"]["isolation"] for name in NAMES} == {"thread"}
    assert predict(server, "own").status == 200


def answers_soon(server: Any) -> list[Any]:
    """Their answers, once each has its worker again."""
    for name in NAMES:
        pid_of(server, name)
    return answers(server, NAMES)
