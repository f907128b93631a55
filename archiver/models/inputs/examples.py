"""Reads examples and samples: JSON, torch.save files, NumPy arrays, pictures; recognised by their bytes."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from torchere.archiver.container.entries import open_regular
from torchere.archiver.errors import ArchiveError, ModelRefused
from torchere.archiver.models.inputs.run import DATATYPES, Run, run_on
from torchere.archiver.models.inputs.sizes import FreeSize, Tensors, signed_sizes
from torchere.archiver.models.steps import Say, line_of, not_ending, step
from torchere.archiver.request import BuildOptions, Prepare
from torchere.archiver.signature import ANY, Signature, SignatureError, TensorSpec, read_signature

MAX_EXAMPLE_BYTES = 2**30
_MAX_PIXELS = 100_000_000
_PICTURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF")
Item = TypeVar("Item")
TORCH_TYPES = {name: dtype for dtype, name in DATATYPES.items()}


@dataclass(frozen=True)
class Example:
    """Tensors for the inputs of a model; `names` has the input name of each, if the file gives names.

    `typed`: the file sets the datatypes; they are not the defaults of JSON or NumPy. `unprepared`: the file
    is a picture, and the handler prepares no pictures.
    """

    tensors: Tensors
    names: tuple[str, ...] | None = None
    typed: bool = False
    unprepared: bool = False

    def ordered(self, wanted: Sequence[str]) -> Tensors:
        """Return the tensors in the order of the model's inputs.

        Raises:
            ModelRefused: the model has no input of a given name, or an input before a given one is missing.
        """
        if self.names is None:
            return self.tensors
        if unknown := [name for name in self.names if name not in wanted]:
            raise ModelRefused(
                f"the example has the input {unknown[0]!r}; the model has {', '.join(wanted)}: use these "
                "names (a forward that takes a dict of tensors can't be run: let it take each alone)"
            )
        given = dict(zip(self.names, self.tensors, strict=True))
        present = [name for name in wanted if name in given]
        if present != list(wanted[: len(present)]):
            raise ModelRefused(
                f"the example has {', '.join(present)}, and not the inputs before: {', '.join(wanted)}; "
                "give these, too"
            )
        return tuple(given[name] for name in present)


def read_example(path: Path, *, doubles: bool = False, prepare: Prepare | None = None) -> Example:
    """Read an example from one file.

    - JSON: a request of the Open Inference Protocol, an object of names and nested lists, or one nested list
      (numbers with a decimal point become FP32, others INT64).
    - `.pt`: a tensor, or a tuple, list or dict of tensors; read with the weights-only unpickler.
    - `.npy`, `.npz`: arrays; FP64, which is NumPy's default, becomes FP32.
    - Any other file is the body of a request, which `prepare` turns into the model's inputs. Where the
      handler prepares nothing, a picture becomes FP32 [1, 3, height, width] with values from 0 to 1.

    Args:
        path: the file.
        doubles: the model computes in FP64: FP64 arrays keep their datatype, and JSON becomes FP64, too.
        prepare: turns the body of a request into inputs, as the archive's handler does.

    Raises:
        ModelRefused: the file has another format, is damaged, or holds no numbers or no rows.
        OSError: the file can't be read.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_EXAMPLE_BYTES + 1)
    except ArchiveError as error:
        raise ModelRefused(f"{path}: {error.reason}; expected a file with an example") from error
    if len(data) > MAX_EXAMPLE_BYTES:
        raise ModelRefused(f"{path}: more than {MAX_EXAMPLE_BYTES} bytes; one example is enough")
    with not_ending(f"{path}: preparing it by the handler"):
        try:
            example = _read(data, prepare)
        # Broad, because the readers of five formats raise different errors for a damaged file.
        except Exception as error:
            raise ModelRefused(f"{path}: no example that can be read: {line_of(error)}") from error
    if not example.tensors:
        raise ModelRefused(f"{path}: it holds no tensor; expected one for each input of the model")
    if all(tensor.shape[:1] == (0,) for tensor in example.tensors):
        sizes = ", ".join(str([*tensor.shape]) for tensor in example.tensors)
        raise ModelRefused(
            f"{path}: it has no rows ({sizes}), so that nothing can be tried; expected one or more"
        )
    return example if doubles or example.typed else replace(example, tensors=_as_floats(example.tensors))


def _read(data: bytes, prepare: Prepare | None) -> Example:
    if data.startswith(b"\x93NUMPY"):
        return Example((_from_numpy(array_of(data)),))
    if data.startswith(b"PK"):
        return _zipped(data)
    if data.lstrip()[:1] in (b"{", b"["):
        return _from_json(json.loads(data))
    prepared = None if prepare is None else prepare(data)
    if prepared is not None:
        return Example(tuple(prepared))
    if data.startswith(_PICTURES):
        return Example((_picture(data),), unprepared=True)
    raise ValueError("expected JSON, a .pt, a .npy, a .npz or a picture")


def _zipped(data: bytes) -> Example:
    """Read a `.npz` file or a torch.save file; both are zips."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        if sum(info.file_size for info in package.infolist()) > MAX_EXAMPLE_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_EXAMPLE_BYTES} bytes")
        if any(name.endswith(_SUFFIX) for name in package.namelist()):  # a .npz
            arrays = arrays_of(package)
            return Example(tuple(_from_numpy(array) for array in arrays.values()), tuple(arrays))
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if isinstance(found, torch.Tensor):
        return Example((_tensor(found),), typed=True)
    if isinstance(found, dict):
        return Example(tuple(_tensor(value) for value in found.values()), tuple(map(str, found)), typed=True)
    return Example(tuple(_tensor(value) for value in found), typed=True)


def _picture(data: bytes) -> torch.Tensor:
    from PIL import Image  # noqa: PLC0415  # only pictures need it

    from torchere.archiver.models.inputs.pictures import to_rgb  # noqa: PLC0415  # it imports PIL

    with Image.open(io.BytesIO(data)) as picture:
        if picture.width * picture.height > _MAX_PIXELS:
            raise ValueError(f"a picture of {picture.width} x {picture.height}; expected a smaller one")
        pixels = np.asarray(to_rgb(picture), dtype=np.float32) / 255
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]


def _from_json(found: Any) -> Example:
    if isinstance(found, list):
        return Example((_nested(found),))
    if isinstance(found.get("inputs"), list) and found["inputs"] and isinstance(found["inputs"][0], dict):
        items = found["inputs"]
        names = tuple(str(item["name"]) for item in items)
        return Example(tuple(_from_protocol(item) for item in items), names, typed=True)
    return Example(tuple(_nested(value) for value in found.values()), tuple(found))


def _from_protocol(item: dict[str, Any]) -> torch.Tensor:
    datatype = item["datatype"]
    if datatype not in TORCH_TYPES:
        raise ValueError(f"the datatype {ascii(datatype)[:40]} of {ascii(item['name'])[:40]}")
    return torch.tensor(item["data"], dtype=TORCH_TYPES[datatype]).reshape(item["shape"])


def _nested(value: Any) -> torch.Tensor:
    return _from_numpy(np.asarray(value))


def _from_numpy(array: Any) -> torch.Tensor:
    check_numbers(array.dtype)
    # Also converts arrays of the other byte order, which torch lacks.
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), "C"))


def _as_floats(tensors: Tensors) -> Tensors:
    return tuple(tensor.float() if tensor.dtype is torch.float64 else tensor for tensor in tensors)


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"a {type(value).__name__} where a tensor was expected")
    if value.numel() * value.element_size() > MAX_EXAMPLE_BYTES:  # one stored number can fill any shape
        raise ValueError(f"a tensor of {tuple(value.shape)}; expected at most {MAX_EXAMPLE_BYTES} bytes")
    return value.detach()


_FREE = 2  # the size of free dimensions in examples; not 1, which torch.export takes for a constant


def files_of(path: Path) -> list[Path]:
    """Return `[path]` for a file; for a folder, its files sorted by name, without hidden ones.

    Raises:
        ModelRefused: the folder holds no file.
        OSError: the folder can't be listed.
    """
    if not path.is_dir():
        return [path]
    files = sorted(item for item in path.iterdir() if item.is_file() and not item.name.startswith("."))
    if not files:
        raise ModelRefused(
            f"{path} holds no files; expected inputs, one per file: .json, .pt, .npy, .npz or pictures"
        )
    return files


def spread(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return at most `most` of the items, evenly spaced."""
    count = len(items)
    return items if count <= most else [items[index * count // most] for index in range(most)]


def read_samples(
    files: Sequence[Path], names: Sequence[str], like: Tensors, prepare: Prepare | None = None
) -> list[Tensors]:
    """Read the examples of several files.

    Args:
        files: see `read_example` for their formats.
        names: the names of the model's inputs.
        like: an example; samples must have as many inputs, with the same datatypes and numbers of dimensions.
        prepare: see `read_example`.

    Raises:
        ModelRefused: a file can't be used, or differs from the example.
        OSError: a file can't be read.
    """
    doubles = any(tensor.dtype is torch.float64 for tensor in like)
    samples = []
    for file in files:
        sample = read_example(file, doubles=doubles, prepare=prepare).ordered(names)
        if _form(sample) != _form(like):
            raise ModelRefused(
                f"{file}: the sample has {_form(sample)}; expected the example's {_form(like)} "
                "(datatype and number of dimensions of each input)"
            )
        samples.append(sample)
    return samples


@dataclass(frozen=True)
class Samples:
    """Inputs for calibration and verification; empty without `--samples`."""

    tensors: list[Tensors] = field(default_factory=list)
    files: Sequence[Path] = ()  # one for each of `tensors`

    @contextmanager
    def named(self, run: Run) -> Iterator[None]:
        """Name the file of the first sample that the model fails on, if a library's error ends the block.

        The samples are run only after an error, because running all of them once more may take minutes.

        Raises:
            ModelRefused: the model fails on a sample.
        """
        try:
            yield
        # Broad, because models and quantisers are third-party code and may raise any error.
        except Exception as error:
            if not isinstance(error, ModelRefused) or error.__cause__ is not None:
                for file, sample in zip(self.files, self.tensors, strict=True):
                    try:
                        run_on(run, sample)
                    except ModelRefused as refusal:
                        raise ModelRefused(f"{file}: {refusal}") from refusal
            raise


def chosen_samples(options: BuildOptions, names: Sequence[str], like: Tensors, say: Say) -> Samples:
    """Read the files of `--samples`, at most `--max-samples` of them; see `read_samples`."""
    if options.samples is None:
        return Samples()
    found = files_of(options.samples)
    files = spread(found, options.max_samples)
    with step(say, f"reading {len(files)} samples"):
        samples = read_samples(files, names, like, options.prepare)
    if len(files) < len(found):
        say(f"samples: {len(files)} of {len(found)} files, evenly spaced; --max-samples sets how many")
    return Samples(samples, files)


def example_of(signature: Signature, asked: Sequence[FreeSize] = ()) -> Example:
    """Make an example for a signature's inputs: random floats 0 to 1, whole numbers 0, free sizes 2.

    A free size that can't be 2 is the next larger size that its limits allow, or else the smallest one. A
    size in `asked`, the sizes that the user lets vary, is also within the range given there.

    Raises:
        ModelRefused: an input has a datatype that no tensor has, or the inputs take too much memory.
    """
    random = torch.Generator().manual_seed(0)
    shapes = [list(spec.shape) for spec in signature.inputs]
    for free in signed_sizes(signature):
        size = free.smallest(_FREE)
        for named in asked:
            if not set(named.places).isdisjoint(free.places):
                size = named.smallest(size)
        for place, dimension in free.places:
            shapes[place][dimension] = size
    dtypes = [_torch_type(spec) for spec in signature.inputs]
    # A size of 0 counts as 1: torch computes the strides from the other sizes, and they can overflow.
    counts = [math.prod(size or 1 for size in shape) for shape in shapes]
    needed = sum(count * dtype.itemsize for count, dtype in zip(counts, dtypes, strict=True))
    if needed > MAX_EXAMPLE_BYTES:
        raise ModelRefused(
            f"an example made from the signature would take {needed} bytes, at most {MAX_EXAMPLE_BYTES}; "
            "give --example with inputs"
        )
    tensors = [_made_up(dtype, shape, random) for dtype, shape in zip(dtypes, shapes, strict=True)]
    return Example(tuple(tensors), tuple(spec.name for spec in signature.inputs))


def signature_at(path: Path) -> Signature | None:
    """Return the signature in `path`, a `signature.json`; None without such a file.

    Raises:
        ModelRefused: the file holds no signature.
    """
    try:
        return read_signature(path.parent)
    except SignatureError as error:
        raise ModelRefused(f"{path.parent}: {error}") from error


def _torch_type(spec: TensorSpec) -> torch.dtype:
    if spec.datatype not in TORCH_TYPES:
        raise ModelRefused(f"{spec.name!r} is {spec.datatype}; give --example with inputs")
    return TORCH_TYPES[spec.datatype]


def _made_up(dtype: torch.dtype, shape: Sequence[int], random: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=random).to(dtype)
    return torch.zeros(shape, dtype=dtype)


def check_against(example: Tensors, signature: Signature) -> None:
    """Raise ModelRefused when the example does not fit the signature that came with the model."""
    specs = signature.inputs
    if len(example) != len(specs):
        raise ModelRefused(
            f"the example has {len(example)} inputs; the model has {len(specs)}: give one tensor for each"
        )
    for tensor, spec in zip(example, specs, strict=True):
        shape = tuple(tensor.shape)
        if len(shape) != len(spec.shape) or not _fits(shape, spec):
            as_batch = (1, *shape)
            is_row = len(as_batch) == len(spec.shape) and _fits(as_batch, spec)
            advice = f"give it a batch dimension: {as_batch}" if is_row else "give one of that shape"
            raise ModelRefused(
                f"the example of {spec.name!r} is {shape}; the model takes {spec.shape}, in which -1 is any "
                f"size: {advice}"
            )


def _fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    return all(wanted in (ANY, size) for size, wanted in zip(shape, spec.shape, strict=True))


def _form(sample: Tensors) -> str:
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} in {tensor.dim()}" for tensor in sample)


_SUFFIX = ".npy"
_KINDS = "biuf"


def array_of(data: bytes) -> Any:
    """Return the array of a `.npy` file.

    Raises:
        ValueError: the array holds no numbers, or the file has fewer or more bytes than its header says.
        Exception: any error of NumPy for a damaged header.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"a .npy file of format {version}; expected 1.0 or 2.0")
    shape, fortran_order, dtype = readers[version](file)
    check_numbers(dtype)
    start = file.tell()
    needed = math.prod(map(int, shape)) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != len(data) - start:
        raise ValueError(f"a .npy file of {needed} bytes by its header, and of {len(data) - start} in truth")
    # A copy, because the model may write into its inputs, and `data` is immutable.
    flat = np.frombuffer(data, dtype=dtype, offset=start).copy()
    return flat.reshape(shape, order="F" if fortran_order else "C")


def check_numbers(dtype: Any) -> None:
    """Raise ValueError unless the dtype is numeric or boolean."""
    if dtype.kind not in _KINDS:
        raise ValueError(f"an array of {dtype}; expected numbers")


def arrays_of(package: zipfile.ZipFile) -> dict[str, Any]:
    """Return the arrays of a `.npz` file by name; raise as `array_of` does."""
    found = {}
    for info in package.infolist():
        if not info.filename.endswith(_SUFFIX):
            raise ValueError(f"{ascii(info.filename)[:60]} in it is no .npy")
        found[info.filename.removesuffix(_SUFFIX)] = array_of(package.read(info))
    return found
