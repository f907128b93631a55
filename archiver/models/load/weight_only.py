"""Layers with weights of 8 or 4 bits that compute in floating point: made here, or quantised by torchao.

Only the weights are quantised: inputs, sums and outputs stay in floating point, so rows of a batch share no
scale and no samples are needed. This saves memory traffic, which matters with few rows and large layers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.export import ExportedProgram

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.run import has_hooks
from torchere.archiver.models.steps import errors_only

GROUP = 32  # 4-bit weights of a row that share a scale and a zero, which add 1 bit to each weight
_OUTPUTS_OF_4_BITS = 16  # torch's kernel supports multiples of this number
# The number of inputs must be a multiple of it: otherwise torch's kernel reads beyond the weights, since
# `weightpack` in int8mm_kernel.cpp steps by 16 inputs with AVX-512 (8 with AVX2); servers may have either.
INPUTS_OF_8_BITS = 16
# Smaller layers stay in fp32: they are a small part of a file, and take longer to convert than to multiply.
LARGE = 2**14
BY_PROCESSOR = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
_TINY = 1e-8  # lower bound of scales, which must not be 0


# The layer classes declare no attributes, because torch.jit.script can't resolve their types from here.
class _In8Bits(nn.Module):
    """A layer with the 8-bit weights of `in_8_bits`; layers that shared a weight share its 8-bit form."""

    def __init__(self, values: nn.Buffer, scales: nn.Buffer) -> None:
        super().__init__()
        self.values = values  # int8 [rows, columns]
        self.scales = scales  # bfloat16 [rows]

    @property
    def weight(self) -> torch.Tensor:
        """The weights in fp32, for models that read them in their own code."""
        return self.values.float() * self.scales.float().unsqueeze(1)


class Int8Linear(_In8Bits):
    """A linear layer with 8-bit weights and a scale for each output; it multiplies in bfloat16."""

    def __init__(self, layer: nn.Linear, values: nn.Buffer, scales: nn.Buffer) -> None:
        super().__init__(values, scales)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = _parameter(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weights and add the bias, in the type of `x`."""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        found = torch._weight_int8pack_mm(rows, self.values, self.scales).to(x.dtype)
        found = found.reshape(list(x.shape[:-1]) + [self.out_features])  # noqa: RUF005 - torch.jit.script
        return found if self.bias is None else found + self.bias


class Int4Linear(nn.Module):
    """A linear layer with weights of 4 bits, a scale and a zero for each group of a row.

    The order of weights that torch's kernel needs depends on the processor. So the weights are stored in row
    order, and `forward` reorders them: AOTInductor does this once when it compiles, and `ServedProgram` when
    it is created.
    """

    def __init__(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None
    ) -> None:
        """Create a layer from quantised weights.

        Args:
            values: 0 ... 15 [out, in].
            scales: [in / group, out, 2].
            bias: [out].
            dtype: the dtype of the products; None: that of the inputs.
        """
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.group, self.dtype = self.in_features // len(scales), dtype
        # uint8 [out, in / 2]: two weights in a byte, the first one in the lower half
        self.values = nn.Buffer((values[:, ::2] | (values[:, 1::2] << 4)).to(torch.uint8))
        self.scales = nn.Buffer(scales.clone())  # bfloat16 or float32 [in / group, out, 2]: scales and zeros
        self.bias = _parameter(bias)

    @classmethod
    def of(cls, layer: nn.Linear) -> Int4Linear:
        """Quantise an fp32 layer for which `fits_4_bits` is true."""
        groups = layer.weight.detach().reshape(layer.out_features, -1, GROUP)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = ((high - low) / 15).clamp_min(_TINY).bfloat16().float()
        zeros = (low + 8 * scales).bfloat16().float()
        values = ((groups - zeros) / scales + 8).round().clamp(0, 15).to(torch.int32).flatten(1)
        pairs = torch.cat([scales, zeros], -1).transpose(0, 1).contiguous().bfloat16()
        return cls(values, pairs, layer.bias, torch.bfloat16)

    @property
    def weight(self) -> torch.Tensor:
        """The weights in fp32, for models that read them in their own code."""
        scales = self.scales.float().transpose(0, 1).unsqueeze(-2)
        groups = self._unpacked().reshape(self.out_features, -1, self.group)
        weight: torch.Tensor = ((groups - 8) * scales[..., 0] + scales[..., 1]).flatten(1)
        return weight

    def _unpacked(self) -> torch.Tensor:
        return torch.stack((self.values & 15, self.values >> 4), -1).flatten(1).to(torch.int32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weights and add the bias, in the type of `x`."""
        rows = x.reshape(-1, self.in_features).to(self.dtype or x.dtype)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(self._unpacked(), 1)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, self.group, self.scales)
        found: torch.Tensor = product.to(x.dtype).reshape(*x.shape[:-1], self.out_features)
        return found if self.bias is None else found + self.bias


class Int8Embedding(_In8Bits):
    """An embedding with weights of 8 bits, and a scale for each row."""

    def __init__(self, layer: nn.Embedding, values: nn.Buffer, scales: nn.Buffer) -> None:
        super().__init__(values, scales)
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim
        self.padding_idx = layer.padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look rows up, in fp32."""
        rows = nn.functional.embedding(ids, self.values)
        return rows.float() * nn.functional.embedding(ids, self.scales.unsqueeze(1)).float()


def _parameter(bias: torch.Tensor | None) -> nn.Parameter | None:
    """Copy a bias as a parameter, since models read their dtype from `next(self.parameters())`."""
    return None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)


def in_8_bits(weight: torch.Tensor) -> tuple[nn.Buffer, nn.Buffer]:
    """Return a layer's weight in 8 bits, and a scale for each row."""
    # The scale is rounded to bfloat16 first, so that the values are computed for the rounded scale.
    weight = weight.detach()
    scales = (weight.abs().amax(1) / 127).clamp_min(_TINY).bfloat16()
    values = (weight / scales.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return nn.Buffer(values), nn.Buffer(scales)


def fits_4_bits(layer: nn.Linear) -> bool:
    """Return whether torch's kernel for weights of 4 bits supports the layer's sizes."""
    return layer.in_features % GROUP == 0 and layer.out_features % _OUTPUTS_OF_4_BITS == 0


def large_layers(module: nn.Module) -> dict[str, nn.Linear | nn.Embedding]:
    """Return the fp32 linear layers and embeddings that can be quantised and are large enough, by name.

    Layers with hooks are left out, because the layers that replace them would not call the hooks.
    """
    return {
        name: layer
        for name, layer in module.named_modules()
        if _takes_8_bits(layer) and layer.weight.numel() >= LARGE and layer.weight.dtype == torch.float32
    }


def held_elsewhere(module: nn.Module, layers: Mapping[str, nn.Linear | nn.Embedding]) -> set[str]:
    """Return the names of the layers that share their weight with a module outside of `layers`.

    That module keeps the weight in fp32, so the 8-bit form would only make the file larger.
    """
    replaced = set(layers.values())
    held = {
        id(weight)
        for other in module.modules()
        if other not in replaced
        for weight in other.parameters(recurse=False)
    }
    return {name for name, layer in layers.items() if id(layer.weight) in held}


def _takes_8_bits(layer: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    if has_hooks(layer):
        return False
    if type(layer) is nn.Linear:
        return layer.in_features % INPUTS_OF_8_BITS == 0
    return type(layer) is nn.Embedding and layer.max_norm is None


def weight_only(module: nn.Module, bits: int, kept: Collection[str] = ()) -> tuple[nn.Module, str]:
    """Copy the model with the weights of its large layers in 8 or 4 bits; return it with a note.

    With 4 bits, embeddings, and linear layers whose size the kernel does not support, get weights of 8 bits.
    Layers that share a weight also share its 8-bit form. The `kept` layers stay in fp32.

    Raises:
        ModelRefused: there is no layer to quantise.
    """
    name = f"int{bits}-weight"
    made = copy.deepcopy(module).eval()
    found = {path: layer for path, layer in large_layers(made).items() if path not in kept}
    if not found:
        raise ModelRefused(
            f"{name} changes linear layers and embeddings of {LARGE:,} weights and more, without hooks "
            f"(linear layers with inputs in multiples of {INPUTS_OF_8_BITS}), and the model has none, or its "
            "own code or an fp32 layer uses their weights; leave --quantize out, or take --quantize auto"
        )
    names: dict[nn.Module, list[str]] = {}  # a layer may have several names
    for path, one in made.named_modules(remove_duplicate=False):
        names.setdefault(one, []).append(path)
    counts: Counter[str] = Counter()
    shared = functools.cache(in_8_bits)  # so that layers with the same weight share the result
    for layer in found.values():
        new: nn.Module
        if isinstance(layer, nn.Embedding):
            new = Int8Embedding(layer, *shared(layer.weight))
        elif bits == 4 and fits_4_bits(layer):
            new = Int4Linear.of(layer)
        else:
            new = Int8Linear(layer, *shared(layer.weight))
        for path in names[layer]:
            made = _replaced(made, path, new)
        counts[_NAMES[type(new)]] += 1
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return made, f"{name}: {told}; products in bfloat16, all else in fp32"


_NAMES: dict[type[nn.Module], str] = {
    Int8Linear: "linear layers in 8 bits",
    Int4Linear: "linear layers in 4 bits",
    Int8Embedding: "embeddings in 8 bits",
}


def has_4_bits(program: ExportedProgram) -> bool:
    """Return whether the program reorders 4-bit weights for the processor."""
    return any(node.target is BY_PROCESSOR for node in program.graph.nodes)


def _replaced(module: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    if not path:
        return layer
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, layer)
    return module


# Models that the user quantised with torchao: their weights are tensor subclasses made of plain tensors.
#
# torch.export keeps such classes in the program, whose file is then a pickle that needs torchao to load;
# tracing turns them into fp32. So plain tensors become the weights, and torch's operators replace torchao's.

_PACKAGES = ("torchao.quantization", "torchao.prototype.quantization.int4")  # register their tensor classes
INT4_FOR_A_PROCESSOR = "Int4OpaqueTensor"


def torchao_weights(weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the class name of each weight that is a torchao tensor, by the name of the weight."""
    return {
        name: type(value).__name__
        for name, value in weights.items()
        if type(value).__module__.partition(".")[0] == "torchao"
    }


def torchao_kinds(module: nn.Module) -> str:
    """Return the class names of torchao's weights in a module, for messages; "" if it has none."""
    if isinstance(module, torch.jit.ScriptModule):
        return ""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return ", ".join(dict.fromkeys(torchao_weights(held).values()))


def register_torchao() -> None:
    """Let torch's weights-only unpickler create torchao's tensors.

    Raises:
        ModelRefused: torchao is not installed.
    """
    with quiet_torchao():
        try:
            importlib.import_module(_PACKAGES[0])
        except ModuleNotFoundError as error:
            raise ModelRefused(
                f"the weights are tensors of torchao, and {error.name} is not installed; pip install "
                "'torchere[quantize]'"
            ) from error
        with contextlib.suppress(ImportError):  # a prototype: other versions have it elsewhere or not at all
            importlib.import_module(_PACKAGES[1])


def with_plain_weights(module: nn.Module) -> nn.Module:
    """Return a copy of the module with torchao's weights as plain tensors; if it has none, the module itself.

    Raises:
        ModelRefused: a weight is of a kind that can't be served.
    """
    if not torchao_kinds(module):
        return module
    from torch._functorch._aot_autograd.subclass_parametrization import (  # noqa: PLC0415  # seconds
        unwrap_tensor_subclass_parameters,
    )

    made = copy.deepcopy(module)
    for path, layer in list(made.named_modules()):
        weight: Any = getattr(layer, "weight", None)
        if type(weight).__name__ == INT4_FOR_A_PROCESSOR:
            made = _replaced(made, path, _of_torchao(path, layer))
    plain: nn.Module = unwrap_tensor_subclass_parameters(made)
    return plain


def _of_torchao(path: str, layer: nn.Module) -> Int4Linear:
    weight: Any = layer.weight
    if not isinstance(layer, nn.Linear) or weight.act_mapping_type or weight.act_pre_scale is not None:
        raise ModelRefused(
            f"{path}: torchao's {INT4_FOR_A_PROCESSOR} with scaled activations can't be served; take "
            "PrototypeInt4WeightOnlyConfig without them, Int8WeightOnlyConfig, or --quantize int4-weight "
            "of the model in fp32"
        )
    bias = cast("torch.Tensor | None", layer.bias)
    return Int4Linear(_unpacked(weight.qdata, tuple(weight.shape)), weight.scale_and_zero, bias, None)


def _unpacked(packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return 4-bit weights in row order, from the order that torch's kernel needs on this processor.

    To find that order, the index of each weight is packed in the same way, four bits at a time.
    """
    places = torch.arange(shape[0] * shape[1], dtype=torch.int64).reshape(shape)
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    low, high = torch.zeros(packed.numel(), dtype=torch.int64), torch.zeros(packed.numel(), dtype=torch.int64)
    for shift in range(0, int(places.numel()).bit_length(), 4):
        digits = pack(((places >> shift) & 15).to(torch.int32), 1).flatten().to(torch.int64)
        low |= (digits & 15) << shift
        high |= (digits >> 4) << shift
    found = torch.empty(places.numel(), dtype=torch.int32)
    values = packed.flatten().to(torch.int32)
    found[low], found[high] = values & 15, values >> 4
    return found.reshape(shape)


def without_torchao(program: ExportedProgram) -> ExportedProgram:
    """Return the program with torch's operators in place of torchao's, so that a server needs no torchao.

    Raises:
        ModelRefused: an operator can't be replaced.
    """
    found = _operators(program)
    if not found:
        return program
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    table: dict[Any, Any] = {
        one: functools.partial(one._op_dk, implicit)
        for one in found
        if one.has_kernel_for_dispatch_key(implicit)
    }
    with quiet_torchao():
        made: ExportedProgram = program.run_decompositions(table)
    left = _operators(made)
    if left:
        raise ModelRefused(
            f"the model needs {', '.join(sorted(map(str, left)))} of torchao, which servers do not have; "
            "take another configuration of torchao's, such as Int8WeightOnlyConfig, or --quantize of the "
            "model in fp32"
        )
    return made


def _operators(program: ExportedProgram) -> set[Any]:
    modules = [one for one in program.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    targets = {node.target for one in modules for node in one.graph.nodes if node.op == "call_function"}
    return {one for one in targets if isinstance(one, torch._ops.OpOverload) and one.namespace == "torchao"}


@contextlib.contextmanager
def quiet_torchao() -> Iterator[None]:
    """Suppress warnings, stderr and logs, such as those of torchao's import about missing GPU kernels."""
    no_stderr = contextlib.redirect_stderr(io.StringIO())
    with warnings.catch_warnings(), no_stderr, errors_only("torchao", "torch.utils._pytree"):
        warnings.simplefilter("ignore")
        yield
