"""The parts of attention that have no weights: pure functions of tensors, which TorchScript compiles, too."""

from __future__ import annotations

import math

import torch
from torch.nn import functional


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    heads: int,
    batch_first: bool,
    mask: torch.Tensor | None,
    is_causal: bool,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention of projected tensors.

    Args:
        query: [batch, length, width] if `batch_first`, else [length, batch, width]; or [length, width].
        key: likewise, of its own length.
        value: as long as `key`.
        heads: divides all widths.
        batch_first: see `query`.
        mask: added to the scores of a query and a key; it broadcasts to [batch, heads, length, keys].
        is_causal: no query looks at later keys; there must be no other mask then.
        need_weights: give the weights, too, for which scores have to be written down.

    Returns:
        What `query` is like, and the weights, [batch, heads, length, keys]; no batch if `query` has none.
        Without `need_weights` the second is of no use.
    """
    length = -3 if batch_first or query.dim() == 2 else 0  # where it is once heads have a dimension
    q = torch.unflatten(query, -1, (heads, -1)).movedim(length, -2)
    k = torch.unflatten(key, -1, (heads, -1)).movedim(length, -2)
    v = torch.unflatten(value, -1, (heads, -1)).movedim(length, -2)
    weights = q
    if need_weights:
        scores = torch.matmul(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1))
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        mixed = torch.matmul(weights, v)
    else:
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    return mixed.movedim(-2, length).flatten(-2), weights


def merged_masks(
    attention: torch.Tensor | None, padding: torch.Tensor | None, like: torch.Tensor, heads: int
) -> torch.Tensor | None:
    """Both masks of `nn.MultiheadAttention` as the one of `attend`.

    Args:
        attention: [length, keys] or [batch * heads, length, keys]; see `added_mask`.
        padding: [batch, keys] or [keys]; likewise.
        like: the query.
        heads: of the attention.
    """
    merged = added_mask(attention, like)
    if merged is not None and merged.dim() == 3 and like.dim() == 3:
        merged = torch.unflatten(merged, 0, (-1, heads))
    keys = added_mask(padding, like)
    if keys is None:
        return merged
    keys = keys.unsqueeze(-2).unsqueeze(-2)
    return keys if merged is None else merged + keys


def added_mask(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """A mask as numbers that are added: minus infinity where it is true, or its own if it has numbers."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def without_padding(
    states: torch.Tensor, padding: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Zeros at the padding, [batch, length], of rows that have it at their end; unless there is a mask, too.

    That is what `nn.TransformerEncoder` gives for a row alone, when it leaves padding out by a nested tensor.
    Of a batch it asks this for all rows together, so that a row's answer would depend on the others'. Padding
    is what is true, or not 0; that of states without a batch is not left out.
    """
    if padding is None or padding.dim() != 2 or mask is not None:
        return states
    padded = padding != 0
    at_end = (padded[:, 1:] >= padded[:, :-1]).all(1, keepdim=True)
    return states.masked_fill((padded & at_end).unsqueeze(-1), 0.0)
