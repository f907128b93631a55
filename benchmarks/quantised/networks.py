"""The networks that are quantised with random weights."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class Recurrent(nn.Module):
    """Two LSTM layers and a classifier on the last state: [batch, steps, 128] to [batch, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(128, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 32)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
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

    def forward(self, x: Tensor) -> Tensor:
        """[batch, narrow, height, width] to [batch, wide, height / stride, width / stride]."""
        inner = self.two_norm(self.two(self.relu(self.one_norm(self.one(x)))))
        added: Tensor = self.last_relu(inner + self.shortcut(x))
        return added


class Classifier(nn.Module):
    """An encoder of torch's own layers, and a classifier on the mean: [batch, steps, 256] to [batch, 16]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        scores: Tensor = self.head(self.encoder(x).mean(1))
        return scores


class Bottleneck(nn.Module):
    """A residual block of three convolutions, the outer ones 1 x 1 (He et al. 2015)."""

    def __init__(self, narrow: int, inner: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inner
        self.layers = nn.Sequential(
            *(nn.Conv2d(narrow, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            *(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide)),
        )
        same = narrow == wide and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(narrow, wide, 1, stride, bias=False)
        self.last_relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[batch, narrow, height, width] to [batch, 4 inner, height / stride, width / stride]."""
        added: Tensor = self.last_relu(self.layers(x) + self.shortcut(x))
        return added


class Inverted(nn.Module):
    """An inverted residual block (Sandler et al. 2018)."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        inner = 6 * narrow
        self.adds = stride == 1 and narrow == wide
        self.layers = nn.Sequential(
            *(nn.Conv2d(narrow, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner)),
            *(nn.ReLU6(), nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, narrow, height, width] to [batch, wide, height / stride, width / stride]."""
        found: Tensor = self.layers(x)
        return x + found if self.adds else found


class UNet(nn.Module):
    """Segmentation with three levels of skip connections (Ronneberger et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        self.down = nn.ModuleList(_double(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * a, a, 2, 2) for a in reversed(widths[:-1]))
        self.join = nn.ModuleList(_double(2 * a, a) for a in reversed(widths[:-1]))
        self.classes = nn.Conv2d(widths[0], 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] to [batch, 8, height, width]."""
        kept = []
        for index, layer in enumerate(self.down):
            x = layer(functional.max_pool2d(x, 2) if index else x)
            kept.append(x)
        for up, join, skipped in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = join(torch.cat([up(x), skipped], 1))
        scores: Tensor = self.classes(x)
        return scores


def _double(narrow: int, wide: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(narrow, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()),
        *(nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()),
    )


class VisionTransformer(nn.Module):
    """Six encoder layers of torch's own over patches of 16 x 16 and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 16, 16)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 384)), nn.Parameter(torch.randn(1, 197, 384))
        layer = nn.TransformerEncoderLayer(384, 6, 1536, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(384, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, 224, 224] to [batch, 1000]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        scores: Tensor = self.head(self.encoder(x)[:, 0])
        return scores


class Decoder(nn.Module):
    """A language model of four blocks with causal attention, as in GPT-2: [batch, steps, 512] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(_Causal() for _ in range(4))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
            for _ in range(4)
        )
        self.head = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        for attention, layer in zip(self.attention, self.layers, strict=True):
            x = x + attention(x)
            x = x + layer(x)
        rows: Tensor = self.head(x)
        return rows


class _Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(512), nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(self.norm(x)).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        rows: Tensor = self.outer(found.transpose(1, 2).flatten(2))
        return rows


class Recommender(nn.Module):
    """DLRM with the layers of MLPerf's: numbers, 26 embedded categories, and their products."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = _perceptron(13, 512, 256, 128)
        self.top = _perceptron(128 + 351, 1024, 1024, 512, 256)
        self.last = nn.Linear(256, 1)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1))

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """[batch, 13] and [batch, 26, 128] to [batch, 1]."""
        x = self.bottom(dense)
        every = torch.cat([x[:, None], embedded], 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        scores: Tensor = self.last(self.top(torch.cat([x, products], 1)))
        return scores


def _perceptron(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())))
