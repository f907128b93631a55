"""Models of several processes over HTTP: TorchServe's keys for them, tensor parallelism, and its losses."""

import json
import os
import signal
import time
from typing import Any

import psutil
import pytest

ADDING_MODEL = """
import torch

class Adding(torch.nn.Module):
    def forward(self, x):
        torch.distributed.all_reduce(x)
        return x
"""
ADDING_HANDLER = """
import torch
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.torch_handler.base_handler import BaseHandler

class AddingHandler(BaseHandler):
    def initialize(self, ctx):
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        self.context = ctx
        super().initialize(ctx)

    def preprocess(self, data):
        send_intermediate_predict_response(["0"], self.context.request_ids, "a part", 200, self.context)
        return torch.tensor(int(data[0]["body"]), device=self.device)

    def postprocess(self, x):
        return [x.item()]
"""
# Two linear layers, the first split by columns and the second by rows.
SPLIT_MODEL = """
import torch

class Split(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up = torch.nn.Linear(16, 64)
        self.down = torch.nn.Linear(64, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
"""
SPLIT_HANDLER = """
import os
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from ts.torch_handler.base_handler import BaseHandler

class SplitHandler(BaseHandler):
    def initialize(self, ctx):
        super().initialize(ctx)
        if "RANK" in os.environ:
            mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            self.model = parallelize_module(self.model, mesh, plan)
            assert self.model.up.weight.to_local().shape == (32, 16)

    def preprocess(self, data):
        return torch.tensor([row["body"] for row in data])
"""
# The same layers as two stages of a pipeline.
STAGES_HANDLER = """
import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from ts.torch_handler.base_handler import BaseHandler

class StagesHandler(BaseHandler):
    def initialize(self, ctx):
        super().initialize(ctx)
        dist.init_process_group("gloo")
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        pipe = pipeline(self.model, (torch.zeros(1, 16),), split_spec={"down": SplitPoint.BEGINNING})
        self.schedule = ScheduleGPipe(pipe.build_stage(self.rank, self.device), n_microbatches=1)

    def preprocess(self, data):
        return torch.tensor([row["body"] for row in data])

    def inference(self, data):
        output = self.schedule.eval(*([data] if self.rank == 0 else []))
        output = output if self.rank == self.last else torch.empty(1, 4)
        dist.broadcast(output, src=self.last)
        return output
"""
ADDING = "parallelType: tp\ndeviceType: cpu\ntorchrun:\n  nproc-per-node: 4\n"
STAGES = "parallelType: pptp\nparallelLevel: 2\n"
SPLIT = "parallelType: tp\nparallelLevel: 2\nbatchSize: 2\n"


@pytest.fixture(scope="module")
def server(open_server: Any, pack: Any) -> Any:
    named = {"handler": "handler.py", "modelFile": "model.py", "configFile": "c.yaml"}
    pack("adding", {"model.py": ADDING_MODEL, "handler.py": ADDING_HANDLER, "c.yaml": ADDING}, **named)
    split = {"model.py": SPLIT_MODEL, "handler.py": SPLIT_HANDLER}
    pack("split", {**split, "c.yaml": SPLIT}, **named)
    stages = {"model.py": SPLIT_MODEL, "handler.py": STAGES_HANDLER, "c.yaml": STAGES}
    pack("stages", stages, **named)
    pack("whole", split, handler="handler.py", modelFile="model.py")
    for name in ("adding", "split", "stages", "whole"):
        assert open_server.register(f"{name}.mar", initial_workers=1).status == 200
    return open_server


def predict(server: Any, model: str, body: object) -> Any:
    return server.call(
        "POST", f"/predictions/{model}", json.dumps(body).encode(), content_type="application/json"
    )


def worker_of(server: Any, model: str) -> dict[str, Any]:
    described = server.call("GET", f"/models/{model}", api="management").json()[0]
    worker: dict[str, Any] = described["workers"][0]
    return worker


def test_four_ranks_answer_as_those_of_torchrun_do(server: Any) -> None:
    answer = server.call("POST", "/predictions/adding", b"42")
    assert (answer.status, answer.body) == (200, b"0168")
    assert answer.headers["transfer-encoding"] == "chunked"
    described = server.call("GET", "/models/adding", api="management").json()[0]
    assert (described["parallelType"], described["parallelLevel"]) == ("tp", 4)


@pytest.mark.parametrize("model", ["split", "stages"])
def test_a_model_over_two_ranks_answers_as_in_one_process(server: Any, model: str) -> None:
    inputs = [[number / 16 - at for number in range(16)] for at in range(5)]
    for row in inputs:
        whole = predict(server, "whole", row).json()
        assert predict(server, model, row).json() == pytest.approx(whole, abs=1e-4)


def test_the_memory_of_all_ranks_is_that_of_the_worker(server: Any) -> None:
    worker = worker_of(server, "split")
    assert worker["memoryUsage"] > 1.5 * psutil.Process(worker["pid"]).memory_info().rss


def test_a_rank_that_is_killed_is_named_and_the_model_comes_back(server: Any) -> None:
    before = worker_of(server, "split")["pid"]
    os.kill(psutil.Process(before).children()[0].pid, signal.SIGKILL)
    limit_s = time.monotonic() + 60
    while (worker := worker_of(server, "split"))["pid"] == before or worker["status"] != "READY":
        assert time.monotonic() < limit_s, worker
    losses = server.call("GET", "/models/split", api="management").json()[0]["torchere"]["losses"]
    assert losses[0]["lastCause"] == "rank 1: killed by signal 9 (SIGKILL)"
    assert predict(server, "split", [0.5] * 16).status == 200
