"""all-MiniLM-L6-v2 in plain PyTorch: BERT's layers (Devlin et al. 2018), 6 of them, 384 wide.

Its parts have the names of the published weights, so that the file of weights fits as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

LAYERS, WIDTH, HEADS, INNER = 6, 384, 12, 1536  # config.json of the package
WORDS, POSITIONS, KINDS, EPSILON = 30522, 512, 2, 1e-12


class MiniLM(nn.Module):
    """Numbers of tokens and their mask, int64 [texts, tokens], to states [texts, tokens, 384]."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(WORDS, WIDTH),
                "position_embeddings": nn.Embedding(POSITIONS, WIDTH),
                "token_type_embeddings": nn.Embedding(KINDS, WIDTH),
                "LayerNorm": nn.LayerNorm(WIDTH, EPSILON),
            }
        )
        self.embeddings.register_buffer("position_ids", torch.arange(POSITIONS)[None])
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_layer() for _ in range(LAYERS))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})  # in the file, and of no use here

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """See the class; a text has at most 512 tokens."""
        parts: Any = self.embeddings
        places = parts.position_ids[:, : ids.shape[1]]
        states: torch.Tensor = parts["word_embeddings"](ids) + parts["position_embeddings"](places)
        states = parts["LayerNorm"](states + parts["token_type_embeddings"].weight[0])
        seen = mask[:, None, None, :].bool()  # no token looks at padding
        layers: Any = self.encoder["layer"]
        for layer in layers:
            states = _attended(layer["attention"], states, seen)
            wide = functional.gelu(layer["intermediate"]["dense"](states))
            states = _added(layer["output"], wide, states)
        return states


def _layer() -> nn.ModuleDict:
    names = ("query", "key", "value")
    looking = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
    return nn.ModuleDict(
        {
            "attention": nn.ModuleDict({"self": looking, "output": _output(WIDTH)}),
            "intermediate": nn.ModuleDict({"dense": nn.Linear(WIDTH, INNER)}),
            "output": _output(INNER),
        }
    )


def _output(width: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(width, WIDTH), "LayerNorm": nn.LayerNorm(WIDTH, EPSILON)})


def _added(output: Any, inner: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    added: torch.Tensor = output["LayerNorm"](output["dense"](inner) + states)
    return added


def _attended(attention: Any, states: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    query, key, value = (
        attention["self"][name](states).unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    return _added(attention["output"], mixed.transpose(1, 2).flatten(2), states)
