"""Checkpoints as training scripts write them: under other names, wrapped, with more beside them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.checkpoint import read_weights
from torchere.archiver.models.load.distributed import read_parts
from torchere.archiver.models.load.fitting import load_into, unwrapped
from torchere.archiver.models.load.source import read_source


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.layer(x))
        return found


def weights(value: float = 2.0) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(tensor, value) for key, tensor in Net().state_dict().items()}


def prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + key: tensor for key, tensor in weights().items()}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


OPTIMIZER = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
WRAPPED = {
    "model_state": {"epoch": 3, "model_state": weights(), "optimizer": OPTIMIZER},
    "net": {"acc": 93.2, "net": weights(), "epoch": 3},
    "params": {"params": weights()},
    "weights": {"weights": weights(), "names": ["a", "b"]},
    "model.state_dict": {"model": {"state_dict": weights(), "config": {"width": 2}}},
    "a name of its own": {"generator": weights(), "step": 7},
    "state_dict_ema alone": {"state_dict_ema": weights(), "epoch": 3},
    "of torch.compile": {"state_dict": prefixed("_orig_mod.")},
    "of DataParallel": {"state_dict": prefixed("module."), "arch": "net"},
    "of both": prefixed("module._orig_mod."),
    "whole, beside numbers": {**weights(), "epoch": 3, "best": 0.9},
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_state_dict_is_found_under_any_name(tmp_path: Path, name: str) -> None:
    path, module = saved(tmp_path / "w.pth", WRAPPED[name]), Net()
    assert load_into(module, read_weights(path), path) == []
    assert torch.equal(module.layer.weight, torch.full((3, 2), 2.0))


def test_of_several_that_fit_the_weights_before_their_average_are_taken_and_told(tmp_path: Path) -> None:
    path, module = saved(tmp_path / "w.pth", {"state_dict_ema": weights(5.0), "state_dict": weights()}), Net()
    (line,) = load_into(module, read_weights(path), path)
    assert "under 'state_dict' of the file; it has others that fit, under 'state_dict_ema'" in line
    assert torch.equal(module.layer.weight, torch.full((3, 2), 2.0))
    saved(path, weights(5.0))  # what the line recommends
    assert load_into(module, read_weights(path), path) == []
    assert torch.equal(module.layer.weight, torch.full((3, 2), 5.0))


def test_the_state_dict_that_fits_is_taken_before_one_of_a_better_name(tmp_path: Path) -> None:
    content = {"state_dict": {"loss.weight": torch.zeros(1)}, "student": weights()}
    path, module = saved(tmp_path / "w.pth", content), Net()
    assert load_into(module, read_weights(path), path) == []


def test_weights_from_before_normalisations_counted_their_batches_load(tmp_path: Path) -> None:
    state = weights()
    del state["norm.num_batches_tracked"]
    path, module = saved(tmp_path / "w.pth", {"module." + key: value for key, value in state.items()}), Net()
    assert load_into(module, read_weights(path), path) == []


def test_a_refusal_has_the_keys_of_the_file_and_all_of_torchs_message(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"net": {"layer.w": torch.zeros(1), "other.b": torch.zeros(1)}})
    with pytest.raises(ModelRefused, match=r"under 'net': layer\.w, other\.b; .*--no-strict"):
        load_into(Net(), read_weights(path), path)
    state = {key: value[None] for key, value in weights().items()}
    saved(path, state)
    with pytest.raises(
        ModelRefused, match=r"size mismatch for layer\.weight.*size mismatch for norm\.running_var"
    ):
        load_into(Net(), read_weights(path), path)
    saved(path, {"epoch": 3, "names": ["a"]})
    with pytest.raises(
        ModelRefused, match="without a state dict, with the keys epoch, names; expected names and"
    ):
        read_weights(path)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_weights_that_fit_are_taken_where_the_rest_does_not_matter(tmp_path: Path, prefix: str) -> None:
    state = weights()
    del state["norm.weight"]
    state["head.weight"] = torch.zeros(1)
    path = saved(tmp_path / "w.pth", {"model": {prefix + key: value for key, value in state.items()}})
    module = Net()
    with pytest.raises(ModelRefused, match=r"missing norm\.weight; unexpected (model\.)?head\.weight"):
        load_into(module, read_weights(path), path)
    taken, missing, extra = load_into(module, read_weights(path), path, strict=False)
    assert taken == "--no-strict: 6 of 7 weights are the file's"
    assert missing.endswith("at random: norm.weight")
    assert extra.endswith("head.weight")
    assert torch.equal(module.layer.weight, torch.full((3, 2), 2.0))
    assert torch.equal(module.norm.weight, torch.ones(3))
    saved(path, {"other": torch.zeros(1)})
    with pytest.raises(ModelRefused, match="none of its weights has a name of the model's"):
        load_into(module, read_weights(path), path, strict=False)


DENSE = """\
import re
from collections import OrderedDict

import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.BatchNorm1d(4)
        self.linear1 = torch.nn.Linear(4, 4)


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features = torch.nn.Sequential(OrderedDict([("denselayer1", Block())]))

    def forward(self, x):
        block = self.features.denselayer1
        return block.linear1(block.norm1(x))
"""
RENAMING = '''\
import re

from base import Base


class Classifier(Base):
    """Takes the names of old files, as the densenet of TorchServe's documentation does."""

    def load_state_dict(self, state_dict, strict=True):
        pattern = re.compile(r"^(.*denselayer\\d+\\.(?:norm|linear))\\.((?:[12])\\.\\w+)$")
        for key in list(state_dict.keys()):
            found = pattern.match(key)
            if found:
                state_dict[found.group(1) + found.group(2)] = state_dict.pop(key)
        return super().load_state_dict(state_dict, strict)
'''


@pytest.mark.parametrize("model_format", ["keep", "torchscript"])
@pytest.mark.parametrize("is_old", [True, False])
def test_a_class_that_renames_keys_itself_loads_and_is_served(
    pack: Any, serve: Any, tmp_path: Path, model_format: str, is_old: bool
) -> None:
    (tmp_path / "base.py").write_text(DENSE)
    (tmp_path / "model.py").write_text(RENAMING)
    torch.manual_seed(0)
    module: Any = read_source(None, tmp_path / "model.py", None, False).module
    state = module.state_dict()
    if is_old:
        state = {re.sub(r"(norm|linear)1", r"\g<1>.1", key): value for key, value in state.items()}
    saved(tmp_path / "w.pth", state)
    rows = torch.rand(2, 4)
    archive = pack(
        model_file=tmp_path / "model.py",
        serialized_file=tmp_path / "w.pth",
        model_format=model_format,
        example=saved(tmp_path / "x.pt", rows),
    )
    found = torch.tensor(serve(archive, [{"body": row.tolist()} for row in rows]))
    torch.testing.assert_close(found, module(rows), atol=1e-5, rtol=1e-5)


def test_a_module_with_hooks_that_rename_keys_loads(tmp_path: Path) -> None:
    def rename(_module: Any, state: dict[str, Any], prefix: str, *_more: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}gamma")]:
            state[f"{prefix}weight"] = state.pop(key)

    module = Net()
    module.norm.register_load_state_dict_pre_hook(rename)
    state = weights()
    state["norm.gamma"] = state.pop("norm.weight")
    path = saved(tmp_path / "w.pth", state)
    assert load_into(module, read_weights(path), path) == []
    assert torch.equal(module.norm.weight, torch.full((3,), 2.0))


def test_the_versions_that_torch_keeps_beside_a_state_dict_are_not_lost(tmp_path: Path) -> None:
    seen = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *more)

    outer = nn.ModuleDict({"model": Versioned(2, 2)})
    path = saved(tmp_path / "w.pth", outer.state_dict())
    assert load_into(Versioned(2, 2), read_weights(path), path) == []
    assert seen == [3]


class Adapted(nn.Module):
    """The interface by which a model of PEFT is merged."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.peft_config = {"default": None}
        self.base_model = base

    def merge_and_unload(self) -> nn.Module:
        return self.base_model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        Adapted,
        lambda net: nn.DataParallel(torch.compile(net)),  # type: ignore[type-var]
    ],
)
def test_what_training_wraps_around_a_module_is_taken_off(wrap: Any) -> None:
    assert type(unwrapped(wrap(Net()))) is Net
    outer = nn.Sequential(nn.ReLU(), wrap(Net()))
    assert type(unwrapped(outer)[1]) is Net  # type: ignore[index]


def test_a_class_that_compiles_a_part_of_itself_takes_weights_with_and_without_its_name(
    tmp_path: Path,
) -> None:
    plain = nn.Sequential(Net(), nn.ReLU()).state_dict()
    named = {key.replace("0.", "0._orig_mod.", 1): value for key, value in plain.items()}
    for state in (plain, named):
        module = nn.Sequential(torch.compile(Net()), nn.ReLU())  # type: ignore[call-overload]
        path = saved(tmp_path / "w.pth", state)
        assert load_into(module, read_weights(path), path) == []
        assert torch.equal(module.state_dict()["0._orig_mod.layer.weight"], plain["0.layer.weight"])


def test_weights_of_an_adapter_are_told_from_those_of_a_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"base_model.model.layer.lora_A.weight": torch.zeros(1, 2)})
    with pytest.raises(
        ModelRefused, match=r"of an adapter \(LoRA\): merge it .* model\.merge_and_unload\(\)"
    ):
        load_into(Net(), read_weights(path), path)
    with pytest.raises(ModelRefused, match=r"of an adapter \(LoRA\): merge it"):
        read_source(path, None, None, False)


def test_the_module_beside_other_things_in_a_trusted_pickle_is_the_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"epoch": 3, "model": nn.Linear(2, 2)})
    assert isinstance(read_source(path, None, None, True).module, nn.Linear)


def saved_in_parts(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a missing process group
        save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("key", ["", "model", "state_dict"])
def test_parts_are_read_into_the_tensors_of_a_model(tmp_path: Path, key: str) -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2), "of_others": torch.zeros(1)}
    folder = saved_in_parts(tmp_path / "parts", {key: state} if key else state)
    room = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    read_parts(room, folder)
    assert torch.equal(room["a"], state["a"])
    assert torch.equal(room["b"], state["b"])


def test_a_checkpoint_of_another_model_is_refused_with_the_names(tmp_path: Path) -> None:
    folder = saved_in_parts(tmp_path / "parts", {"a": torch.ones(2)})
    with pytest.raises(ModelRefused, match="the checkpoint has no b; it has a"):
        read_parts({"b": torch.zeros(2)}, folder)
    with pytest.raises(ModelRefused, match=r"a has the shape \(2,\), and the model's \(3,\)"):
        read_parts({"a": torch.zeros(3)}, folder)
    next(folder.glob("*.distcp")).write_bytes(b"")
    with pytest.raises(ModelRefused, match="its index speaks of 8 bytes"):
        read_parts({"a": torch.zeros(2)}, folder)


# Run by torchrun: one step of training, saved as DeepSpeed does.
TRAIN_BY_DEEPSPEED = """
import os, sys
import deepspeed
import torch

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": int(sys.argv[2])},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(net.parameters(), 0.1)
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
engine.backward(engine(torch.ones(2, 8)).sum())
engine.step()
engine.save_checkpoint(sys.argv[1])
if torch.distributed.get_rank() == 0 and sys.argv[2] == "2":
    torch.save(net.state_dict(), os.path.join(sys.argv[1], "expected.pth"))
"""
_NO_DEEPSPEED = "needs deepspeed, which has no wheels: pip install deepspeed"


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason=_NO_DEEPSPEED)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_pieces_of_deepspeeds_zero_are_put_together_by_deepspeed(tmp_path: Path, stage: int) -> None:
    (tmp_path / "train.py").write_text(TRAIN_BY_DEEPSPEED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*torchrun, str(tmp_path / "train.py"), str(tmp_path / "zero"), str(stage)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with pytest.raises(ModelRefused, match="trust it with --allow-pickle"):
        read_weights(tmp_path / "zero")
    found = read_weights(tmp_path / "zero", allow_pickle=True)
    assert found.kind == "DeepSpeed ZeRO checkpoint"
    assert {name: tuple(tensor.shape) for name, tensor in found.states[""].items()} == {
        **{"0.weight": (16, 8), "0.bias": (16,)},
        **{"2.weight": (3, 16), "2.bias": (3,)},
    }
    if stage == 2:
        expected = torch.load(tmp_path / "zero" / "expected.pth")
        for name, tensor in found.states[""].items():
            torch.testing.assert_close(tensor, expected[name])


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_a_zero_checkpoint_without_deepspeed_says_how_to_put_it_together(tmp_path: Path) -> None:
    step = tmp_path / "global_step1"
    step.mkdir()
    (step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    for folder in (tmp_path, step):
        with pytest.raises(
            ModelRefused, match=r"install deepspeed.*or run `python zero_to_fp32.py \. OUTPUT`"
        ):
            read_weights(folder)
