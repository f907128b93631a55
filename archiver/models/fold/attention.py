"""Replacement of torch's attention by plain layers, so that its projections can be quantised to int8.

The projections are a third of a transformer's weights; left in fp32, they would be most of the size of the
quantised file. `nn.MultiheadAttention` keeps them as its own parameters, which layer quantisers don't find,
and torch's encoder layers pass them to one fused operator. In the layers here they are ordinary linear
layers. The layers are for inference only, without dropout. They are thread-safe, and TorchScript, FX and
torch.export accept them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import has_hooks
from torchere.archiver.models.inputs.sizes import Tensors
from torchere.archiver.models.measure.difference import answers, difference

_MAX_DRIFT = 1e-3  # only the order of sums differs
# Errors that a model may raise if its own code reads the weights of a replaced attention layer.
_LOOKED_INTO = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    ModelRefused,
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model, and the number of its attention layers that were replaced by plain layers."""

    module: nn.Module  # the model itself if `attentions` is 0, otherwise a copy in eval mode
    attentions: int


def open_attention(module: nn.Module, example: Tensors) -> Opened:
    """Copy the model and replace `nn.MultiheadAttention` with linear layers and plain operations.

    `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` are replaced, too: they read attention's weights.
    Subclasses, layers with hooks, and attention with `add_bias_kv` or `add_zero_attn` stay unchanged. The
    whole model stays unchanged if the copy gives another output for the example, or fails because its own
    code reads the replaced weights.

    Args:
        module: eager; it is not modified.
        example: arguments of the model. Attention layers that get different tensors as query, key and value
            get three projections instead of one.
    """
    if not any(map(_opens, module.modules())):
        return Opened(module, 0)
    with torch.no_grad():
        wanted = answers(module, example)
    made: dict[nn.Module, nn.MultiheadAttention] = {}  # each new attention layer, with its original
    opened = _changed(copy.deepcopy(module).eval(), partial(_plain, made=made), {})
    try:
        with torch.no_grad(), _watched(made) as apart:
            drift = difference([(wanted, answers(opened, example))]).drift
    except _LOOKED_INTO:
        return Opened(module, 0)
    if not drift <= _MAX_DRIFT:
        return Opened(module, 0)
    split = {layer: CrossAttention(made[layer]) for layer in apart}
    return Opened(_changed(opened, lambda layer: split.get(layer, layer), {}), len(made))


def _opens(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.MultiheadAttention
        and layer.bias_k is None
        and layer.bias_v is None
        and not layer.add_zero_attn
        and not has_hooks(layer)
    )


def _changed(
    layer: nn.Module, change: Callable[[nn.Module], nn.Module], seen: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Apply `change` to the layer and all layers in it, innermost first; a shared layer stays shared."""
    if layer not in seen:
        for name, inner in layer._modules.items():
            if inner is not None:
                layer._modules[name] = _changed(inner, change, seen)
        seen[layer] = change(layer)
    return seen[layer]


def _plain(layer: nn.Module, made: dict[nn.Module, nn.MultiheadAttention]) -> nn.Module:
    """Return the plain layer that replaces one of torch's, or the layer itself; add attention to `made`."""
    if isinstance(layer, nn.MultiheadAttention) and _opens(layer):
        kind = CrossAttention if layer.in_proj_weight is None else SelfAttention
        attention = kind(layer)
        made[attention] = layer
        return attention
    if made.keys().isdisjoint(layer.modules()):
        return layer
    if type(layer) is nn.TransformerEncoder and not has_hooks(layer):
        return Encoder(layer)
    if isinstance(layer, nn.TransformerEncoder):
        layer.use_nested_tensor = False
    if type(layer) is nn.TransformerEncoderLayer and not has_hooks(layer):
        return EncoderLayer(layer)
    return layer


@contextmanager
def _watched(layers: Iterable[nn.Module]) -> Iterator[set[nn.Module]]:
    """Collect the self-attention layers that get different tensors as query, key and value in the block."""
    apart: set[nn.Module] = set()

    def look(layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        tensors = {**dict(zip(("query", "key", "value"), given, strict=False)), **named}
        if tensors["query"] is not tensors["key"] or tensors["key"] is not tensors["value"]:
            apart.add(layer)

    with ExitStack() as hooks:
        for layer in layers:
            if isinstance(layer, SelfAttention):
                hooks.callback(layer.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield apart


# The layers.


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
    """Compute the scaled dot-product attention of projected tensors.

    Args:
        query: [batch, length, width] if `batch_first`, otherwise [length, batch, width]; or [length, width].
        key: likewise, with its own length.
        value: likewise, with the length of `key`.
        heads: the number of heads; divides all widths.
        batch_first: see `query`.
        mask: added to the scores of each query and key; it broadcasts to [batch, heads, length, keys].
        is_causal: no query attends to later keys; `mask` must be None then.
        need_weights: return the weights, too; this stores the full score matrix.

    Returns:
        The result in the shape of `query`, and the weights, [batch, heads, length, keys], without the batch
        dimension if `query` has none. Without `need_weights`, the second tensor is meaningless.
    """
    length = -3 if batch_first or query.dim() == 2 else 0  # dimension of the length, with heads split off
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
    """Merge both masks of `nn.MultiheadAttention` into the single mask of `attend`.

    Args:
        attention: `attn_mask`, [length, keys] or [batch * heads, length, keys]; boolean or additive.
        padding: `key_padding_mask`, [batch, keys] or [keys]; boolean or additive.
        like: the query, for its dtype and its number of dimensions.
        heads: the number of heads.
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
    """Convert a boolean mask to an additive one, minus infinity where it is true; return others as is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def without_padding(
    states: torch.Tensor, padding: torch.Tensor | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Set the states at the padding, [batch, length], to 0 in rows with padding only at their end.

    Return the states unchanged if there is a mask, or if they have no batch dimension. A position is padding
    if its value is true or not 0.

    For a single row, `nn.TransformerEncoder` does the same by a nested tensor, which leaves the padding out.
    For a batch, it does so only if every row has its padding at the end; so the result of a row would depend
    on the other rows.
    """
    if padding is None or padding.dim() != 2 or mask is not None:
        return states
    padded = padding != 0
    at_end = (padded[:, 1:] >= padded[:, :-1]).all(1, keepdim=True)
    return states.masked_fill((padded & at_end).unsqueeze(-1), 0.0)


# FX records each of these as one node: they branch on dimensions and on optional masks, which tracing can't
# follow, and contain no layer to quantise.
for _step in (added_mask, attend, merged_masks, without_padding):
    fx.wrap(_step.__name__)


class Attention(nn.Module):
    """An equivalent of `nn.MultiheadAttention`. Subclasses implement the projections."""

    def __init__(self, made_of: nn.MultiheadAttention) -> None:
        """Take the weights of torch's layer, which must have neither `add_bias_kv` nor `add_zero_attn`."""
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = (
            made_of.embed_dim,
            made_of.num_heads,
            made_of.head_dim,
        )
        self.batch_first = made_of.batch_first
        # These values keep torch's layers from using their fused operator.
        self.in_proj_weight, self.in_proj_bias, self._qkv_same_embed_dim = None, None, False
        self.out_proj = _linear(made_of.out_proj.weight, made_of.out_proj.bias)

    def forward(  # noqa: PLR0917  # as torch's
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the same as `nn.MultiheadAttention`; its documentation has the shapes.

        Raises:
            RuntimeError: `is_causal` without `attn_mask`, as in torch.
        """
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal describes attn_mask; expected attn_mask with it")
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = merged_masks(None if causal else attn_mask, key_padding_mask, query, self.num_heads)
        q, k, v = self.projected(query, key, value)
        mixed, weights = attend(
            q,
            k,
            v,
            heads=self.num_heads,
            batch_first=self.batch_first,
            mask=mask,
            is_causal=causal,
            need_weights=need_weights,
        )
        if not need_weights:
            return self.out_proj(mixed), None
        return self.out_proj(mixed), weights.mean(-3) if average_attn_weights else weights

    def projected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the projections of query, key and value."""
        raise NotImplementedError


class SelfAttention(Attention):
    """Attention that usually gets one tensor as query, key and value: one projection is faster in int8."""

    def __init__(self, made_of: nn.MultiheadAttention) -> None:
        """Take the weights of a layer whose three projections share one weight."""
        super().__init__(made_of)
        self.in_proj = _linear(made_of.in_proj_weight, made_of.in_proj_bias)

    def projected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the projections of query, key and value; different tensors take three times the work."""
        q, k, v = self.in_proj(query).chunk(3, -1)
        if query is not key or key is not value:
            k, v = self.in_proj(key).chunk(3, -1)[1], self.in_proj(value).chunk(3, -1)[2]
        return q, k, v


class CrossAttention(Attention):
    """Attention of different tensors as query, key and value, possibly of different widths."""

    def __init__(self, made_of: nn.MultiheadAttention) -> None:
        super().__init__(made_of)
        weights = (
            (made_of.q_proj_weight, made_of.k_proj_weight, made_of.v_proj_weight)
            if made_of.in_proj_weight is None
            else made_of.in_proj_weight.chunk(3)
        )
        biases = (None, None, None) if made_of.in_proj_bias is None else made_of.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(_linear, weights, biases)

    def projected(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Attention`."""
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)


class EncoderLayer(nn.Module):
    """An equivalent of `nn.TransformerEncoderLayer` made of separate operations."""

    def __init__(self, made_of: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.self_attn: nn.Module = made_of.self_attn
        self.linear1, self.linear2 = made_of.linear1, made_of.linear2
        self.norm1, self.norm2 = made_of.norm1, made_of.norm2
        self.norm_first = made_of.norm_first
        self.activation = made_of.activation

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Compute the same as `nn.TransformerEncoderLayer`."""
        x: torch.Tensor = self.norm1(src) if self.norm_first else src
        attended: torch.Tensor = self.self_attn(
            x,
            x,
            x,
            attn_mask=src_mask,
            key_padding_mask=src_key_padding_mask,
            need_weights=False,
            is_causal=is_causal,
        )[0]
        x = src + attended
        if self.norm_first:
            return x + self.fed_forward(self.norm2(x))
        x = self.norm1(x)
        x = self.norm2(x + self.fed_forward(x))
        return x

    def fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the feed-forward block to each token: linear layer, activation, linear layer."""
        found: torch.Tensor = self.linear2(self.activation(self.linear1(x)))
        return found


class Encoder(nn.Module):
    """An equivalent of `nn.TransformerEncoder` without nested tensors."""

    def __init__(self, made_of: nn.TransformerEncoder) -> None:
        super().__init__()
        self.layers, self.norm, self.num_layers = made_of.layers, made_of.norm, made_of.num_layers
        self.leaves_out_padding = made_of.use_nested_tensor

    def forward(
        self,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        """Compute the same as `nn.TransformerEncoder`, but do not detect a causal mask: set `is_causal`."""
        x = src
        # Convert the masks once for all layers.
        looks, padding = added_mask(mask, src), added_mask(src_key_padding_mask, src)
        causal = False if is_causal is None else is_causal
        for layer in self.layers:
            x = layer(x, src_mask=looks, src_key_padding_mask=padding, is_causal=causal)
        if self.leaves_out_padding:
            x = without_padding(x, src_key_padding_mask, mask)
        return x if self.norm is None else self.norm(x)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Create a linear layer from the weight and bias; parameters are shared, other tensors are copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = _parameter(weight)
    if bias is not None:
        layer.bias = _parameter(bias)
    return layer.eval()


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach().clone())
