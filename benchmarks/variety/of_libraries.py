"""Models that other libraries make: Lightning, transformers, torchao, torch's training for int8."""

from __future__ import annotations

from typing import Any

import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.nn import functional

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 100, "max_position_embeddings": 40}


class Lightning(pytorch_lightning.LightningModule):
    """A module of Lightning; its checkpoint says how wide it is."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])


def pair_classifier() -> nn.Module:
    """Return a BERT that classifies pairs of sentences."""
    import transformers  # noqa: PLC0415

    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))


def t5() -> nn.Module:
    """Return a T5 with one layer on each side."""
    import transformers  # noqa: PLC0415

    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def clip() -> nn.Module:
    """Return a CLIP, whose scores compare each picture with each text of a batch."""
    import transformers  # noqa: PLC0415

    vision = {**SMALL, "image_size": 32, "patch_size": 8, "projection_dim": 16}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**TEXT, "projection_dim": 16}, vision_config=vision, projection_dim=16
        )
    )


class Encoded(nn.Module):
    """Linear layers between normalisations, for weights that are int8 already."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def weight_only() -> nn.Module:
    """Return a model whose weights torchao holds in 8 bits."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415

    torch.manual_seed(0)  # the packer makes it, too
    module = Encoded().eval()
    quantize_(module, Int8WeightOnlyConfig())
    return module


def quantisation_aware() -> nn.Module:
    """Return a model after some steps of training for int8."""
    from torch.ao.quantization import disable_observer, get_default_qat_qconfig_mapping  # noqa: PLC0415
    from torch.ao.quantization.quantize_fx import prepare_qat_fx  # noqa: PLC0415

    torch.manual_seed(0)  # the packer makes it, too
    plain = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip
    module: Any = prepare_qat_fx(
        plain.train(), get_default_qat_qconfig_mapping("x86"), (torch.rand(2, 3, 32, 32),)
    )
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for _ in range(10):
        loss = functional.cross_entropy(module(torch.randn(8, 3, 32, 32)), torch.randint(10, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # Its observers would go on to move the scales with each run.
    return module.apply(disable_observer).eval()
