"""The operators of a model are seen, and seeing them costs no import of torch's compiler."""

import subprocess
import sys
from typing import Any

import torch

from torchere.archiver.models.inputs.run import OperatorWatch

TRIED = """
import sys, torch
from torchere.archiver.models.probe import derive, id_ranges
from torchere.archiver.models.steps import silent
derive.isolated = id_ranges.isolated = lambda work, say: work(silent, say)  # what a child would import
example = (torch.tensor([[1, 2]]),)
model = torch.jit.trace(torch.nn.EmbeddingBag(9, 4), example)
found = derive.signature_of(model, example, ["ids"], [], probe_batch=True)
found = id_ranges.with_id_ranges(found, model, example)
assert (found.batched, found.inputs[0].values.most) == (True, 8), found
sys.exit("torch._dynamo" in sys.modules)
"""


class Names(OperatorWatch):
    """The names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_the_operators_of_a_model_that_compiles_itself_are_seen() -> None:
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), backend="eager")
    with torch.no_grad(), Names() as watch:
        answer = model(torch.ones(2, 4))
    assert {"aten::addmm", "aten::relu"} <= watch.names
    assert bool((answer >= 0).all())


def test_trying_a_model_imports_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", TRIED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
