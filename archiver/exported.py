"""Checks an exported program (`.pt2`) for anything that would run code while it is loaded; loads nothing.

torch's loader trusts the file: it evaluates expressions of sizes, executes guards as Python, looks operators
up by any dotted path below `torch`, and unpickles examples. A file from `torch.export.save` uses a small part
of that, and this module accepts that part and nothing else (torch/_export/serde/serialize.py).
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

from torchere.archiver.pickles import foreign_names_in

_OLD_PROGRAM = "serialized_exported_program.json"  # what torch before 2.7 wrote
_MAX_JSON_BYTES = 2**28
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"([A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*)?")
_OPERATOR = re.compile(
    r"torch\.ops\.([A-Za-z][A-Za-z0-9_]*|_c10d_functional|_quantized)"
    r"\.(_?[A-Za-z][A-Za-z0-9_]*|__i?(and|or|xor|lshift|rshift)__)(\.[A-Za-z][A-Za-z0-9_]*)?"
)
_ARITHMETIC = re.compile(r"(_operator|math)\.[a-z][a-z0-9_]*|torch\.sym_[a-z_]+|torch\._sym_[a-z]+")
_NOT_ARITHMETIC = re.compile(r"_operator\.(attrgetter|methodcaller|itemgetter|call)")
_FILE_OPERATORS = ("torch.ops.aten.from_file", "torch.ops.aten.save", "torch.ops.aten.load")
_FUNCTION = re.compile(
    r"[A-Z][A-Za-z]*|floor|ceiling|sqrt|round|abs|log|exp|sin|cos|tan|pow|min|max|int|float"
)
_ATTRIBUTES = frozenset({"size", "stride", "storage_offset", "dim", "ndim", "shape", "isnan", "inf", "nan"})
_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.BoolOp,
    ast.Compare,
    ast.Call,
    ast.Name,
    ast.Constant,
    ast.Subscript,
    ast.Attribute,
    ast.keyword,
    ast.Tuple,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
)


class UnsafeProgram(ValueError):
    """The program would run code, or is not of a form known here; one line says where and why."""


def check_program(file: BinaryIO, size: int, allow_pickle: bool = False) -> None:
    """Raise when loading the `.pt2` in `file` with `torch.export.load` could run code of its own.

    Args:
        file: the whole package.
        size: its bytes.
        allow_pickle: let pickles in it be.

    Raises:
        UnsafeProgram: it could, or it is damaged or no exported program.
    """
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            pickled = _check_entries(archive)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error) as error:
        raise UnsafeProgram(f"the file is damaged: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnsafeProgram(f"its program is not valid JSON: {error}") from error
    if not allow_pickle and (names := foreign_names_in(file, size, pickled)):
        raise UnsafeProgram(f"its pickle imports {', '.join(names[:3])}")


def _check_entries(archive: zipfile.ZipFile) -> frozenset[str]:
    """Check every program in the package; returns the base names of what else is unpickled."""
    pickled: set[str] = set()
    programs = 0
    for info in archive.infolist():
        name = info.filename.lower()  # torch looks names up without regard to case
        is_program = ("/models/" in name and name.endswith(".json")) or name.endswith(_OLD_PROGRAM)
        if not is_program and not name.endswith("_config.json"):
            continue
        if info.file_size > _MAX_JSON_BYTES:
            raise UnsafeProgram(f"{info.filename} is larger than {_MAX_JSON_BYTES} bytes")
        content = json.loads(archive.read(info))
        if is_program:
            programs += 1
            _check_json(content)
        else:
            pickled.update(_pickled_payloads(content))
    if not programs:
        raise UnsafeProgram("it holds no exported program")
    return frozenset(pickled)


def _pickled_payloads(config: Any) -> Iterator[str]:
    """Files of weights and constants that are unpickled; custom_obj_* are read by TorchScript."""
    payloads = config.get("config") if isinstance(config, dict) else None
    for payload in payloads.values() if isinstance(payloads, dict) else ():
        if not isinstance(payload, dict):
            raise UnsafeProgram(f"its list of weights has {ascii(payload)[:80]}; expected objects")
        path = str(payload.get("path_name")).lower()
        if path.startswith("opaque_obj") or (
            payload.get("use_pickle") and not path.startswith("custom_obj_")
        ):
            yield path.rpartition("/")[2]


def _check_json(program: Any) -> None:
    for key, value in _members(program):
        if key in _CHECKS:
            for item in value if isinstance(value, list) else [value]:
                _CHECKS[key](item)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value at any depth; source lines, which are only shown, are left out."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            for key, inner in item.items():
                if key == "metadata" and isinstance(inner, dict):
                    continue
                yield key, inner
                pending.append(inner)
        elif isinstance(item, list):
            pending += item


def _check_target(target: Any) -> None:
    text = str(target)
    plain = _OPERATOR.fullmatch(text) and not text.startswith(_FILE_OPERATORS)
    if not plain and not (_ARITHMETIC.fullmatch(text) and not _NOT_ARITHMETIC.match(text)):
        _refuse("an operator", text, "one of torch.ops, or arithmetic")


def _check_name(name: Any) -> None:
    # Names of inputs and values are written into the Python source that torch makes of the graph.
    if name is not None and not _NAME.fullmatch(str(name)):
        _refuse("a name", name, "letters, digits, dots and underscores")


def _check_output_tree(spec: Any) -> None:
    if any(word in str(spec) for word in ("defaultdict", "default_factory", "__enum__")):
        _refuse("the structure of inputs or outputs", spec, "tuples, lists and dicts")


def _check_input_tree(spec: Any) -> None:
    _check_output_tree(spec)
    if any(char in str(spec) for char in "()=;'#\n\r"):  # keys are written into source, too
        _refuse("the structure of the inputs", spec, "keys of letters, digits and underscores")


def _check_size(text: Any) -> None:
    _check_expression(text, "a size")


def _check_guard(text: Any) -> None:
    _check_expression(text, "a guard")


def _check_expression(text: Any, what: str) -> None:
    """Only arithmetic and comparisons of sizes; calls only of sympy's functions, tensor.size() and such."""
    if not isinstance(text, str) or "__" in text or len(text) > 10_000:
        _refuse(what, text, "an expression of sizes")
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise UnsafeProgram(f"{what} in it is {ascii(text)[:80]}, which is no expression") from error
    for node in nodes:
        if not isinstance(node, _NODES) or not _is_plain_node(node):
            _refuse(what, text, "an expression of sizes")


def _is_plain_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _ATTRIBUTES
    if isinstance(node, ast.Call):
        function = node.func
        return isinstance(function, ast.Attribute) or (
            isinstance(function, ast.Name) and _FUNCTION.fullmatch(function.id) is not None
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _IDENTIFIER.fullmatch(node.value) is not None
    return True


def _refuse(what: str, found: Any, expected: str) -> NoReturn:
    raise UnsafeProgram(f"{what} in it is {ascii(found)[:80]}; expected {expected}")


# Called for every value, or every item of a list, under these keys, at any depth.
_CHECKS: dict[str, Callable[[Any], None]] = {
    "expr_str": _check_size,
    "guards_code": _check_guard,
    "target": _check_target,
    "as_operator": _check_target,
    "name": _check_name,
    "parameter_name": _check_name,
    "buffer_name": _check_name,
    "tensor_constant_name": _check_name,
    "custom_obj_name": _check_name,
    "class_fqn": _check_name,
    "forward_arg_names": _check_name,
    "in_spec": _check_input_tree,
    "out_spec": _check_output_tree,
}
