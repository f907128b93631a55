"""The models that are quantised, each with the data that it is calibrated on and compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness.errors import Unavailable
from harness.paths import ROOT
from torch import nn

from quantised import minilm, networks

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
    torch.manual_seed(0)
    plan = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
    blocks = [networks.Block(*sizes) for sizes in (*plan, (256, 512, 2), (512, 512, 1))]
    return _classifier(*_stem(), *blocks, *_last(512))


def _bottlenecks() -> Ready:
    torch.manual_seed(0)
    plan = [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]
    blocks, narrow = [], 64
    for inner, count, stride in plan:
        for index in range(count):
            blocks.append(networks.Bottleneck(narrow, inner, 1 if index else stride))
            narrow = 4 * inner
    return _classifier(*_stem(), *blocks, *_last(narrow))


def _mobile() -> Ready:
    torch.manual_seed(0)
    plan = ((16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1))
    blocks = [networks.Inverted(*sizes) for sizes in (*plan, (64, 96, 1), (96, 160, 2), (160, 160, 1))]
    first = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()]
    wide = [nn.Conv2d(160, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
    return _classifier(*first, *blocks, *wide, *_last(1280))


def _stem() -> list[nn.Module]:
    return [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def _last(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]


def _classifier(*layers: nn.Module) -> Ready:
    """A network with random weights and photographs."""
    _, photographs = example_modules()
    calibration = photographs.crops(photographs.CALIBRATION, 2, seed=1)
    held_out = photographs.crops(photographs.HELD_OUT, 2, seed=2)
    network = nn.Sequential(*layers).eval()
    return Ready(network, _one(calibration), _one(held_out), "photographs; random weights", trained=False)


def _random(module: nn.Module, *shapes: tuple[int, ...]) -> Ready:
    """A model with random weights and Gaussian inputs of these shapes, without the batch."""
    for parameter in module.parameters():
        if parameter.dim() > 1:  # torch makes all layers of an encoder alike, and a file holds them once
            nn.init.xavier_uniform_(parameter)
    samples: list[Sample] = [tuple(torch.randn(4, *shape) for shape in shapes) for _ in range(24)]
    return Ready(module.eval(), samples[:16], samples[16:], "random weights and inputs", trained=False)


def _perceptron() -> Ready:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return _random(nn.Sequential(*layers), (1024,))


def _recurrent() -> Ready:
    torch.manual_seed(0)
    return _random(networks.Recurrent(), (_LENGTH, 128))


def _encoder() -> Ready:
    torch.manual_seed(0)
    return _random(networks.Classifier(), (_LENGTH, 256))


def _segmentation() -> Ready:
    torch.manual_seed(0)
    ready = _random(networks.UNet(), (3, 96, 96))
    return replace(ready, classes=False)


def _patches() -> Ready:
    torch.manual_seed(0)
    return _random(networks.VisionTransformer(), (3, 224, 224))


def _decoder() -> Ready:
    torch.manual_seed(0)
    return replace(_random(networks.Decoder(), (64, 512)), classes=False)


def _recommender() -> Ready:
    torch.manual_seed(0)
    return replace(_random(networks.Recommender(), (13,), (26, 128)), classes=False)


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
    Subject("resnet50", "ResNet-50", "int8-static", _bottlenecks),
    Subject("mobilenet", "MobileNetV2, 10 blocks", "int8-static", _mobile),
    Subject("unet", "U-Net, 32 to 256 channels, 96 × 96", "int8-static", _segmentation),
    Subject("vit", "ViT, 6 × 384, 197 tokens", "int8-dynamic", _patches),
    Subject("decoder", "decoder, 4 × 512, 64 steps", "int8-dynamic", _decoder),
    Subject("dlrm", "DLRM, 26 categories", "int8-static", _recommender),
)


def make(key: str) -> Ready:
    """Make the subject of this key; raises Unavailable where it can't be made here."""
    return next(subject for subject in SUBJECTS if subject.key == key).make()
