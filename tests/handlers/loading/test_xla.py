"""Models on PyTorch/XLA. torch_xla fits one release of torch, so it is tried in an environment of its own.

python -m venv xla
xla/bin/pip install torch==2.9.0 torch_xla==2.9.0 numpy msgspec orjson PyYAML Pillow safetensors psutil
TORCHERE_XLA_PYTHON=xla/bin/python python -m pytest tests/handlers/loading/test_xla.py
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from torchere.handlers.loading.xla import _check_axes, _read

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("TORCHERE_XLA_PYTHON")
needs_xla = pytest.mark.skipif(
    not PYTHON, reason="needs TORCHERE_XLA_PYTHON, the interpreter of an environment with torch_xla"
)
SCRIPT = """
import json, sys
import torch
from torchere.handlers import MockContext
from torchere.handlers.base import BaseHandler

config = json.loads(sys.argv[1])
open("model.py", "w").write('''
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
''')
class Handler(BaseHandler):
    pass

json.dump(config, open("model-config.yaml", "w"))
context = MockContext(
    model_pt_file=None, model_dir=".", model_file="model.py", model_yaml_config_file="model-config.yaml"
)
handler = Handler()
handler.initialize(context)
answers = handler.handle([[number / 16 for number in range(16)]] * 3, context)
sharding = ""
if handler.device.type == "xla":
    import torch_xla
    sharding = torch_xla._XLAC._get_xla_sharding_spec(handler.model.up.weight)
print(json.dumps([str(handler.device), handler.map_location, answers, sharding]))
"""


def answer(folder: Path, config: dict[str, Any], devices: int = 4) -> Any:
    """What the handler's device is, and what it answers, in the environment of XLA."""
    assert PYTHON
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "PYTHONPATH": str(ROOT / ".typing")}
    done = subprocess.run(
        [os.path.abspath(PYTHON), "-c", SCRIPT, json.dumps(config)],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_xla
def test_a_model_answers_on_xla_as_on_the_cpu(tmp_path: Path) -> None:
    device, map_location, on_cpu, _ = answer(tmp_path, {"deviceType": "cpu"})
    assert (device, map_location) == ("cpu", "cpu")
    device, map_location, on_xla, sharding = answer(tmp_path, {"deviceType": "xla"}, devices=1)
    assert (device, map_location, sharding) == ("xla:0", None, "")
    assert [pytest.approx(row, abs=1e-4) for row in on_cpu] == on_xla


@needs_xla
def test_weights_are_divided_over_a_mesh_of_devices(tmp_path: Path) -> None:
    _, _, on_cpu, _ = answer(tmp_path, {"deviceType": "cpu"})
    partition = {"up.weight": ["model", None], "up.bias": ["model"], "down.weight": [None, "model"]}
    section = {"mesh": {"data": 1, "model": 4}, "partition": partition}
    device, _, divided, sharding = answer(tmp_path, {"deviceType": "xla", "xla": section})
    assert device == "xla:0"
    assert "devices=[4,1]" in sharding
    assert [pytest.approx(row, abs=1e-4) for row in on_cpu] == divided


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (4, "expected a mapping with mesh and partition"),
        ({"mesh": {}}, "expected sizes from 1"),
        ({"mesh": {"model": 0}}, "expected sizes from 1"),
        ({"mesh": {"model": 4}, "sharding": {}}, "expected a mapping with mesh and partition"),
        ({"mesh": {"model": 4}, "partition": {"up": "model"}}, "expected lists of model or null"),
        ({"mesh": {"model": 4}, "partition": {"up": ["data"]}}, "expected lists of model or null"),
    ],
)
def test_a_wrong_section_is_refused(section: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _read(section)


def test_a_partition_that_does_not_fit_a_weight_is_refused() -> None:
    import torch

    _check_axes("up", torch.zeros(8, 3), ["model", None], {"model": 4})
    with pytest.raises(ValueError, match="up has 2 dimensions, found 1 axes"):
        _check_axes("up", torch.zeros(8, 3), ["model"], {"model": 4})
    with pytest.raises(ValueError, match="up of size 3 can't be divided by 4"):
        _check_axes("up", torch.zeros(8, 3), [None, "model"], {"model": 4})
