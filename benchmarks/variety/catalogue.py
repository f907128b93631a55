"""Which models are packed: their kinds, their inputs, and the sizes that vary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
# Inputs of so many rows, of the example's sizes (0) or of other ones (1, 2), with numbers of the generator.
Draw = Callable[[int, int, torch.Generator], Inputs]
SAMPLES, ROWS = 12, 4


@dataclass(frozen=True, slots=True)
class Entry:
    """A model as a user packs it."""

    key: str
    title: str
    kind: str
    factory: str  # module:name, of a class or function without arguments
    draw: Draw
    dynamic: tuple[str, ...] = ()  # values of --dynamic
    batches: str = "1:64"  # of --dynamic-batch, where it is needed; "" for a model without a batch
    source: str = ""  # how its files are written by `write`: "", "lightning", "huggingface"
    int8: bool = False  # it is int8 already, so that its only method is int8-trained

    def make(self) -> nn.Module:
        """Make the module with the weights that its archive has."""
        module, _, name = self.factory.partition(":")
        torch.manual_seed(0)
        made: nn.Module = getattr(__import__(module, fromlist=[name]), name)()
        return made if self.int8 else settled(made, self)

    def write(self, folder: Path) -> list[str]:
        """Write the files of the model, the example and the samples; return the flags that name them."""
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(1)
        _save(folder / "example.pt", self.draw(2, 0, generator))
        (folder / "samples").mkdir()
        for index in range(SAMPLES):
            _save(
                folder / "samples" / f"{index:02}.pt",
                self.draw(ROWS, index % 3 if self.dynamic else 0, generator),
            )
        return [*_written(self, folder), "--example", f"{folder}/example.pt"]


def _written(entry: Entry, folder: Path) -> list[str]:
    module: Any = entry.make()
    if entry.source == "huggingface":
        module.save_pretrained(folder / "model")
        return ["--serialized-file", f"{folder}/model"]
    if entry.source == "lightning":
        content = {"pytorch-lightning_version": "2.6.6", "hyper_parameters": {"width": 48}}
        torch.save({**content, "state_dict": module.state_dict()}, folder / "last.ckpt")
        return ["--factory", entry.factory, "--serialized-file", f"{folder}/last.ckpt"]
    if entry.int8:
        return ["--factory", entry.factory]
    torch.save(module.state_dict(), folder / "net.pth")
    return ["--factory", entry.factory, "--serialized-file", f"{folder}/net.pth"]


def settled(module: nn.Module, entry: Entry) -> nn.Module:
    """Give batch normalisations statistics of their own, and return the module in eval mode.

    Other layers stay as they were made: dropout off, no gradients.
    """
    module.eval()
    norms = [one for one in module.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    for one in norms:
        one.train()
        one.momentum = None
    if norms:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for _ in range(4):
                module(*entry.draw(16, 0, generator).values())
    return module.eval()


def _save(path: Path, inputs: Inputs) -> None:
    torch.save(inputs, path)


def _floats(**shapes: Callable[[int], tuple[int, ...]]) -> Draw:
    """Draw Gaussian numbers; a shape is that of one row, by the size that varies."""

    def draw(rows: int, other: int, generator: torch.Generator) -> Inputs:
        return {name: torch.randn(rows, *shape(other), generator=generator) for name, shape in shapes.items()}

    return draw


def _tokens(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, 500, (rows, length), generator=generator)


def _dlrm(rows: int, _other: int, generator: torch.Generator) -> Inputs:
    sparse = torch.randint(0, 1000, (rows, 6), generator=generator)
    return {"dense": torch.randn(rows, 13, generator=generator), "sparse": sparse}


def _graph(rows: int, other: int, generator: torch.Generator) -> Inputs:
    count = 10 * rows + 3 * other
    edges = torch.randint(0, count, (2, 4 * count + other), generator=generator)
    return {"nodes": torch.randn(count, 16, generator=generator), "edges": edges}


def _pair(rows: int, other: int, generator: torch.Generator) -> Inputs:
    length = 12 + 5 * other
    kinds = (torch.arange(length) > length // 2).long().expand(rows, -1).contiguous()
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[:, length - 1 - other :] = 0
    return {
        "input_ids": _tokens(rows, length, generator) % 100,
        "attention_mask": mask,
        "token_type_ids": kinds,
    }


def _masked(rows: int, other: int, generator: torch.Generator) -> Inputs:
    ids = _tokens(rows, 16 + 7 * other, generator)
    mask = (torch.arange(ids.shape[1]) < ids.shape[1] - 3).long().expand(rows, -1).contiguous()
    return {"ids": ids * mask, "mask": mask}


def _ids(name: str, at: int, step: int) -> Draw:
    return lambda rows, other, generator: {name: _tokens(rows, at + step * other, generator)}


def _translation(rows: int, other: int, generator: torch.Generator) -> Inputs:
    source = _tokens(rows, 14 + 3 * other, generator)
    return {"source": source, "target": _tokens(rows, 9 + 2 * other, generator)}


def _towers(rows: int, _other: int, generator: torch.Generator) -> Inputs:
    pixels = torch.randn(rows, 3, 32, 32, generator=generator)
    return {"pixels": pixels, "ids": _tokens(rows, 12, generator)}


def _denoising(rows: int, _other: int, generator: torch.Generator) -> Inputs:
    step = torch.randint(0, 1000, (rows,), generator=generator)
    return {"noisy": torch.randn(rows, 3, 16, 16, generator=generator), "step": step}


def _t5(rows: int, other: int, generator: torch.Generator) -> Inputs:
    ids = _tokens(rows, 10 + 3 * other, generator) % 100
    decoder = _tokens(rows, 5, generator) % 100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": decoder}


def _clip(rows: int, _other: int, generator: torch.Generator) -> Inputs:
    ids = _tokens(rows, 10, generator) % 100
    pixels = torch.randn(rows, 3, 32, 32, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}


def _picture(size: int = 64, step: int = 0, name: str = "image", channels: int = 3) -> Draw:
    return _floats(**{name: lambda other: (channels, size + step * other, size + 2 * step * other)})


_P, _S, _M = "variety.pictures:", "variety.sequences:", "variety.of_libraries:"
ENTRIES = (
    Entry(
        "tabular", "MLP with batch normalisation", "table", _S + "Tabular", _floats(features=lambda _: (32,))
    ),
    Entry(
        "residual", "residual network, optional argument", "classifier", _P + "Residual", _picture(name="x")
    ),
    Entry("inverted", "depthwise, squeeze and excitation, SiLU", "classifier", _P + "Inverted", _picture()),
    Entry("vit", "ViT of torch's encoder", "vision transformer", _P + "VisionTransformer", _picture(32)),
    Entry("unet", "U-Net", "segmentation", _P + "UNet", _picture(32, 8), ("image.2=4*k", "image.3=4*k")),
    Entry(
        "detector",
        "pyramid, multiples of 32",
        "detector",
        _P + "Detector",
        _picture(64, 64),
        ("image.2=64*k", "image.3=64*k"),
    ),
    Entry(
        "crnn",
        "convolutions and LSTM, free width",
        "text recognition",
        _P + "Crnn",
        _floats(line=lambda other: (1, 32, 64 + 12 * other)),
        ("line.3=32:512:4",),
    ),
    Entry(
        "vae", "variational autoencoder", "autoencoder", _P + "Vae", _picture(28, name="image", channels=1)
    ),
    Entry("video", "3D convolutions", "video", _P + "Video", _floats(clip=lambda _: (3, 8, 32, 32))),
    Entry("denoiser", "diffusion step, group normalisation", "diffusion", _P + "Denoiser", _denoising),
    Entry(
        "points",
        "PointNet, free number of points",
        "point cloud",
        _P + "PointNet",
        _floats(points=lambda other: (100 + 37 * other, 3)),
        ("points.1=8:4096",),
    ),
    Entry("towers", "pictures and texts", "two towers", _P + "TwoTowers", _towers),
    Entry(
        "keyword",
        '1D network, padding="same"',
        "sound",
        _S + "KeywordSpotter",
        _floats(waveform=lambda _: (4000,)),
    ),
    Entry(
        "separator",
        "Conv-TasNet, multiples of 8",
        "source separation",
        _S + "Separator",
        _floats(mixture=lambda other: (800 + 8 * other,)),
        ("mixture.1=800:16000:8",),
    ),
    Entry(
        "conformer",
        "conformer block, free length",
        "speech",
        _S + "Conformer",
        _floats(frames=lambda other: (40 + 13 * other, 64)),
        ("frames.1=8:512",),
    ),
    Entry(
        "lstm",
        "LSTM with its state as input",
        "stream",
        _S + "StatefulLstm",
        _floats(frames=lambda _: (5, 40), h=lambda _: (2, 96), c=lambda _: (2, 96)),
    ),
    Entry(
        "forecaster",
        "GRU, free length",
        "time series",
        _S + "Forecaster",
        _floats(history=lambda other: (48 + 17 * other, 4)),
        ("history.1=8:512",),
    ),
    Entry(
        "tcn",
        "causal convolutions, free length",
        "time series",
        _S + "Causal",
        _floats(series=lambda other: (8, 60 + 11 * other)),
        ("series.2=4:1024",),
    ),
    Entry("dlrm", "DLRM", "recommendation", _S + "Dlrm", _dlrm),
    Entry(
        "graph",
        "message passing",
        "graph network",
        _S + "Graph",
        _graph,
        ("nodes.0=1:10000", "edges.1=1:100000"),
        batches="",
    ),
    Entry(
        "translator",
        "torch's transformer, free lengths",
        "encoder and decoder",
        _S + "Translator",
        _translation,
        ("source.1=2:100", "target.1=2:100"),
    ),
    Entry(
        "masked",
        "torch's encoder, padding mask, free length",
        "text classifier",
        _S + "Masked",
        _masked,
        ("ids,mask.1=4:128",),
    ),
    Entry(
        "language",
        "decoder with tied weights, free length",
        "language model",
        _S + "LanguageModel",
        _ids("ids", 16, 7),
        ("ids.1=2:128",),
    ),
    Entry("experts", "mixture of experts", "mixture of experts", _S + "Experts", _floats(x=lambda _: (64,))),
    Entry(
        "adaptive", "loop on values", "control flow", _S + "Adaptive", _floats(x=lambda _: (16,)), batches=""
    ),
    Entry(
        "lightning",
        "Lightning checkpoint",
        "Lightning",
        _M + "Lightning",
        _floats(x=lambda _: (24,)),
        source="lightning",
    ),
    Entry(
        "pair",
        "BERT for pairs of sentences",
        "Hugging Face",
        _M + "pair_classifier",
        _pair,
        ("input_ids,attention_mask,token_type_ids.1=4:40",),
        source="huggingface",
    ),
    Entry(
        "t5", "T5", "Hugging Face", _M + "t5", _t5, ("input_ids,attention_mask.1=2:64",), source="huggingface"
    ),
    Entry(
        "clip", "CLIP, whose rows meet", "Hugging Face", _M + "clip", _clip, batches="", source="huggingface"
    ),
    Entry(
        "weightonly",
        "torchao int8 weights",
        "torchao",
        _M + "weight_only",
        _floats(x=lambda _: (256,)),
        int8=True,
    ),
    Entry("qat", "trained for int8", "QAT", _M + "quantisation_aware", _picture(32, name="input"), int8=True),
)
