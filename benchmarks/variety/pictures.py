"""Small models of pictures, clips and points, with random weights."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, WORDS = 64, 500


class Residual(nn.Module):
    """A convolutional classifier with shortcuts, and an optional argument that requests never give."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 32, 3, 1, 1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3, 1, 1, bias=False),
                nn.BatchNorm2d(32),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, features: bool = False) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = functional.relu(x + block(x))
        return x if features else self.head(x.mean((2, 3)))


class Inverted(nn.Module):
    """Depthwise convolutions, squeeze and excitation, SiLU, as in EfficientNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.SiLU())
        self.wide = nn.Sequential(nn.Conv2d(24, 96, 1), nn.BatchNorm2d(96), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(96, 96, 5, 1, 2, groups=96), nn.BatchNorm2d(96), nn.SiLU())
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(96, 8, 1), nn.SiLU(), nn.Conv2d(8, 96, 1), nn.Sigmoid()
        )
        self.narrow = nn.Sequential(nn.Conv2d(96, 24, 1), nn.BatchNorm2d(24))
        self.head = nn.Linear(24, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        inner = self.deep(self.wide(x))
        return self.head((x + self.narrow(inner * self.squeeze(inner))).mean((2, 3)))


def _double(narrow: int, wide: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(narrow, wide, 3, padding=1),
        nn.BatchNorm2d(wide),
        nn.ReLU(inplace=True),
        nn.Conv2d(wide, wide, 3, padding=1),
        nn.BatchNorm2d(wide),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Segmentation with skip connections; sizes are multiples of four."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = _double(3, 16), _double(16, 32), _double(32, 64)
        self.up_two, self.up_one = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.left, self.last = _double(64, 32), _double(32, 16)
        self.classes = nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        one = self.one(image)
        two = self.two(functional.max_pool2d(one, 2))
        three = self.three(functional.max_pool2d(two, 2))
        two = self.left(torch.cat([self.up_two(three), two], 1))
        return self.classes(self.last(torch.cat([self.up_one(two), one], 1)))


class Detector(nn.Module):
    """Two levels of a feature pyramid with one row for each cell; sizes are multiples of 32."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 24, 32, 48, 64)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.SiLU()) for a, b in pairwise(widths)
        )
        self.lateral = nn.Conv2d(48, 64, 1)
        self.head = nn.Conv2d(64, 4 + 3, 3, padding=1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        levels, x = [], image
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        top = levels[-1]
        middle = self.lateral(levels[-2]) + functional.interpolate(top, scale_factor=2.0, mode="nearest")
        rows = torch.cat([self.head(one).flatten(2) for one in (middle, top)], 2).transpose(1, 2)
        return {"boxes": rows[..., :4].exp().clamp(max=1e3), "scores": rows[..., 4:].sigmoid()}


class Crnn(nn.Module):
    """Recognises text in a line: convolutions, then a bidirectional LSTM along the width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.lstm = nn.LSTM(32 * 8, 64, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 40)

    def forward(self, line: Tensor) -> Tensor:
        columns = self.layers(line).permute(0, 3, 1, 2).flatten(2)
        return self.head(self.lstm(columns)[0]).log_softmax(-1)


class PointNet(nn.Module):
    """A cloud of any number of points, by the maximum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.align = nn.Sequential(nn.Conv1d(3, 32, 1), nn.ReLU())
        self.rotate = nn.Linear(32, 9)
        self.points = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1))
        self.head = nn.Linear(128, 10)

    def forward(self, points: Tensor) -> Tensor:
        x = points.transpose(1, 2)
        turn = self.rotate(self.align(x).amax(-1)).view(-1, 3, 3) + torch.eye(3, device=x.device)
        return self.head(self.points(turn @ x).amax(-1))


class TwoTowers(nn.Module):
    """Embeddings of a picture and of a text, of length one, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(3, 32, 8, 8), nn.GELU(), nn.Conv2d(32, 64, 2, 2), nn.Flatten(), nn.Linear(256, 48)
        )
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True)
        self.text = nn.Linear(WIDTH, 48)

    def forward(self, pixels: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        picture = self.picture(pixels)
        text = self.text(self.layer(self.words(ids))[:, 0])
        return picture / picture.norm(dim=-1, keepdim=True), functional.normalize(text, dim=-1)


class VisionTransformer(nn.Module):
    """Patches, a class token, encoder layers of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.token, self.places = (
            nn.Parameter(torch.randn(1, 1, WIDTH)),
            nn.Parameter(torch.randn(1, 17, WIDTH)),
        )
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


class Vae(nn.Module):
    """A variational autoencoder; it draws no noise while it serves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU()
        )
        self.mean, self.spread = nn.Linear(32 * 49, 16), nn.Linear(32 * 49, 16)
        self.start = nn.Linear(16, 32 * 49)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.encoder(image).flatten(1)
        mean, spread = self.mean(x), self.spread(x)
        z = mean + torch.randn_like(mean) * (spread / 2).exp() if self.training else mean
        return self.decoder(self.start(z).relu().view(-1, 32, 7, 7)), mean, spread


class Video(nn.Module):
    """Three-dimensional convolutions over a clip."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, 16, 3, (1, 2, 2), 1),
            nn.BatchNorm3d(16),
            nn.ReLU(),
            nn.Conv3d(16, 32, 3, 2, 1),
            nn.BatchNorm3d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, 8)

    def forward(self, clip: Tensor) -> Tensor:
        return self.head(self.layers(clip))


class Denoiser(nn.Module):
    """One step of diffusion: a noisy picture and its time, with group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
        self.front, self.back = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 3, 3, padding=1)
        self.inner = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(2)
        )

    def forward(self, noisy: Tensor, step: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(16, device=noisy.device) / 16)
        angles = step[:, None].to(noisy.dtype) * rates
        when = self.time(torch.cat([angles.sin(), angles.cos()], -1))[..., None, None]
        x = self.front(noisy)
        for layer in self.inner:
            x = x + layer(x + when)
        return self.back(functional.silu(x))
