"""Checks the JSON of an exported program for what torch would evaluate, execute or look up as it reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torchere.archiver.size_expressions import NotArithmetic, check_expression
from torchere.archiver.torchscript_files import FILE_OPERATORS

_NAME = re.compile(r"([A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*)?")
_OPERATOR = re.compile(
    r"torch\.ops\.([A-Za-z][A-Za-z0-9_]*|_c10d_functional|_quantized)"
    r"\.(?P<name>_?[A-Za-z][A-Za-z0-9_]*|__i?(and|or|xor|lshift|rshift)__)(\.[A-Za-z][A-Za-z0-9_]*)?"
)
_ARITHMETIC = re.compile(r"(_operator|math)\.[a-z][a-z0-9_]*|torch\.sym_[a-z_]+|torch\._sym_[a-z]+")
_NOT_ARITHMETIC = re.compile(r"_operator\.(attrgetter|methodcaller|itemgetter|call)")
# Objects whose keys are names of the program's own choice (dict fields of torch/_export/serde/schema.py).
_MAPS = frozenset(
    {
        "tensor_values",
        "sym_int_values",
        "sym_bool_values",
        "sym_float_values",
        "custom_obj_values",
        "as_string_to_argument",
        "metadata",
        "treespec_namedtuple_fields",
        "opset_version",
        "range_constraints",
    }
)


class UnsafeProgram(ValueError):
    """The program would run code, or is not of a form known here; one line says where and why."""


def check_graph(program: Any) -> None:
    """Raise UnsafeProgram when something in the program, as JSON, is not what `torch.export.save` writes."""
    for key, value in _members(program):
        if key in _CHECKS:
            for item in value if isinstance(value, list) else [value]:
                _CHECKS[key](item)


def _members(program: Any) -> Iterator[tuple[str, Any]]:
    """Every key of the format and its value, at any depth; names in maps are no keys, whatever they are."""
    pending = [(program, False)]
    while pending:
        item, is_map = pending.pop()
        if isinstance(item, dict):
            for key, inner in item.items():
                if not is_map:
                    yield key, inner
                pending.append((inner, not is_map and key in _MAPS))
        elif isinstance(item, list):
            pending += [(inner, False) for inner in item]


def _check_target(target: Any) -> None:
    text = str(target)
    operator = _OPERATOR.fullmatch(text)
    if operator is not None and operator["name"] not in FILE_OPERATORS:
        return
    if not _ARITHMETIC.fullmatch(text) or _NOT_ARITHMETIC.match(text):
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
    _check_arithmetic(text, "a size")


def _check_guard(text: Any) -> None:
    _check_arithmetic(text, "a guard")


def _check_arithmetic(text: Any, what: str) -> None:
    try:
        check_expression(text)
    except NotArithmetic as error:
        raise UnsafeProgram(f"{what} in it is {ascii(text)[:80]}; {error}") from error


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
