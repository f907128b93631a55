"""The models that are quantised, each with the data that it is calibrated on and compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness.errors import Unavailable
from harness.paths import ROOT
from torch import nn

from quantised import minilm

Sample = tuple[torch.Tensor, ...]
_LENGTH = 32  # tokens, or steps


@dataclass(frozen=True)
class Ready:
    """A model with its data."""

    module: nn.Module
    calibration: list[Sample]
    held_out: list[Sample]  # never shown to the quantiser
    data: str  # what these are, for the document
    classes: bool = True  # whether the largest output means something
    trained: bool = True  # or has random weights


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure; `make` may take seconds, and raise Unavailable."""

    key: str
    title: str
    method: str
    make: Callable[[], Ready]


class Recurrent(nn.Module):
    """Two LSTM layers and a classifier on the last state: [batch, steps, 128] to [batch, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scores: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class Block(nn.Module):
    """A residual block of two 3 x 3 convolutions (He et al. 2015)."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.one_norm, self.two_norm = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        self.two = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.relu, self.last_relu = nn.ReLU(), nn.ReLU()
        same = narrow == wide and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(narrow, wide, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, narrow, height, width] to [batch, wide, height / stride, width / stride]."""
        inner = self.two_norm(self.two(self.relu(self.one_norm(self.one(x)))))
        added: torch.Tensor = self.last_relu(inner + self.shortcut(x))
        return added


class Classifier(nn.Module):
    """An encoder of torch's own layers, and a classifier on the mean: [batch, steps, 256] to [batch, 16]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        scores: torch.Tensor = self.head(self.encoder(x).mean(1))
        return scores


def _photographs() -> Ready:
    network, photographs = example_modules()
    calibration = photographs.crops(photographs.CALIBRATION, 6, seed=1)
    crops = photographs.crops(photographs.HELD_OUT, 8, seed=2)
    held_out = [*crops, *(photographs.centre(name) for name in photographs.HELD_OUT)]
    data = "photographs of scikit-image; calibrated on 13 of them, compared on crops of 5 others"
    return Ready(network.pretrained(), _one(calibration), _one(held_out), data)


def _sentences() -> Ready:
    model, words = minilm.pretrained()
    found = minilm.sentences(ROOT / "docs", 48)
    samples: list[Sample] = [minilm.tokens(sentence, words, _LENGTH) for sentence in found]
    return Ready(model, samples[:8], samples[8:], "sentences of this project's documents", False)


def _residual() -> Ready:
    _, photographs = example_modules()
    torch.manual_seed(0)
    plan = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
    blocks = [Block(*sizes) for sizes in (*plan, (256, 512, 2), (512, 512, 1))]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    network = nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
    ).eval()
    calibration = photographs.crops(photographs.CALIBRATION, 2, seed=1)
    held_out = photographs.crops(photographs.HELD_OUT, 2, seed=2)
    return Ready(network, _one(calibration), _one(held_out), "photographs; random weights", trained=False)


def _random(module: nn.Module, *shape: int) -> Ready:
    """A model with random weights and Gaussian inputs of that shape, without the batch."""
    for parameter in module.parameters():
        if parameter.dim() > 1:  # torch makes all layers of an encoder alike, and a file holds them once
            nn.init.xavier_uniform_(parameter)
    samples: list[Sample] = [(torch.randn(4, *shape),) for _ in range(24)]
    return Ready(module.eval(), samples[:16], samples[16:], "random weights and inputs", trained=False)


def _perceptron() -> Ready:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return _random(nn.Sequential(*layers), 1024)


def _recurrent() -> Ready:
    torch.manual_seed(0)
    return _random(Recurrent(), _LENGTH, 128)


def _encoder() -> Ready:
    torch.manual_seed(0)
    return _random(Classifier(), _LENGTH, 256)


def _one(batches: list[torch.Tensor]) -> list[Sample]:
    return [(batch,) for batch in batches]


def example_modules() -> tuple[Any, Any]:
    """The modules of examples/image_classifier, which makes EfficientNet-Lite0 and reads photographs."""
    folder = str(ROOT / "examples" / "image_classifier")
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        import network  # noqa: PLC0415
        import photographs  # noqa: PLC0415

        photographs.photograph(photographs.CAT)
    except (ImportError, FileNotFoundError) as error:
        raise Unavailable(f"the packages of the example are missing: {error}") from error
    return network, photographs


SUBJECTS = (
    Subject("efficientnet", "EfficientNet-Lite0", "int8-static", _photographs),
    Subject("minilm", "all-MiniLM-L6-v2, 32 tokens", "int8-dynamic", _sentences),
    Subject("resnet", "ResNet-18", "int8-static", _residual),
    Subject("lstm", "LSTM, 2 × 512, 32 steps", "int8-dynamic", _recurrent),
    Subject("mlp", "MLP, 8 × 1024²", "int8-dynamic", _perceptron),
    Subject("encoder", "transformer encoder, 4 × 256, 32 steps", "int8-dynamic", _encoder),
)


def make(key: str) -> Ready:
    """Make the subject of this key; raises Unavailable where it can't be made here."""
    return next(subject for subject in SUBJECTS if subject.key == key).make()
