"""`--format export`: an exported program, which records its dynamic dimensions."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.nn.modules import transformer
from torch.utils import _pytree as pytree

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.buffers import (
    refuse_lost_state,
    unchanged_attributes,
    unchanged_buffers,
)
from torchere.archiver.models.inputs.run import seeded
from torchere.archiver.models.inputs.sizes import LARGEST, FreeSize, Tensors, identifier, resized
from torchere.archiver.models.load.exported_program import unguarded_module
from torchere.archiver.models.load.module import traceable_lengths
from torchere.archiver.models.load.weight_only import with_plain_weights, without_torchao
from torchere.archiver.scan import UnsafeModel
from torchere.archiver.scan.exported_program import check_program


def to_program(module: torch.nn.Module, example: Tensors, sizes: Sequence[FreeSize]) -> ExportedProgram:
    """Export the module.

    Args:
        module: in eval mode; TorchScript is converted.
        example: example inputs; every dimension that is not in `sizes` is fixed to its size here.
        sizes: the dynamic dimensions and their ranges.

    Raises:
        ModelRefused: the module keeps state in attributes that are not buffers.
        Exception: any error of torch.export.
    """
    refuse_attributes(module, example)
    for free in sizes:
        # Export treats a size of 1 as a constant, and likewise a size of one `multiple`.
        if free.size_in(example) == free.multiple and free.high > free.multiple:
            example = resized(example, free, 2 * free.multiple)
    if isinstance(module, torch.jit.ScriptModule):
        module = _from_torchscript(module, example)
    module = with_plain_weights(module)
    shapes = by_parameter(module, _shapes(example, sizes))
    with torch.no_grad(), unchanged_attributes(module), exportable(module):
        program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
        program = without_torchao(program)
    _take_classes_out(program)
    return program


def refuse_attributes(module: torch.nn.Module, example: Tensors) -> None:
    """Raise ModelRefused for an eager module that keeps state in attributes; exported programs can't do so.

    Call it for the user's own module, because a graph made from it has the values as constants.
    """
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        return
    with torch.no_grad(), unchanged_buffers(module):
        seeded(module, example)  # a cache that the first run fills is not state
        buffers = {name for name, _ in module.named_buffers()}
        refuse_lost_state(module, example, "an exported program", keeps=buffers)


@contextmanager
def exportable(module: torch.nn.Module) -> Iterator[None]:
    """Let torch.export accept code in the block that it would refuse or specialise; outputs stay the same.

    Three cases: a batch size that the code reads with `len`; the length of a GRU or an LSTM, which
    torch.export would unroll; and the check of a mask's values in `nn.Transformer`, which only chooses a
    faster kernel. Not thread-safe.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # torch's loops use deprecated functions of torch
        stack.enter_context(traceable_lengths(module))
        stack.enter_context(_whole_recurrent_layers())
        layers: Any = transformer
        stack.callback(setattr, layers, "_detect_is_causal_mask", layers._detect_is_causal_mask)
        layers._detect_is_causal_mask = lambda _mask, is_causal=None, _size=None: bool(is_causal)
        yield


@contextmanager
def _whole_recurrent_layers() -> Iterator[None]:
    """Register torch's loops for recurrent layers, if it has them, so that their lengths are not unrolled."""
    patches: Any = None
    with contextlib.suppress(ImportError):  # torch 2.10 has no such module
        from torch.export import _patches as patches  # noqa: PLC0415
    found = [getattr(patches, f"register_{kind}_while_loop_decomposition", None) for kind in ("lstm", "gru")]
    layers = (torch.ops.aten.lstm.input, torch.ops.aten.gru.input)
    with contextlib.ExitStack() as stack:
        for register, layer in zip(found, layers, strict=True):
            if register is not None:
                layer._dispatch_cache.clear()  # otherwise torch keeps the implementation that it chose before
                stack.callback(layer._dispatch_cache.clear)
                stack.enter_context(register())
        yield


def free_sizes(program: ExportedProgram) -> list[FreeSize]:
    """Return the program's dynamic dimensions: the symbols in its input shapes, with their ranges.

    Sizes that depend on each other, as `s0` and `s0 + 1`, are left out: a `FreeSize` changes by itself.
    """
    places: dict[Any, list[tuple[int, int]]] = {}
    wanted = list(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in wanted:
            for at, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    places.setdefault(size.node.expr, []).append((wanted.index(node.name), at))
    uses = Counter(symbol for size in places for symbol in size.free_symbols)
    found = []
    for size, where in places.items():
        if any(uses[symbol] > 1 for symbol in size.free_symbols):
            continue
        multiple, symbol = size.as_coeff_Mul()  # `32*s0` is a multiple of 32
        bounds = program.range_constraints.get(symbol)
        if bounds is not None:
            low, high = max(int(bounds.lower), 1), int(min(bounds.upper, LARGEST // int(multiple)))
            step = int(multiple)
            found.append(FreeSize(str(symbol), tuple(where), low * step, high * step, step))
    return found


def save_program(program: ExportedProgram, path: Path) -> None:
    """Save the program without its example inputs, which would be written as a pickle.

    Raises:
        ModelRefused: the saved file has content that servers do not load.
    """
    program.example_inputs = None
    _forget_origins(program)
    torch.export.save(program, path)
    try:
        with path.open("rb") as file:
            check_program(file, path.stat().st_size)
    except UnsafeModel as error:
        raise ModelRefused(
            f"torch.export has written a file that servers do not load: {error}; "
            "change that in the model, or use --format torchscript"
        ) from error


def _forget_origins(program: ExportedProgram) -> None:
    """Delete the origin graph of each node, because its memory address differs between runs."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.pop("from_node", None)


def _take_classes_out(program: ExportedProgram) -> None:
    """Replace tuple subclasses in the outputs, such as named tuples, with plain tuples, as TorchScript does.

    The server can't import a model's own tuple classes, and torch.export refuses to save them.
    """
    signature: Any = program.module_call_graph[0].signature  # of the whole program
    leaves = list(range(signature.out_spec.num_leaves))
    signature.out_spec = pytree.tree_structure(_plain(pytree.tree_unflatten(leaves, signature.out_spec)))


def _plain(result: Any) -> Any:
    if isinstance(result, Mapping):
        return {name: _plain(item) for name, item in result.items()}
    return tuple(map(_plain, result)) if isinstance(result, (tuple, list)) else result


def by_parameter(module: torch.nn.Module, shapes: Sequence[dict[int, Any]]) -> tuple[Any, ...]:
    """Return `dynamic_shapes` for torch.export, by parameter; the inputs in `*inputs` form one tuple."""
    return tuple(inspect.signature(module.forward).bind(*shapes).arguments.values())


def hide_from(user: fx.Node, node: fx.Node) -> None:
    """Let `user` read an alias of the result of `node`, so that graph passes do not find the layer."""
    with user.graph.inserting_before(user):
        alias = user.graph.call_function(torch.ops.aten.alias.default, (node,))
    alias.meta = {"val": node.meta["val"]}  # without the layer's module, by which torchao finds the layer
    user.replace_input_with(node, alias)


def _shapes(example: Tensors, sizes: Sequence[FreeSize]) -> list[dict[int, Any]]:
    found: list[dict[int, Any]] = [{} for _ in example]
    for free in sizes:
        if free.low == free.high:
            continue
        dimension = _dimension(free)
        for index, at in free.places:
            found[index][at] = dimension
    return found


def _dimension(free: FreeSize) -> Any:
    name = identifier(free.name, free.places)
    if free.multiple == 1:
        return Dim(name, min=free.low, max=free.high)
    low, high = -(-free.low // free.multiple), free.high // free.multiple
    return free.multiple * Dim(f"{name}_k", min=low, max=high)


def _from_torchscript(module: torch.jit.ScriptModule, example: Tensors) -> torch.nn.Module:
    # torch's own converter, which the error of torch.export for TorchScript recommends.
    from torch._export.converter import TS2EPConverter  # noqa: PLC0415  # seconds

    return unguarded_module(TS2EPConverter(module, example).convert())
