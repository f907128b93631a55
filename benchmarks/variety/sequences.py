"""Small models of tables, texts, sounds, series and graphs, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, WORDS = 64, 500


class Tabular(nn.Module):
    """An MLP with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1))
        self.outer = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, features: Tensor) -> Tensor:
        return self.outer(self.inner(features)).softmax(-1)


class KeywordSpotter(nn.Module):
    """A one-dimensional network over sound, with `padding="same"`."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(1, 32, 80, 16)
        self.layers = nn.Sequential(
            *(
                layer
                for _ in range(3)
                for layer in (nn.Conv1d(32, 32, 3, padding="same"), nn.BatchNorm1d(32), nn.ReLU())
            )
        )
        self.head = nn.Linear(32, 12)

    def forward(self, waveform: Tensor) -> Tensor:
        x = functional.relu(self.front(waveform[:, None]))
        return self.head(self.layers(x).mean(-1)).log_softmax(-1)


class StatefulLstm(nn.Module):
    """One step of a stream: the client sends the state, and gets the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 96, num_layers=2, batch_first=True)
        self.head = nn.Linear(96, 8)

    def forward(self, frames: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, (h, c) = self.lstm(frames, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        return self.head(found), h.transpose(0, 1), c.transpose(0, 1)


class Forecaster(nn.Module):
    """A GRU over a series that is normalised by its own mean and deviation, and 24 steps ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 96, batch_first=True)
        self.head = nn.Linear(96, 24 * 4)

    def forward(self, history: Tensor) -> Tensor:
        mean, deviation = history.mean(1, keepdim=True), history.std(1, keepdim=True) + 1e-5
        found = self.head(self.gru((history - mean) / deviation)[0][:, -1]).unflatten(-1, (24, 4))
        return found * deviation + mean


class Causal(nn.Module):
    """A TCN: dilated convolutions that see the past only."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(8, 48, 1)
        self.layers = nn.ModuleList(nn.Conv1d(48, 48, 3, dilation=2**at) for at in range(4))
        self.head = nn.Conv1d(48, 2, 1)

    def forward(self, series: Tensor) -> Tensor:
        x = self.front(series)
        for at, layer in enumerate(self.layers):
            x = x + functional.relu(layer(functional.pad(x, (2 * 2**at, 0))))
        return self.head(x)


class Dlrm(nn.Module):
    """Recommendation: numbers and categories, and the products of all their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum") for _ in range(6))
        self.top = nn.Sequential(nn.Linear(16 + 21, 128), nn.ReLU(), nn.Linear(128, 1))
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(7, 7, -1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [x, *(table(sparse[:, at : at + 1]) for at, table in enumerate(self.tables))]
        every = torch.stack(rows, 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).sigmoid()


class Graph(nn.Module):
    """Two layers of message passing over a list of edges; a request is one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2 * 16, WIDTH), nn.Linear(2 * WIDTH, 5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = nodes
        for layer in (self.one, self.two):
            received = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            count = torch.zeros_like(x[:, :1]).index_add(0, edges[1], torch.ones_like(x[edges[0], :1]))
            x = layer(torch.cat([x, received / count.clamp(min=1)], 1))
            x = x if layer is self.two else x.relu()
        return x


class Translator(nn.Module):
    """An encoder and a decoder of torch's own layers, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(128, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 128, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def _rows(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        return self.head(self.transformer(self._rows(source), self._rows(target), tgt_mask=later))


class Separator(nn.Module):
    """Splits a sound into two, as in Conv-TasNet: encoder, masks, decoder. Lengths are multiples of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, WIDTH, 16, 8, bias=False)
        self.norm = nn.GroupNorm(1, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(WIDTH, 96, 1),
                nn.PReLU(),
                nn.Conv1d(96, 96, 3, padding=2**at, dilation=2**at, groups=96),
                nn.PReLU(),
                nn.Conv1d(96, WIDTH, 1),
            )
            for at in range(3)
        )
        self.masks = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.decoder = nn.ConvTranspose1d(WIDTH, 1, 16, 8, bias=False)

    def forward(self, mixture: Tensor) -> Tensor:
        rows = self.encoder(mixture[:, None]).relu()
        x = self.norm(rows)
        for block in self.blocks:
            x = x + block(x)
        masks = self.masks(x).sigmoid().unflatten(1, (2, WIDTH))
        return self.decoder((masks * rows[:, None]).flatten(0, 1)).view(mixture.shape[0], 2, -1)


class Attention(nn.Module):
    """Self-attention written out, with one projection for queries, keys and values."""

    def __init__(self, width: int = WIDTH, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.outer(found.transpose(1, 2).flatten(2))


class Conformer(nn.Module):
    """A block for speech: half feed-forward, attention, convolution with a gate, half feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = (
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.SiLU(), nn.Linear(256, WIDTH))
            for _ in range(2)
        )
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.wide = nn.Sequential(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(1))
        self.deep = nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 15, padding=7, groups=WIDTH), nn.BatchNorm1d(WIDTH), nn.SiLU()
        )
        self.narrow, self.last = nn.Conv1d(WIDTH, WIDTH, 1), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames + self.front(frames) / 2
        x = x + self.attention(self.norm(x))
        x = x + self.narrow(self.deep(self.wide(x.transpose(1, 2)))).transpose(1, 2)
        return self.head(self.last(x + self.back(x) / 2))


class Masked(nn.Module):
    """A classifier of texts of torch's own layers, with a mask for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, 0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.encoder(self.words(ids), src_key_padding_mask=mask == 0)
        shown = mask[..., None].to(x.dtype)
        return self.head((x * shown).sum(1) / shown.sum(1).clamp(min=1))


class CausalBlock(nn.Module):
    """A block of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(causal=True)
        self.forward_layers = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.one(x))
        return x + self.forward_layers(self.two(x))


class LanguageModel(nn.Module):
    """A decoder whose head shares its weights with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(128, WIDTH))
        self.blocks = nn.ModuleList(CausalBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.places, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """A mixture of experts: the two best of four, by their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros_like(self.gate(x)).scatter(-1, which, best / best.sum(-1, keepdim=True))
        return (torch.stack([one(x) for one in self.experts], -1) * weights[..., None, :]).sum(-1)


class Adaptive(nn.Module):
    """Runs its layer until the values are small: a loop that a trace can't keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        nn.init.orthogonal_(self.layer.weight)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = 0
        while bool(x.abs().mean() > 0.3) and steps < 12:
            x = self.layer(x) * 0.7
            steps += 1
        return self.head(x)
