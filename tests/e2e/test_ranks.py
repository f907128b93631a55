"""Models of several processes over HTTP: TorchServe's keys for them, tensor parallelism, and its losses."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from torchere.archiver.models.convert.ranks import in_ranks

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
# Layers that `parallel` splits: pairs of linear layers, in a list.
LAYERS_MODEL = """
import torch

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.Sequential(*(self.block() for _ in range(4)))
        self.head = torch.nn.Linear(16, 4)

    def block(self):
        return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))

    def forward(self, x):
        return self.head(self.blocks(x))
"""
ROWS_HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler

class RowsHandler(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([row["body"] for row in data])
"""
# The same by torch's own calls in a handler, as docs/operations.md shows it.
SPLIT_HANDLER = """
import os
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from ts.torch_handler.base_handler import BaseHandler

class SplitHandler(BaseHandler):
    def initialize(self, ctx):
        super().initialize(ctx)
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        plan = {"blocks.*.0": ColwiseParallel(), "blocks.*.2": RowwiseParallel()}
        self.model = parallelize_module(self.model, mesh, plan)
        assert self.model.blocks[0][0].weight.to_local().shape == (32, 16)

    def preprocess(self, data):
        return torch.tensor([row["body"] for row in data])
"""
ADDING = "parallelType: tp\ndeviceType: cpu\ntorchrun:\n  nproc-per-node: 4\n"
BY_HAND = "parallelType: tp\nparallelLevel: 2\n"
SPREAD = {  # model-config.yaml by model; `whole` has none
    "tensor": "parallel: {tensor: 2}\nbatchSize: 2\n",
    "named": "parallel: {tensor: 2, plan: {'blocks.*.0': colwise, 'blocks.*.2': rowwise}}\n",
    "stages": "parallel: {pipeline: 2}\nbatchSize: 2\n",
    "both": "parallel: {tensor: 2, pipeline: 2}\n",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shards of four ranks (`sharded`), and the same weights in one file.

    The ranks are forked, because under torchrun each would import torch.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards
    from torch.distributed.fsdp import fully_shard

    folder = tmp_path_factory.mktemp("checkpoint")
    space: dict[str, Any] = {}
    exec(LAYERS_MODEL, space)

    def save(rank: int) -> None:
        """Save the model, trained or not, as FSDP2 does, each rank its own shards."""
        model = space["Layers"]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05)  # what the class does not make itself
        if rank == 0:
            torch.save(model.state_dict(), folder / "merged.pth")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        save_shards({"model": get_model_state_dict(model)}, checkpoint_id=folder / "sharded")

    in_ranks(4, save)
    return folder


@pytest.fixture(scope="module")
def server(open_server: Any, pack: Any) -> Any:
    named = {"handler": "handler.py", "modelFile": "model.py", "configFile": "c.yaml"}
    pack("adding", {"model.py": ADDING_MODEL, "handler.py": ADDING_HANDLER, "c.yaml": ADDING}, **named)
    pack("by-hand", {"model.py": LAYERS_MODEL, "handler.py": SPLIT_HANDLER, "c.yaml": BY_HAND}, **named)
    layers = {"model.py": LAYERS_MODEL, "handler.py": ROWS_HANDLER}
    pack("whole", layers, handler="handler.py", modelFile="model.py")
    for name, config in SPREAD.items():
        pack(name, {**layers, "c.yaml": config}, **named)
    for name in ("adding", "by-hand", "whole", *SPREAD):
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


@pytest.mark.parametrize("model", ["by-hand", *SPREAD])
def test_a_model_over_two_ranks_answers_as_in_one_process(server: Any, model: str) -> None:
    inputs = [[number / 16 - at for number in range(16)] for at in range(5)]
    for row in inputs:
        whole = predict(server, "whole", row).json()
        assert predict(server, model, row).json() == pytest.approx(whole, abs=1e-4)


def test_the_memory_of_all_ranks_is_that_of_the_worker(server: Any) -> None:
    worker = worker_of(server, "tensor")
    assert worker["memoryUsage"] > 1.5 * psutil.Process(worker["pid"]).memory_info().rss


def test_a_rank_that_is_killed_is_named_and_the_model_comes_back(server: Any) -> None:
    before = worker_of(server, "tensor")["pid"]
    os.kill(psutil.Process(before).children()[0].pid, signal.SIGKILL)
    limit_s = time.monotonic() + 60
    while (worker := worker_of(server, "tensor"))["pid"] == before or worker["status"] != "READY":
        assert time.monotonic() < limit_s, worker
        time.sleep(0.01)
    losses = server.call("GET", "/models/tensor", api="management").json()[0]["torchere"]["losses"]
    assert losses[0]["lastCause"] == "rank 1: killed by signal 9 (SIGKILL)"
    assert predict(server, "tensor", [0.5] * 16).status == 200


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("parallel: {tensor: 2, plan: {up: colwise}}", "no layer is called up"),
        ("parallel: {tensor: 3}", "blocks.0.0 of size 64 can't be split over 3 ranks"),
        ("parallel: {pipeline: 5}", "the model has no list of 5 layers to make stages of"),
    ],
)
def test_what_can_not_be_split_is_refused_with_the_reason(
    server: Any, pack: Any, config: str, text: str
) -> None:
    files = {"model.py": LAYERS_MODEL, "handler.py": ROWS_HANDLER, "c.yaml": config}
    pack("refused", files, handler="handler.py", modelFile="model.py", configFile="c.yaml")
    refused = server.register("refused.mar", initial_workers=1)
    assert refused.status >= 400
    assert text in refused.body.decode()


@pytest.mark.parametrize("split", ["tensor", "pipeline", "tensor: 2, pipeline"])
def test_a_checkpoint_of_four_ranks_is_served_by_two_that_read_their_own_parts(
    server: Any, pack: Any, checkpoint: Path, split: str
) -> None:
    layers: dict[str, str | bytes] = {"model.py": LAYERS_MODEL, "handler.py": ROWS_HANDLER}
    shards = {file.name: file.read_bytes() for file in (checkpoint / "sharded").iterdir()}
    assert len([name for name in shards if name.endswith(".distcp")]) == 4
    named = {"handler": "handler.py", "modelFile": "model.py"}
    config = f"parallel: {{{split}: 2}}\n"
    name = split.replace(": 2, ", "-")
    pack(f"sharded-{name}", {**layers, **shards, "c.yaml": config}, configFile="c.yaml", **named)
    merged = (checkpoint / "merged.pth").read_bytes()
    pack(f"merged-{name}", {**layers, "merged.pth": merged}, serializedFile="merged.pth", **named)
    for kind in ("sharded", "merged"):
        assert server.register(f"{kind}-{name}.mar", initial_workers=1).status == 200
    row = [number / 16 for number in range(16)]
    merged_answer = predict(server, f"merged-{name}", row).json()
    assert predict(server, f"sharded-{name}", row).json() == pytest.approx(merged_answer, abs=1e-4)
    assert merged_answer != pytest.approx(predict(server, "whole", row).json(), abs=1e-2)
