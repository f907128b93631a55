"""Read the directory of a `.pt2` package, predict whether it holds the GIL, and extract its library.

Needs no torch.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchere.archiver.container.zip import DAMAGED, DEFLATED, STORED, read_directory
from torchere.archiver.request import BUILD_NAME

# Layout: torch/export/pt2_archive/constants.py. Every name is prefixed with the package's own folder.
_COMPILED_FOLDER = "/data/aotinductor/model/"  # "model" is the name that aoti_compile_and_package gives
_WEIGHTS_FOLDER = "/data/weights/"
_WEIGHTS = "/weights_config.json"  # this file names, for each weight of the code, its file in that folder
_PROGRAMS = ("/models/model.json", "serialized_exported_program.json")
_SELF_CONTAINED = (".so", ".cpp", "_metadata.json", "_compile_flags.json", "_linker_flags.json")
# Lines of the generated source: torch/_inductor/codegen/cpp_wrapper_cpu.py. Dimensions and sizes are numbers.
_LEAST_TWO = re.compile(rb"_size\[\d+\] < 2\b")
_INPUT = re.compile(rb"ConstantHandle (\w+) = ConstantHandle\(input_handles\[(\d+)\]\);")
_DTYPE = re.compile(rb"int32_t (\w+)_expected_dtype = aoti_torch_dtype_(\w+)\(\);")
_EQUAL = re.compile(rb"if \((\d+) != (\w+)_(size|stride)\[(\d+)\]\)")
_BOUND = re.compile(rb"if \((\w+)_size\[(\d+)\] ([<>]) (\d+)\)")
# In sources of newer torch: the sizes of an input, and its strides.
_SIZES = re.compile(rb"assert_size_stride\((\w+), \{([^{}]*)\}, \{([^{}]*)\}")
_SIZE = re.compile(rb"\d+L|(?:\(?(-?\d+)L\)? \+ )?(?:(\d+)L\*)?(s\d+)")  # matches 8L, s77 and 1L + 2L*s77
_OF_CPP = re.compile(rb"(?<=\d)L\b|static_cast<int64_t>")  # the parts of a stride that are not Python
# Matches a library that has constants but does not hold them. The arguments of the call are the numbers of
# inputs, outputs and constants, two others, and whether the library holds the constants.
_NONE_INSIDE = re.compile(
    rb"AOTInductorModelBase\(\s*\d+,\s*\d+,\s*[1-9]\d*,\s*device_str,\s*std::move\(cubin_dir\),\s*false\)"
)
_COPY_BYTES = 1 << 20
# Limits for entries unpacked into memory. The compiler's notes take less than 1 KiB; the source of a large
# model has some MiB.
_MAX_METADATA_BYTES = 1 << 20
_MAX_SOURCE_BYTES = 64 << 20
# Python's zip reader makes an object of every entry in the directory, even if the end record counts fewer.
# A weight in a separate file takes some 100 bytes of the directory.
_MAX_DIRECTORY_BYTES = 4 << 20
_MAX_BUILD_BYTES = 1 << 16  # of the build record; the archiver writes less than 1 KiB


@dataclass(frozen=True, slots=True)
class Package:
    """One `.pt2` file.

    `library` is the zip entry with the machine code, if there is one and it needs nothing else of the
    package: no weights in separate files, no operators outside of torch. `metadata` holds the compiler's
    notes (torch 2.7 on): AOTI_DEVICE_KEY, AOTI_CPU_ISA, AOTI_MACHINE, ... With `weights_apart`, each weight
    of the code is in a file of its own, written by torch.save.
    """

    path: str
    is_program: bool  # an exported program, which torch interprets, and no compiled code
    library: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    weights_apart: bool = False

    @property
    def device(self) -> str:
        """The kind of device the code was compiled for; "unknown" in old packages, which may be for any."""
        return self.metadata.get("AOTI_DEVICE_KEY", "unknown")


def read_package(path: str) -> Package:
    """Read the directory of a package.

    Raises:
        RuntimeError: it is not a zip file, it is damaged, or its directory is too long.
    """
    try:
        with open(path, "rb") as source:
            directory = read_directory(source, os.fstat(source.fileno()).st_size)
            if directory.end - directory.offset > _MAX_DIRECTORY_BYTES:
                raise ValueError(f"its directory is longer than {_MAX_DIRECTORY_BYTES} bytes")
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
            compiled = [name for name in names if _COMPILED_FOLDER in name]
            if not compiled:
                return Package(path, is_program=any(name.endswith(_PROGRAMS) for name in names))
            libraries = [name for name in compiled if name.endswith(".so")]
            whole = all(name.endswith(_SELF_CONTAINED) for name in compiled)
            beside = any(_WEIGHTS_FOLDER in name for name in names)
            only = libraries[0] if len(libraries) == 1 and whole and not beside else None
            apart = any(name.endswith(_WEIGHTS) for name in compiled)
            return Package(path, False, only, _metadata(file, compiled), apart)
    except (*DAMAGED, ValueError) as err:
        raise RuntimeError(
            f"{path} is not a .pt2 package ({err}); expected a file of "
            "torch._inductor.aoti_compile_and_package or torch.export.save"
        ) from err


def _metadata(file: zipfile.ZipFile, names: list[str]) -> dict[str, str]:
    for name in names:
        if name.endswith("wrapper_metadata.json"):
            found = json.loads(_read(file, name, _MAX_METADATA_BYTES) or b"{}")
            return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
    return {}


def _checks_and_takes_one(source: bytes) -> bool:
    return any(kind.search(source) for kind in (_DTYPE, _EQUAL, _BOUND)) and not _LEAST_TWO.search(source)


def lacks_weights(package: Package) -> bool:
    """Return whether the code needs weights that its package lacks, so that it would read address 0.

    The result is False for a package with files beside the code, because those may hold the weights.

    Raises:
        RuntimeError: the package is damaged.
    """
    if package.library is None:
        return False
    return any(source is not None and _NONE_INSIDE.search(source) for source in _sources(package))


@dataclass(frozen=True, slots=True)
class LinearSize:
    """A size that is computed from a free size, as `2*b + 1` is from `b`, or that free size itself."""

    symbol: str
    factor: int = 1
    offset: int = 0

    def where(self, value: int) -> int:
        """Return this size, computed from a value of the free size."""
        return self.factor * value + self.offset


@dataclass(slots=True)
class InputRule:
    """Conditions that the code of a package assumes to hold for one input. Keys are dimensions."""

    dtype: str = ""  # torch's name: "float32"
    least: dict[int, int] = field(default_factory=dict)
    most: dict[int, int] = field(default_factory=dict)
    strides: dict[int, int] = field(default_factory=dict)
    # Sources of older torch have neither of these two.
    sizes: dict[int, LinearSize] = field(default_factory=dict)
    free_strides: dict[int, ast.expr] = field(default_factory=dict)  # see `stride_of`

    @property
    def dimensions(self) -> int:
        """How many dimensions the input has, as torch by default writes a lower bound for each free size."""
        return max((*self.least, *self.most, *self.strides, *self.sizes), default=-1) + 1


def read_rules(package: Package) -> list[InputRule] | None:
    """Return the conditions on each input that the source of a package states; an empty list without them.

    They are those that the code itself would check, except that a free dimension may be 1, which the checks
    that torch generates by default refuse. None if the code's own checks accept 1, too.

    Raises:
        RuntimeError: the package is damaged.
    """
    taking_one = [source is not None and _checks_and_takes_one(source) for source in _sources(package)]
    if taking_one and all(taking_one):
        return None
    return next(filter(None, map(_rules, filter(None, _sources(package)))), [])


def _rules(source: bytes) -> list[InputRule]:
    places = {name: int(index) for name, index in _INPUT.findall(source)}
    rules = {name: InputRule() for name in sorted(places, key=places.__getitem__)}
    for name, dtype in _DTYPE.findall(source):
        if name in rules:
            rules[name].dtype = dtype.decode()
    for number, name, kind, dimension in _EQUAL.findall(source):
        if name in rules and kind == b"stride":
            rules[name].strides[int(dimension)] = int(number)
        elif name in rules:
            rules[name].least[int(dimension)] = rules[name].most[int(dimension)] = int(number)
    _read_sizes(source, rules)
    for name, dimension, sign, number in _BOUND.findall(source):
        if name in rules and sign == b">":
            rules[name].most[int(dimension)] = int(number)
        elif name in rules:
            size = rules[name].sizes.get(int(dimension), LinearSize(""))
            least = size.where(1) if int(number) == size.where(2) else int(number)
            rules[name].least[int(dimension)] = least
    complete = sorted(places.values()) == list(range(len(places))) and all(r.dtype for r in rules.values())
    return list(rules.values()) if complete else []


def _read_sizes(source: bytes, rules: dict[bytes, InputRule]) -> None:
    for name, listed, strides in _SIZES.findall(source):
        if name in rules:
            rules[name].free_strides = _free_strides(strides)
        for dimension, size in enumerate(listed.split(b", ")):
            form = _SIZE.fullmatch(size)
            if form is None:  # a part of a function's arguments, which shift all later places
                break
            offset, factor, symbol = form.groups()
            if name in rules and symbol:
                linear = LinearSize(symbol.decode(), int(factor or 1), int(offset or 0))
                rules[name].sizes[dimension] = linear


def _free_strides(listed: bytes) -> dict[int, ast.expr]:
    found: dict[int, ast.expr] = {}
    for dimension, stride in enumerate(listed.split(b", ")):
        try:
            formula = ast.parse(_OF_CPP.sub(b"", stride), mode="eval").body
        except SyntaxError:  # a part of a function's arguments, as in `_read_sizes`
            break
        if not isinstance(formula, ast.Constant):
            found[dimension] = formula
    return found


def stride_of(formula: ast.expr, sizes: Mapping[str, int]) -> int:
    """Return the stride that a formula of free sizes, such as `s7*(1 + 2*s8)`, gives.

    Raises:
        LookupError: it has a size without a value, or another operation.
    """
    match formula:
        case ast.BinOp(left, ast.Add(), right):
            return stride_of(left, sizes) + stride_of(right, sizes)
        case ast.BinOp(left, ast.Mult(), right):
            return stride_of(left, sizes) * stride_of(right, sizes)
        case ast.UnaryOp(ast.USub(), operand):
            return -stride_of(operand, sizes)
        case ast.Constant(int(number)):
            return number
        case ast.Name(name):
            return sizes[name]
    raise LookupError(type(formula).__name__)


def _sources(package: Package) -> Iterator[bytes | None]:
    """Yield the source files of a package's code, or None for a file that is too long."""
    try:
        with zipfile.ZipFile(package.path) as file:
            for name in file.namelist():
                if _COMPILED_FOLDER in name and name.endswith("wrapper.cpp"):
                    yield _read(file, name, _MAX_SOURCE_BYTES)
    except (*DAMAGED, ValueError) as err:
        raise RuntimeError(f"{package.path} is damaged: {err}") from err


def _read(file: zipfile.ZipFile, name: str, limit_bytes: int) -> bytes | None:
    """Return an entry's content; None if it may be longer than the limit."""
    entry = file.getinfo(name)
    # `ZipExtFile.read` keeps to the given size while it inflates, but not with other compression methods.
    if entry.file_size > limit_bytes or entry.compress_type not in (STORED, DEFLATED):
        return None
    with file.open(entry) as source:
        # Without this limit, `read` would inflate the whole of an entry that states too small a size.
        return source.read(limit_bytes)


def extracted_library(package: Package, folder: Path) -> Path:
    """Return the library of a package as a file in `folder`; extract it only if it is missing.

    Several processes may call this for the same library at the same time. The file is named by its content,
    so a second executor maps the same pages as the first.

    Raises:
        OSError: the folder can't be written.
        RuntimeError: the package is damaged.
    """
    assert package.library is not None  # see `fits_c_abi`
    with zipfile.ZipFile(package.path) as file:
        entry = file.getinfo(package.library)
        target = folder / f"{entry.CRC:08x}-{entry.file_size}.so"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as out, file.open(entry) as source:
                shutil.copyfileobj(source, out, _COPY_BYTES)
            os.replace(part, target)
        except DAMAGED as err:
            Path(part).unlink()
            raise RuntimeError(f"{package.path} is damaged: {err}") from err
        except BaseException:  # also on cancellation
            Path(part).unlink(missing_ok=True)
            raise
    return target


# CPU flags that code compiled for each instruction set requires (torch/_inductor/cpu_vec_isa.py).
_X86_FLAGS = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512dq", "avx512vl", "avx512bw", "fma"}),
    "avx512_vnni": frozenset({"avx512f", "avx512dq", "avx512vl", "avx512bw", "fma", "avx512_vnni"}),
    "amx": frozenset({"avx512f", "amx_tile", "amx_bf16", "amx_int8"}),
}
_SAME_SET = {"avx512_amx": "amx", "amx_tile": "amx"}


@dataclass(frozen=True, slots=True)
class Build:
    """Build record of an archive's compiled model; a field is None when it is unknown."""

    torch: str | None = None  # version of the torch that compiled it, without the part after `+`
    isa: str | None = None  # instruction set, lower case
    machine: str | None = None  # as platform.machine() returns it
    fallback: str | None = None  # file of the same model as an exported program
    weights_for: str | None = None  # torch's name for the instruction set that the weights are ordered for


def read_build(model_dir: str, metadata: Mapping[str, str]) -> Build:
    """Return the build record of an archive, filled up from the metadata of its package.

    Raises:
        RuntimeError: the record exists and is not in the form that the archiver writes.
    """
    record = _build_record(model_dir)
    return Build(
        torch=_text(record, "torch"),
        isa=(_text(record, "isa") or metadata.get("AOTI_CPU_ISA", "")).lower() or None,
        machine=metadata.get("AOTI_MACHINE") or None,
        fallback=_fallback(_text(record, "fallback"), model_dir),
        weights_for=_text(record, "weights_for"),
    )


def _build_record(model_dir: str) -> dict[str, object]:
    try:
        with open(Path(model_dir, BUILD_NAME), "rb") as file:
            text = file.read(_MAX_BUILD_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(text) > _MAX_BUILD_BYTES:
        raise RuntimeError(f"{BUILD_NAME} has more than {_MAX_BUILD_BYTES} bytes; pack the archive again")
    try:
        record = json.loads(text.decode())
    except ValueError as err:
        raise RuntimeError(f"{BUILD_NAME} is not JSON: {err}; pack the archive again") from err
    if not isinstance(record, dict):
        raise RuntimeError(f"{BUILD_NAME} holds {record!r}; expected an object; pack the archive again")
    return record


@dataclass(frozen=True, slots=True)
class Misfit:
    """Reason against running a build on this machine. `fatal`: an attempt could end the process."""

    reason: str
    fatal: bool


def misfit(build: Build, torch_version: str, cpu_flags: frozenset[str] | None) -> Misfit | None:
    """Return the reason against running the build on this machine; None if the build can run.

    Args:
        build: the build record.
        torch_version: version of the torch that is to run it.
        cpu_flags: flags of this CPU, see `read_cpu_flags`; None when they are unknown.
    """
    if build.machine and build.machine != platform.machine():
        return Misfit(f"it was compiled for {build.machine}, and this is {platform.machine()}", fatal=True)
    sets = (build.isa or "").split()  # torch writes several with spaces between: "avx512 avx512_vnni"
    needed = frozenset().union(*(_X86_FLAGS.get(_SAME_SET.get(one, one), frozenset()) for one in sets))
    lacking = needed - (cpu_flags or frozenset())
    if cpu_flags is not None and lacking:
        names = ", ".join(sorted(lacking))
        return Misfit(f"it was compiled for {build.isa}; this CPU lacks {names}", fatal=True)
    if build.torch and build.torch != torch_version.partition("+")[0]:
        return Misfit(f"it was compiled with torch {build.torch}; this is {torch_version}", fatal=False)
    return None


def read_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """Return the instruction set extensions of an x86 CPU under Linux; None elsewhere."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), None)
    return frozenset(flags.split()) if flags else None


def _text(record: dict[str, object], key: str) -> str | None:
    value = record.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RuntimeError(f"{key} in {BUILD_NAME} is {value!r}; expected a text; pack the archive again")
    return value


def _fallback(name: str | None, model_dir: str) -> str | None:
    if name is not None and (Path(name).name != name or not Path(model_dir, name).is_file()):
        raise RuntimeError(f"{BUILD_NAME} names {name!r}, which the archive does not hold; pack it again")
    return name


# Functions of torch's extension that `library.py` needs; torch lists them in the file `_LISTED_IN`.
HANDLE_FUNCTIONS = ("unsafe_alloc_void_ptrs_from_tensors", "alloc_tensors_by_stealing_from_void_ptrs")
_LISTED_IN = ("_C", "_aoti.pyi")


def holds_gil(path: str, model_dir: str) -> bool:
    """Return whether a `.pt2` file holds the GIL while it runs on the CPU, so that threads gain nothing.

    The result is False for a file that can't be loaded at all.
    """
    try:
        package = read_package(path)
        build = read_build(model_dir, package.metadata)
        torch_version = importlib.metadata.version("torch")
    except (RuntimeError, OSError, importlib.metadata.PackageNotFoundError):
        return False
    replaced = build.fallback is not None and misfit(build, torch_version, read_cpu_flags()) is not None
    return replaced or not (fits_c_abi(package) and _torch_gives_handles())


def fits_c_abi(package: Package) -> bool:
    """Return whether the C ABI can run the package. The installed torch is not checked for its functions."""
    return package.device in ("cpu", "unknown") and package.library is not None


def _torch_gives_handles() -> bool:
    """Return whether the installed torch has `HANDLE_FUNCTIONS`; torch is not imported: it takes seconds."""
    found = importlib.util.find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            text = Path(folder, *_LISTED_IN).read_text(encoding="utf-8")
        except OSError:
            continue
        return all(f"def {name}(" in text for name in HANDLE_FUNCTIONS)
    return False
