"""A model of four ranks for tests that end them: `parallel: {tensor: 2, pipeline: 2}`, and its handler.

`pythonpath` of pytest's configuration leads here.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 4
SPLIT = {"tensor": 2, "pipeline": 2}
MODEL = """
import torch


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.Sequential(*(block() for _ in range(4)))

    def forward(self, x):
        return self.blocks(x)


def block():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
"""
# A body is "VERB NUMBER". The number is answered if the model makes of it what one process does; `held R` has
# rank R wait for the file `go` before it runs the model, while the other ranks wait for it. When a rank loads
# it leaves a file with its process id and the time, and waits while there is a file `slow`. Each rank writes
# down the header x-number of each request that it runs.
HANDLER = """
import os, time
from pathlib import Path
import torch
from model import Layers
from ts.torch_handler.base_handler import BaseHandler


class RankedHandler(BaseHandler):
    def initialize(self, context):
        self.folder, self.rank = Path(context.model_yaml_config["folder"]), os.environ["RANK"]
        born = self.folder / f"born-{self.rank}.{os.getpid()}"  # of several groups at the same time
        born.write_text(f"[{os.getpid()}, {time.monotonic()}]")
        born.rename(born.with_suffix(""))
        while (self.folder / "slow").exists():
            time.sleep(0.005)
        self.book = os.open(self.folder / f"runs-{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.whole = Layers().eval()
        super().initialize(context)

    def preprocess(self, data):
        for at in range(len(data)):
            headers = {name.lower(): value for name, value in self.context.get_all_request_header(at).items()}
            os.write(self.book, (headers.get("x-number", "none") + "\\n").encode())
        self.orders = [bytes(row["body"]).decode().split() for row in data]
        if ["held", self.rank] in self.orders:
            (self.folder / "busy").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.005)
        self.rows = torch.tensor([[float(word)] * 8 for _, word in self.orders])
        return self.rows

    def postprocess(self, found):
        right = torch.allclose(found, self.whole(self.rows), atol=1e-4)
        return [word if right else f"wrong: {found}" for _, word in self.orders]
"""


def pack_ranked(pack: Callable[..., str], name: str, folder: Path, **config: Any) -> str:
    """Pack the model; `config` goes into its model-config.yaml, and its files into `folder`."""
    settings = {"parallel": SPLIT, "folder": str(folder), **config}
    files = {"h.py": HANDLER, "model.py": MODEL, "c.yaml": json.dumps(settings)}
    return pack(name, files, handler="h.py", modelFile="model.py", configFile="c.yaml")


def ranks_of(folder: Path) -> list[tuple[int, float]]:
    """The process id and the time of birth (monotonic) of each rank that has begun to load last."""
    found = []
    for rank in range(RANKS):
        pid, born_s = json.loads((folder / f"born-{rank}").read_text())
        found.append((pid, born_s))
    return found


def until_born(folder: Path, after_s: float, limit_s: float = 120.0) -> list[int]:
    """Wait until all ranks have begun to load after that time; return their process ids."""
    give_up_s = time.monotonic() + limit_s
    while True:
        try:
            found = ranks_of(folder)
        except FileNotFoundError:
            found = []
        if found and min(born_s for _, born_s in found) > after_s:
            return [pid for pid, _ in found]
        assert time.monotonic() < give_up_s, f"no group was started within {limit_s:g} s"
        time.sleep(0.005)
