"""Classes and checkpoints of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.source import read_source

Pack = Callable[..., Path]
Serve = Callable[..., list[Any]]
MODEL = """\
import pytorch_lightning as lightning
import torch


class Net(lightning.LightningModule):
    def __init__(self, {parameters}):
        super().__init__()
        self.save_hyperparameters()
        many = {width}
        self.net = torch.nn.Sequential(torch.nn.Linear(8, many), torch.nn.ReLU(), torch.nn.Linear(many, 3))
        self.loss = torch.nn.CrossEntropyLoss(weight=torch.ones(3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _index):
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
OWN = ("width, rate=0.1", "width")
ONE = ("hparams", 'hparams["width"]')
DEFAULT = ("width=16", "width")


def written(folder: Path, parameters: str, width: str) -> Path:
    (folder / "model.py").write_text(MODEL.format(parameters=parameters, width=width))
    return folder / "model.py"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint as Lightning's Trainer lays it out, of a class with a width of 16."""
    module: Any = read_source(None, written(tmp_path, *DEFAULT), None, False).module
    content = {
        "epoch": 1,
        "global_step": 4,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {},
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 16, "dropout": 0.1},
    }
    torch.save(content, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.mark.parametrize("way", [{}, {"script": True}, {"quantize": "int8-dynamic"}], ids=str)
def test_a_lightning_module_becomes_torchscript_without_its_trainer(
    pack: Pack, serve: Serve, tmp_path: Path, checkpoint: Path, way: dict[str, Any]
) -> None:
    model = written(tmp_path, *OWN)
    rows = torch.rand(2, 8)
    torch.save(rows, tmp_path / "x.pt")
    archive = pack(
        model_file=model,
        serialized_file=checkpoint,
        model_format="torchscript",
        example=tmp_path / "x.pt",
        **way,
    )
    module: Any = read_source(checkpoint, model, None, False).module
    found = torch.tensor(serve(archive, [{"body": row.tolist()} for row in rows]))
    torch.testing.assert_close(found, module(rows), atol=0.05 if "quantize" in way else 1e-5, rtol=1e-4)
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        module.trainer  # noqa: B018  # the class is as it was


@pytest.mark.parametrize("parameters", [OWN, ONE], ids=["own", "one"])
def test_the_hyper_parameters_of_a_checkpoint_make_the_class(
    tmp_path: Path, checkpoint: Path, parameters: tuple[str, str]
) -> None:
    content = torch.load(checkpoint, weights_only=True)
    content["hparams_name"] = "hparams" if parameters is ONE else "kwargs"
    torch.save(content, checkpoint)
    source = read_source(checkpoint, written(tmp_path, *parameters), None, False)
    module: Any = source.module
    assert module.net[0].out_features == 16
    assert "hyper_parameters of the checkpoint that it takes, of width, dropout" in source.notes[0]


def test_a_class_that_a_server_makes_needs_defaults(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(
        ModelRefused, match=r"makes it without arguments: take --format torchscript, .*defaults"
    ):
        read_source(checkpoint, written(tmp_path, *OWN), None, False, kept=True)
    with pytest.raises(ModelRefused, match=r"size mismatch for net\.0.*or give the parameters these values"):
        read_source(checkpoint, written(tmp_path, "width=32", "width"), None, False, kept=True)
    assert read_source(checkpoint, written(tmp_path, *DEFAULT), None, False, kept=True).module is not None


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_checkpoint_of_lightnings_own_trainer_loads(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("pytorch_lightning")
    model = written(tmp_path, *OWN)
    given: Any = read_source(None, written(tmp_path, *DEFAULT), None, False).module
    for parameter in given.parameters():
        parameter.requires_grad_(True)
    rows = torch.utils.data.TensorDataset(torch.rand(8, 8), torch.randint(0, 3, (8,)))
    trainer = lightning.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(given, torch.utils.data.DataLoader(rows, batch_size=4))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    module: Any = read_source(tmp_path / "own.ckpt", written(model.parent, *OWN), None, False).module
    torch.testing.assert_close(module.net[0].weight, given.net[0].weight.detach())
