"""Loads TorchScript, for packing and for serving, and optimises it for the processor it is loaded on.

The setting `torchscript.optimize_for_inference` asks for it. oneDNN multiplies fastest by weights in a memory
order of its own. In TorchScript an `nn.Linear` reorders its weights in every call, and writes its output to
memory, where the activation after it reads it again; here the weights are reordered once, and the activation
is computed with the product. A convolution converts its input to oneDNN's layout, and its output back;
`torch.jit.optimize_for_inference` keeps tensors between convolutions in that layout.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
import re
import sys
import threading
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch.jit._script import wrap_cpp_module

from torchere.archiver.container.zip import DAMAGED, Malformed, read_local
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.freezing import CONVOLUTIONS, frozen, loses_writes
from torchere.archiver.scan.torchscript import check_script

logger = logging.getLogger(__name__)

# Guards `torch.backends.quantized.engine`, which is process-wide and decides how packed int8 weights are
# rebuilt while a module loads. Every load takes the lock, so that none sees the engine of another load.
_ENGINE_LOCK = threading.RLock()


def supported() -> tuple[str, ...]:
    """Return the int8 engines of this build of torch."""
    return tuple(name for name in torch.backends.quantized.supported_engines if name != "none")


@contextlib.contextmanager
def using(engine: str | None) -> Iterator[None]:
    """Set the process-wide int8 engine while weights are packed or loaded; None keeps the current engine.

    Thread-safe: one block at a time.

    Raises:
        ValueError: this build of torch has no such engine.
    """
    if engine is not None and engine not in torch.backends.quantized.supported_engines:
        raise ValueError(
            f"torchscript.quantized_engine is {engine!r}, which this build of torch does not have; "
            f"expected one of {', '.join(torch.backends.quantized.supported_engines)}"
        )
    with _ENGINE_LOCK:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = before if engine is None else engine
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


def load_script(
    source: str | io.BytesIO,
    *,
    check: bool,
    engine: str | None = None,
    device: torch.device | str = "cpu",
    map_file: str | None = None,
) -> torch.jit.ScriptModule:
    """Load a module saved with `torch.jit.save`. Thread-safe; loads in one process run one after the other.

    Recurrent layers of the loaded module check the batch of their initial state; see `check_states`.

    Args:
        source: the path of the file, or its bytes.
        check: refuse code that could read or write files, which TorchScript may run while it is loaded;
            False for files that packing wrote, and for files that the user trusts.
        engine: the int8 engine that packed weights are rebuilt for; None: the engine of the process.
        device: the device of the parameters.
        map_file: a file equal to `source`, whose pages become the weights on the CPU if its layout allows
            that; it must not be truncated while the module lives. None copies the weights.

    Raises:
        UnsafeModel: the code could read or write files, or the file is damaged.
        ValueError: this build of torch has no such engine.
        OSError: the file can't be read.
        RuntimeError: the file is not TorchScript, the engine does not support its weights, or it needs
            a package of operators that can't be imported.
    """
    if check:
        _check(source)
    with using(engine):
        loaded = _loaded_with_operators(source, device, map_file)
        check_states(loaded)
        return loaded


def _loaded(
    source: str | io.BytesIO, device: torch.device | str, map_file: str | None
) -> torch.jit.ScriptModule:
    mapped = load_mapped(map_file) if map_file is not None else None
    if mapped is not None:
        return mapped
    if isinstance(source, io.BytesIO):
        source.seek(0)
    loaded: torch.jit.ScriptModule = torch.jit.load(source, map_location=device)  # type: ignore[no-untyped-call]
    return loaded


# Texts of torch's errors about files that need a package, as those of a scripted detector and of TensorRT.
_PACKAGES = {
    "Unknown builtin op: torchvision::": "torchvision",
    "Unknown type name '__torch__.torch.classes.tensorrt.": "torch_tensorrt",
}


def _loaded_with_operators(
    source: str | io.BytesIO, device: torch.device | str, map_file: str | None
) -> torch.jit.ScriptModule:
    """Load the file, and import the packages with the operators that it needs, each once.

    TorchServe's handlers import these packages for every model, which takes a second.
    """
    left = dict(_PACKAGES)
    while True:
        try:
            return _loaded(source, device, map_file)
        except RuntimeError as error:
            text = next((text for text in left if text in str(error)), None)
            if text is None:
                raise
            _import_operators(left.pop(text), error)


def _import_operators(package: str, error: RuntimeError) -> None:
    try:
        importlib.import_module(package)
    except Exception as err:  # its operators may be for another build of torch, which raises many kinds
        raise RuntimeError(f"it needs {package}, which can't be imported: {err}") from error


def _check(source: str | io.BytesIO) -> None:
    if isinstance(source, io.BytesIO):
        check_script(source, len(source.getbuffer()))
        source.seek(0)
        return
    with open(source, "rb") as file:
        check_script(file, os.fstat(file.fileno()).st_size)


def saved(module: torch.jit.ScriptModule) -> bytes:
    """Return the module as the bytes of a TorchScript file."""
    buffer = io.BytesIO()
    save_script(module, buffer)
    return buffer.getvalue()


def save_script(module: torch.jit.ScriptModule, file: str | BinaryIO) -> None:
    """Write TorchScript to a path or a stream.

    Raises:
        ModelRefused: the module calls a Python function, such as that of a `torch.autograd.Function`.
    """
    try:
        torch.jit.save(module, file)
    except RuntimeError as error:
        call = _PYTHON_CALL.search(str(error))
        if call is None:
            raise
        raise ModelRefused(
            f"the model calls {call[1]}, a torch.autograd.Function or another function of Python, which "
            "TorchScript can't save; take --format export or aoti, or write it with operations of torch"
        ) from error


_PYTHON_CALL = re.compile(r"Could not export Python function call '?\^?([^'.\s]+)")


# Mapping: the module's tensors use the mapped pages of its file.
#
# `torch.jit.load` copies every weight to the heap with the GIL held: a third of a second for 400 MB, once
# for each process. Mapped pages are read at first use and shared by all processes that map the file, and a
# write copies only the page written to.
#
# torch itself can map weights with `torch.load(mmap=True)` only. This code uses the internal function
# by which `torch.package` loads TorchScript, because it accepts existing storages. It expects other names
# in the zip, so the rest of the file (code and two small pickles) is repacked in memory under those names.
# The functions are private to torch: `torch.jit.load` loads files with an unusual layout, and every file
# if the torch version lacks the functions.

# Names in torch/csrc/jit/serialization/import.cpp, the deserializer's constructor for packages.
_PACKAGE_CODE = ".data/ts_code/"
_PACKAGE_PICKLES = ".data/ts_code/0/"
_SCRIPT_ID = "0"
_PICKLES = ("data.pkl", "constants.pkl")
_TENSOR_FOLDERS = ("data/", "constants/")
_ALIGNMENT = 64  # bytes; torch aligns tensors to it in memory and in files


def load_mapped(path: str) -> torch.jit.ScriptModule | None:
    """Load a TorchScript file onto the CPU with mapped weights; None if its layout does not allow that.

    The file must not be truncated while the module lives.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            # The entries by name, without the zip's top folder.
            records = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            weights = _weights(records, file)
            if weights is None or not _is_ordinary(archive, records):
                return None
            small = _repacked(archive, records)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)  # the whole file
    except (*DAMAGED, Malformed, AttributeError):  # not a zip, or a system without fadvise
        return None
    try:
        # False: a private mapping, so that written pages are copied.
        whole: Any = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
        return _imported(small, whole, weights)
    except (RuntimeError, TypeError, AttributeError) as err:  # the caller's torch.jit.load loads it or raises
        logger.info("%s is not mapped: %s", path, err)
        return None


def _imported(small: io.BytesIO, file: Any, weights: dict[str, tuple[int, int]]) -> torch.jit.ScriptModule:
    storages = torch._C.DeserializationStorageContext()
    for key, (offset, size) in weights.items():
        view = torch.empty(0, dtype=torch.uint8).set_(file[offset : offset + size])
        storages.add_storage(key, view)
    module = torch._C._import_ir_module_from_package(
        torch._C.CompilationUnit(),
        torch._C.PyTorchFileReader(small),
        storages,
        torch.device("cpu"),
        _SCRIPT_ID,
    )
    wrapped: torch.jit.ScriptModule = wrap_cpp_module(module)  # type: ignore[no-untyped-call]
    return wrapped


def _is_ordinary(archive: zipfile.ZipFile, records: Mapping[str, zipfile.ZipInfo]) -> bool:
    """Whether the file has the layout that torch has written since 1.6, and this machine's byte order."""
    order = archive.read(records["byteorder"]).decode() if "byteorder" in records else "little"
    return (
        all(pickle in records for pickle in _PICKLES)
        and not any(record.startswith(_PACKAGE_CODE) for record in records)
        and order == sys.byteorder
    )


def _weights(records: Mapping[str, zipfile.ZipInfo], file: BinaryIO) -> dict[str, tuple[int, int]] | None:
    """Return the (offset, size) in bytes of each tensor by its key, or None if they can't be mapped.

    Keys start at 0 both in `data/` and in `constants/`, but the loader of `torch.package` knows only one
    folder, so a file with tensors in both is not mapped.
    """
    found: dict[str, tuple[int, int]] = {}
    folders = set()
    for record, entry in records.items():
        if not record.startswith(_TENSOR_FOLDERS):
            continue
        folder, _, key = record.partition("/")
        folders.add(folder)
        offset = read_local(file, entry.header_offset).data_offset
        if len(folders) > 1 or entry.compress_type != zipfile.ZIP_STORED or offset % _ALIGNMENT:
            return None
        found[key] = (offset, entry.file_size)
    return found or None


def _repacked(archive: zipfile.ZipFile, records: Mapping[str, zipfile.ZipInfo]) -> io.BytesIO:
    """Return a zip of everything but the weights, under the names of `torch.package`."""
    small = io.BytesIO()
    with zipfile.ZipFile(small, "w") as out:
        for record, entry in records.items():
            if record.startswith((*_TENSOR_FOLDERS, "extra/")):
                continue
            folder = _PACKAGE_PICKLES if record in _PICKLES else ""
            folder = _PACKAGE_CODE if record.startswith("code/") else folder
            out.writestr(f"model/{folder}{record}", archive.read(entry))
    small.seek(0)
    return small


# Checks of initial states.
#
# `nn.LSTM`, `nn.GRU` and `nn.RNN` compare the batch of their initial state with that of their input in
# Python, and a trace drops these checks. The operators themselves do not check, so with a state for another
# batch they read beyond the state's end. `check_states` adds the check to the graphs of traced layers.

_RECURRENT = tuple(
    f"aten::{kind}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu", "quantized_lstm", "quantized_gru")
)
_SAID = "the initial state of a recurrent layer has a batch of "
_CHECK = f"""
def check(states: List[Tensor], rows: Tensor, is_packed: bool, batch_first: bool):
    batch = int(rows[0]) if is_packed else rows.size(0 if batch_first else 1)
    for state in states:
        if state.size(1) != batch:
            raise RuntimeError("{_SAID}" + str(state.size(1)) + ", and its input one of " + str(batch) +
                "; where it is a constant, make it from the input, as x.new_zeros(layers, batch, width)")
"""


def check_states(module: torch.jit.ScriptModule) -> None:
    """Add a check of the initial state to each recurrent layer, in place; the check raises torch.jit.Error.

    Call it before the module first runs: later runs use the code of the first one. Checks that the module
    already has are not added again.
    """
    for part in module.modules():
        code: Any = getattr(part, "_c", None)
        for name in code._method_names() if code is not None else ():
            graph = code._get_method(name).graph
            nodes = [node for kind in _RECURRENT for node in graph.findAllNodes(kind, True)]
            if nodes and _SAID not in str(graph):
                for node in nodes:
                    _check_state(graph, node)


def _check_state(graph: Any, node: Any) -> None:
    inputs = list(node.inputs())
    is_packed = "batch_sizes" in node.schema()  # rows of different lengths: (data, batch_sizes, state, ...)
    state, rows = (inputs[2], inputs[1]) if is_packed else (inputs[1], inputs[0])
    with graph.insert_point_guard(node):
        if not isinstance(state.type(), torch._C.ListType):
            state = _inserted(graph, "prim::ListConstruct", [state]).output()
            state.setType(torch._C.ListType(torch._C.TensorType.get()))
        batch_first = graph.insertConstant(True) if is_packed else inputs[8]
        given = [state, rows, graph.insertConstant(is_packed), batch_first]
        graph.insertGraph(_compiled(_CHECK).graph, given)


@functools.cache
def _compiled(source: str) -> Any:
    return torch.jit.CompilationUnit(source).check


# Optimisation.

_LINEAR = "aten::linear"
# oneDNN's names of activations, by operator (torch's native/mkldnn/Linear.cpp).
_ACTIVATIONS = {"aten::relu": "relu", "aten::relu_": "relu", "aten::gelu": "gelu", "aten::silu": "swish"}
_ROWS = 32  # the batch size for which the order is chosen; orders for 1 to 1024 were equally fast


def has_convolutions(module: torch.jit.ScriptModule) -> bool:
    """Return whether the module has convolutions."""
    return _has(module, *CONVOLUTIONS)


def has_linear_layers(module: torch.jit.ScriptModule) -> bool:
    """Return whether the module has linear layers."""
    return _has(module, _LINEAR)


def _has(module: torch.jit.ScriptModule, *kinds: str) -> bool:
    graph: Any = module.inlined_graph
    return any(graph.findAllNodes(kind, True) for kind in kinds)


def optimized(module: torch.jit.ScriptModule, most_packed_bytes: int | None = None) -> torch.jit.ScriptModule:
    """Return the module optimised for this processor; its results differ only in rounding and NaN.

    NaN becomes 0 in a ReLU that is computed with the layer before it, as in torch's own convolutions. The
    weights of linear layers and convolutions are copied, and those of the file are released. The result can't
    be saved. The given module may be changed and must not be used again. As thread-safe as the module.

    Args:
        module: on the CPU, in eval mode; only its `forward` remains.
        most_packed_bytes: limit on the copied weights of linear layers, in bytes; None: all are copied.

    Raises:
        RuntimeError: this module, or this build of torch, does not allow it.
    """
    made = frozen(module)
    try:
        _pack_linear_layers(made.graph, most_packed_bytes)
    except (AttributeError, TypeError) as err:  # torch does not promise this interface
        raise RuntimeError(f"this build of torch has other linear layers of oneDNN: {err}") from err
    if not has_convolutions(made):
        return made
    if loses_writes(made.graph):
        raise RuntimeError("torch would lose its writes to tensors, as by y[:, 0] = 0")
    fast: torch.jit.ScriptModule = torch.jit.optimize_for_inference(made)
    return fast


def _pack_linear_layers(graph: Any, most_bytes: int | None) -> None:
    left = float("inf") if most_bytes is None else most_bytes
    aliases = graph.alias_db()
    # Collect all layers before replacing any: torch's alias information describes the unchanged graph.
    layers = [(node, _weight(node, aliases)) for node in graph.findAllNodes(_LINEAR, True)]
    packed: dict[tuple[object, ...], torch.Tensor] = {}  # by weight: a layer used twice is packed once
    for node, weight in layers:
        if weight is None:
            continue
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in packed and weight.nbytes <= left:
            left -= weight.nbytes
            packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        if key in packed:
            _check_features(graph, node, weight.shape[1])
            _pack(graph, node, packed[key])
    torch._C._jit_pass_dce(graph)  # removes the original weights, now unused


_FEATURES = """
def check(rows: Tensor, features: int):
    if rows.numel() == 0 and rows.size(-1) != features:
        raise RuntimeError("a linear layer takes rows of " + str(features) + " numbers, and got " +
            str(rows.size(-1)))
"""


def _check_features(graph: Any, node: Any, features: int) -> None:
    """Check the width of rows that are a model input, because oneDNN accepts any width in an empty batch.

    The rows that other layers return always have the right width.
    """
    rows = next(iter(node.inputs()))
    if rows.node().kind() == "prim::Param":
        with graph.insert_point_guard(node):
            graph.insertGraph(_compiled(_FEATURES).graph, [rows, graph.insertConstant(features)])


def _weight(node: Any, aliases: Any) -> torch.Tensor | None:
    """Return the layer's weights if nothing writes to them and oneDNN supports them and the bias, or None.

    `aten::linear` supports more: empty weights, a bias that is broadcast or not contiguous. oneDNN would fail
    or, with a bias that is one number or not contiguous, compute a wrong result.
    """
    _, weight_of, bias_of, *others = node.inputs()
    weight, bias = _constant(weight_of), _constant(bias_of)
    if others or weight is None or weight.dim() != 2 or not weight.numel() or aliases.has_writers(weight_of):
        return None
    if bias is None:
        return weight if str(bias_of.type()) == "NoneType" else None
    return weight if bias.shape == weight.shape[:1] and bias.is_contiguous() else None


def _constant(value: Any) -> torch.Tensor | None:
    """Return the value if it is a constant of the graph, a float32 tensor on the CPU; otherwise None."""
    found = value.toIValue() if value.node().kind() == "prim::Constant" else None
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
        return None
    return found if found.dtype is torch.float32 and found.device.type == "cpu" else None


def _pack(graph: Any, node: Any, weight: torch.Tensor) -> None:
    """Replace a node, and an activation that is the only reader of its output, by oneDNN's layer."""
    rows, _, bias = node.inputs()
    activation = _activation(node)
    options = list(activation.inputs())[1:] if activation else []  # gelu has one: the name of its formula
    with graph.insert_point_guard(node):  # otherwise nodes would be inserted beside a destroyed one
        packed = _inserted(graph, "prim::Constant")
        packed.t_("value", weight)
        scalars = _inserted(graph, "prim::ListConstruct")  # parameters of the activation
        scalars.output().setType(torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
        name = graph.insertConstant(_ACTIVATIONS[activation.kind()] if activation else "none")
        formula = graph.insertConstant(options[0].toIValue() if options else None)
        arguments = [rows, packed.output(), bias, name, scalars.output(), formula]
        layer = _inserted(graph, "mkldnn::_linear_pointwise", arguments)
    for replaced in filter(None, (activation, node)):
        replaced.output().replaceAllUsesWith(layer.output())
        replaced.destroy()


def _activation(node: Any) -> Any:
    """Return the activation that is the only reader of a layer's output; None if oneDNN can't include it."""
    users = [use.user for use in node.output().uses()]
    if len(users) != 1 or users[0].kind() not in _ACTIVATIONS:
        return None
    options = list(users[0].inputs())[1:]
    return users[0] if all(option.node().kind() == "prim::Constant" for option in options) else None


def _inserted(graph: Any, kind: str, inputs: list[Any] | None = None) -> Any:
    return graph.insertNode(graph.create(kind, inputs or [], 1))
