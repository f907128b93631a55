"""A transformer of six layers for `ranks.py`: 170 MB in float32, with a plan for tensor parallelism."""

from typing import ClassVar

import torch
from torch.nn import functional

WIDTH, HEADS, LAYERS, WORDS, CLASSES = 768, 12, 6, 1000, 16


class Layers(torch.nn.Module):
    """Classifies sequences of numbers of words. The layer is inside: a model file has one class."""

    class Layer(torch.nn.Module):
        """Attention and a feed-forward network; the number of heads follows from the projections' width."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
            self.query, self.key, self.value, self.joined = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return the sequence after this layer."""
            normal = self.first(x)
            heads = [
                part(normal).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
                for part in (self.query, self.key, self.value)
            ]
            seen = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            x = x + self.joined(seen)
            return x + self.down(functional.gelu(self.up(self.second(x))))

    tp_plan: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("layers.*.query", "layers.*.key", "layers.*.value", "layers.*.up"), "colwise"),
        **dict.fromkeys(("layers.*.joined", "layers.*.down"), "rowwise"),
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a row of classes for each sequence."""
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))
