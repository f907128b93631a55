"""Gives each rank its own part of the weights: the model is made without weights, then the rank reads slices.

So no rank ever holds the whole model. On a CPU, a tensor that a rank keeps whole stays memory-mapped, and the
ranks share its pages. Slices are copied, because a view would keep the pages around the slice in memory.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import init
from torch.nn.modules.module import register_module_parameter_registration_hook

from torchere.archiver.models.load.safetensors import read_safetensors
from torchere.archiver.models.spread.tensor import Part

# A smaller tensor is copied: the kernel maps up to a megabyte around each page that is read.
_WORTH_MAPPING_BYTES = 1 << 20


class Weights(Protocol):
    """Weights by name, in a file or in memory."""

    def shapes(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and the dtype of each tensor."""

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor, which may be a mapping of the file."""

    def part(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """Return a copy of a part; the rest of the tensor does not stay in memory."""


class StateDict:
    """A state dict in memory, or memory-mapped from a file.

    Args:
        read: returns the state dict. With `may_be_mapped` it is called twice: tensors that stay whole come
            from the first mapping, and parts are copied from the second, whose pages are given back.
        may_be_mapped: whether `read` may map a file.
    """

    def __init__(self, read: Callable[[], Mapping[str, torch.Tensor]], *, may_be_mapped: bool) -> None:
        self._kept = read()
        self._read_from = read() if may_be_mapped else self._kept
        self._files = _mapped_files() if may_be_mapped else []

    def shapes(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """See `Weights`."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._kept.items()}

    def whole(self, name: str) -> torch.Tensor:
        """See `Weights`."""
        return self._kept[name].detach()

    def part(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """See `Weights`."""
        tensor = self._read_from[name].detach()
        part = tensor[where].clone(memory_format=torch.contiguous_format)
        _give_back(tensor, self._files)
        return part


_MAPS = Path("/proc/self/maps")


def _mapped_files() -> list[range]:
    """Return the address ranges of the files mapped by this process; none on a system without /proc."""
    try:
        lines = [line.split() for line in _MAPS.read_text().splitlines()]
    except OSError:
        return []
    places = [line[0].partition("-") for line in lines if line[4] != "0"]  # the inode; 0: no file
    return [range(int(first, 16), int(end, 16)) for first, _, end in places]


def _give_back(tensor: torch.Tensor, files: Sequence[range]) -> None:
    """Give back the pages of a tensor if they map a file; they must be unmodified.

    Pages of anonymous memory stay: they would lose their content.
    """
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    last = tensor.data_ptr() + tensor.nbytes - 1
    if tensor.nbytes and any(first in file and last in file for file in files):
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last + 1 - first), mmap.MADV_DONTNEED)


class Safetensors:
    """A safetensors file; a part of a tensor is read by safetensors' own slices.

    Raises:
        ModelRefused: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapped = read_safetensors(path)

    def shapes(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """See `Weights`."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._mapped.items()}

    def whole(self, name: str) -> torch.Tensor:
        """See `Weights`."""
        return self._mapped[name]

    def part(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """See `Weights`."""
        with safe_open(self._path, framework="pt") as file:
            part: torch.Tensor = file.get_slice(name)[where]
            return part.clone(memory_format=torch.contiguous_format)


@contextmanager
def without_weights() -> Iterator[None]:
    """Put the parameters of modules made in the block on the device `meta`; their buffers are real.

    A parameter is allocated by its class and dropped at once. The functions of `torch.nn.init` do nothing in
    the block: on `meta` they would make torch import 70 MB of its compiler. Not thread-safe.
    """

    def drop(_module: torch.nn.Module, _name: str, parameter: Any) -> Any:
        return None if parameter is None or parameter.is_meta else _placeholder(parameter)

    hook = register_module_parameter_registration_hook(drop)
    functions = {name: value for name, value in vars(init).items() if name.endswith("_") and callable(value)}
    names = [name for name in functions if not name.startswith("_")]
    try:
        for name in names:
            setattr(init, name, _as_it_is)
        yield
    finally:
        hook.remove()
        for name in names:
            setattr(init, name, functions[name])


def _as_it_is(tensor: torch.Tensor, *_arguments: Any, **_options: Any) -> torch.Tensor:
    return tensor


def drop_weights(model: torch.nn.Module) -> StateDict:
    """Move the parameters of a model to the device `meta`, and return its weights as they were."""
    state = {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}
    placeholders = {id(parameter): _placeholder(parameter) for parameter in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = placeholders[id(parameter)]
    return StateDict(lambda: state, may_be_mapped=False)


def _placeholder(parameter: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)


def fill(model: torch.nn.Module, weights: Weights, parts: Mapping[str, Part], device: torch.device) -> None:
    """Replace the placeholders of a model by this rank's parts of the weights, and move its buffers.

    Args:
        model: its parameters are on the device `meta`.
        weights: one tensor for each parameter; a buffer that they lack stays unchanged.
        parts: the part of each weight that is split, by name.
        device: where this rank computes.
    """
    shapes = weights.shapes()
    made: dict[int, torch.nn.Parameter] = {}  # weights that layers share stay shared
    for prefix, module in model.named_modules():
        for name, value in module._parameters.items():
            if value is not None:
                if id(value) not in made:
                    full = f"{prefix}.{name}" if prefix else name
                    part = parts.get(full)
                    where = (
                        part.slices(value.shape) if part else tuple(slice(0, size) for size in value.shape)
                    )
                    is_copied = part is not None or (value.dim() > 0 and value.nbytes < _WORTH_MAPPING_BYTES)
                    tensor = weights.part(full, where) if is_copied else weights.whole(full)
                    made[id(value)] = torch.nn.Parameter(tensor.to(device), requires_grad=False)
                module._parameters[name] = made[id(value)]
        for name, value in module._buffers.items():
            if value is not None:
                full = f"{prefix}.{name}" if prefix else name
                is_there = full in shapes and name not in module._non_persistent_buffers_set
                module._buffers[name] = (weights.whole(full) if is_there else value).to(device)


def fill_from_shards(
    model: torch.nn.Module, folder: Path, parts: Mapping[str, Part], mesh: DeviceMesh, device: torch.device
) -> None:
    """Do as `fill` with the weights of a `torch.distributed.checkpoint`; only this rank's parts are read.

    Args:
        model: see `fill`.
        folder: the checkpoint.
        parts: see `fill`.
        mesh: the ranks that share each layer.
        device: see `fill`.

    Raises:
        ModelRefused: the checkpoint is damaged, or is that of another model.
    """
    fill(model, _Unread(model), parts, device)
    # For a DTensor, the reader finds out which part of the file to read. The import is here, because it takes
    # half a second, and only ranks with such a folder need it.
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415

    from torchere.archiver.models.load.distributed import read_parts  # noqa: PLC0415

    state = {
        name: DTensor.from_local(tensor, mesh, [Shard(parts[name].dimension)], run_check=False)
        if name in parts
        else tensor
        for name, tensor in model.state_dict().items()
    }
    read_parts(state, folder)


class _Unread:
    """Weights that are not read yet: empty tensors of the right size, which a reader fills later."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._placeholders = dict(model.named_parameters(remove_duplicate=False))

    def shapes(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        return {}

    def whole(self, name: str) -> torch.Tensor:
        placeholder = self._placeholders[name]
        return torch.empty(placeholder.shape, dtype=placeholder.dtype)

    def part(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        sizes = [place.stop - place.start for place in where]
        return torch.empty(sizes, dtype=self._placeholders[name].dtype)


def held_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the weights that this rank holds."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # transformers' parts are distributed tensors.
    return sum(
        tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes
        for tensor in tensors.values()
    )
