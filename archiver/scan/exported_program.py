"""Checks that loading an exported program (`.pt2`) would run no code of its own; loads nothing.

torch's loader trusts the file: it compiles and loads native code that lies beside the program, reads every
file of one folder as a program, evaluates expressions of sizes, executes guards as Python, looks operators up
by any dotted path below `torch`, and unpickles examples. A file from `torch.export.save` needs only a part of
that, and this module accepts only this part (torch/export/pt2_archive/_package.py,
torch/_export/serde/serialize.py).
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

from torchere.archiver.scan import UnsafeModel, checked_zip
from torchere.archiver.scan.pickles import foreign_names_in
from torchere.archiver.scan.torchscript import FILE_OPERATORS

# Registers the operators of quantised programs (torchao's PT2E); without it torch can't load them.
INT8_OPERATORS = "torch.ao.quantization.fx._decomposed"
OLD_PROGRAM = "serialized_exported_program.json"
_OLD_PICKLES = re.compile(r"serialized_(state_dict|constants)\.(pt|json)|serialized_example_inputs\.pt")
_MAX_JSON_BYTES = 2**28
_PROGRAM = "models/model.json"
_PAYLOADS = re.compile(r"data/(weights|constants)/\w+_config\.json", re.ASCII)
# Every record that torch.export.save writes, below the file's own folder. Records in extra/ are text that
# callers may ask for; data/weights and data/constants have numbers, and pickles: see `foreign_names_in`.
_RECORD = re.compile(
    r"archive_format|archive_version|version|byteorder|\.data/(version|serialization_id)"
    rf"|{re.escape(_PROGRAM)}|data/sample_inputs/model\.pt|extra/.+"
    r"|data/(weights|constants)/(model\.pt|model_\w+_config\.json|(weight|tensor|custom_obj|opaque_obj)_\d+)",
    re.ASCII,
)


def check_program(file: BinaryIO, size: int, allow_pickle: bool = False) -> None:
    """Raise UnsafeModel when loading `file`, a `.pt2`, with `torch.export.load` could run its own code.

    Args:
        file: the whole package.
        size: its size in bytes.
        allow_pickle: do not check the pickles in it.

    Raises:
        UnsafeModel: it could, or the file is damaged or not an exported program.
    """
    file.seek(0)
    with checked_zip(file, size) as archive:
        pickled = _check_records(archive)
    if not allow_pickle and (names := foreign_names_in(file, size, pickled)):
        raise UnsafeModel(f"its pickle imports {', '.join(names[:3])}")


def _check_records(archive: zipfile.ZipFile) -> frozenset[str]:
    """Check every record of the package; return the base names of those that are unpickled."""
    names = [info.orig_filename for info in archive.infolist()]
    if OLD_PROGRAM in names:  # a file in the format of torch before 2.8
        _refuse_others([name for name in names if name != OLD_PROGRAM and not _is_old_record(name)])
        check_graph(_json(archive, OLD_PROGRAM))
        return frozenset(name for name in names if _OLD_PICKLES.fullmatch(name))
    roots = {name.partition("/")[0] for name in names}
    _refuse_others([name for name in names if not _RECORD.fullmatch(name.partition("/")[2])])
    if len(roots) != 1 or f"{min(roots)}/{_PROGRAM}" not in names:
        raise UnsafeModel(f"it holds no exported program ({_PROGRAM})")
    check_graph(_json(archive, f"{min(roots)}/{_PROGRAM}"))
    return frozenset(_pickled_records(archive))


def _is_old_record(name: str) -> bool:
    return name == "version" or _OLD_PICKLES.fullmatch(name) is not None


def _refuse_others(names: list[str]) -> None:
    if names:
        raise UnsafeModel(f"it holds {ascii(names[0])[1:-1][:80]}, which torch.export.save does not write")


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    if archive.getinfo(name).file_size > _MAX_JSON_BYTES:
        raise UnsafeModel(f"{name} is larger than {_MAX_JSON_BYTES} bytes")
    try:
        return json.loads(archive.read(name).decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise UnsafeModel(f"its program is not valid JSON: {error}") from error


def _pickled_records(archive: zipfile.ZipFile) -> Iterator[str]:
    """Yield the base names of the files of weights and constants that Python unpickles."""
    for name in archive.namelist():
        found = _PAYLOADS.fullmatch(name.partition("/")[2])
        if found is not None:
            yield from _pickled_payloads(_json(archive, name), found[1])


def _pickled_payloads(config: Any, kind: str) -> Iterator[str]:
    payloads = config.get("config") if isinstance(config, dict) else None
    for payload in payloads.values() if isinstance(payloads, dict) else ():
        if not isinstance(payload, dict):
            raise UnsafeModel(f"its list of weights has {ascii(payload)[:80]}; expected objects")
        path = str(payload.get("path_name")).lower()
        by_torchscript = kind == "constants" and path.startswith("custom_obj_")
        if path.startswith("opaque_obj") or (payload.get("use_pickle") and not by_torchscript):
            yield path.rpartition("/")[2]


_NAME = re.compile(r"([A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*)?")
_OPERATOR = re.compile(
    r"torch\.ops\.([A-Za-z][A-Za-z0-9_]*|_c10d_functional|_quantized)"
    r"\.(?P<name>_?[A-Za-z][A-Za-z0-9_]*|__i?(and|or|xor|lshift|rshift)__)(\.[A-Za-z][A-Za-z0-9_]*)?"
)
_ARITHMETIC = re.compile(r"(_operator|math)\.[a-z][a-z0-9_]*|torch\.sym_[a-z_]+|torch\._sym_[a-z]+")
_NOT_ARITHMETIC = re.compile(r"_operator\.(attrgetter|methodcaller|itemgetter|call)")
# Objects whose keys are names that the program chooses (dict fields of torch/_export/serde/schema.py).
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


def check_graph(program: Any) -> None:
    """Raise UnsafeModel when the program's JSON has a value that `torch.export.save` would not write."""
    for key, value in _members(program):
        if key in _CHECKS:
            for item in value if isinstance(value, list) else [value]:
                _CHECKS[key](item)


def _members(program: Any) -> Iterator[tuple[str, Any]]:
    """Yield each field of the format with its value, at any depth; the keys of maps are names, not fields."""
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
        _refuse("an operator", text, "expected one of torch.ops, or arithmetic")


def _check_name(name: Any) -> None:
    # torch makes Python source of the graph, and writes the names of inputs and values into it.
    if name is not None and not _NAME.fullmatch(str(name)):
        _refuse("a name", name, "expected letters, digits, dots and underscores")


def _check_output_tree(spec: Any) -> None:
    if any(word in str(spec) for word in ("defaultdict", "default_factory", "__enum__")):
        _refuse("the structure of inputs or outputs", spec, "expected tuples, lists and dicts")


def _check_input_tree(spec: Any) -> None:
    _check_output_tree(spec)
    if any(char in str(spec) for char in "()=;'#\n\r"):  # keys are written into source, too
        _refuse("the structure of the inputs", spec, "expected keys of letters, digits and underscores")


def _refuse(what: str, found: Any, reason: str) -> NoReturn:
    raise UnsafeModel(f"{what} in it is {ascii(found)[:80]}; {reason}")


# Checks expressions of sizes in an exported program: arithmetic alone, and nothing that takes long.
#
# torch evaluates sizes by sympy, which calls Python's `eval`, and guards as Python. It writes sums,
# products and comparisons of symbols, as functions of sympy's and of its own
# (torch/utils/_sympy/functions.py). torch has already turned a size from a logarithm or a sine into a
# number; sympy would keep such functions as symbols, and for `floor(exp(exp(20)))` compute more digits
# than fit into memory.

_NO_SIZES = "expected an expression of sizes"
_MAX_LENGTH = 10_000
_MAX_INTEGER = 2**63
_MAX_EXPONENT = 64  # of nested powers: the product of their exponents
_MAX_PRECISION = 64  # decimals, or bits of a mantissa
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,3})?")  # of a Float
_TEXT = re.compile(rf"[A-Za-z_][A-Za-z0-9_]*|{_NUMBER.pattern}")  # a name, or a Float
_POWERS = frozenset({"Pow", "pow", "PowByNatural", "FloatPow", "LShift", "RShift"})
_FUNCTIONS = _POWERS | frozenset(
    (
        # sympy's
        *("Symbol", "Dummy", "Integer", "Float", "Rational", "Add", "Mul", "Mod", "Max", "Min", "Abs"),
        *("Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Equality", "Unequality", "Relational"),
        *("StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan"),
        *("And", "Or", "Not", "Xor", "ITE", "Piecewise", "ExprCondPair", "Tuple"),
        *("floor", "ceiling"),
        # torch's
        *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilDiv", "Identity"),
        *("CeilToInt", "FloorToInt", "RoundToInt", "TruncToInt", "TruncToFloat", "RoundDecimal", "ToFloat"),
        *("IntTrueDiv", "FloatTrueDiv", "IsNonOverlappingAndDenseIndicator"),
        # Python's
        *("round", "abs", "min", "max", "int", "float"),
    )
)
_ATTRIBUTES = frozenset({"size", "stride", "storage_offset", "dim", "ndim", "shape", "isnan", "inf", "nan"})
_QUALIFIED = {  # in guards
    "torch": frozenset({"sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_ite"}),
    "math": frozenset({"trunc", "floor", "ceil", "sqrt"}),
}
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
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.expr_context,
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitAnd),
)


def check_expression(what: str, text: object) -> None:
    """Raise UnsafeModel, about `what`, unless the text only computes and compares sizes, at little cost.

    It may call the functions listed here, and tensor methods such as size(). Powers have small constant
    exponents: `9**9**9**9` would occupy a processor for ever.
    """
    if not isinstance(text, str) or not text.isascii() or len(text) > _MAX_LENGTH:
        _refuse(what, text, _NO_SIZES)
    if "__" in text or "\n" in text or "\r" in text:  # sympy drops line ends and joins the parts
        _refuse(what, text, _NO_SIZES)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _refuse(what, text, "this is no expression")
    for node, exponent in _with_exponents(tree):
        if not isinstance(node, _NODES) or not _is_plain(node):
            _refuse(what, text, _NO_SIZES)
        if exponent > _MAX_EXPONENT:
            _refuse(what, text, f"expected powers of at most {_MAX_EXPONENT}, told by a number")


# Called for every value, or every item of a list, under these keys, at any depth.
_CHECKS: dict[str, Callable[[Any], None]] = {
    "expr_str": functools.partial(check_expression, "a size"),
    "guards_code": functools.partial(check_expression, "a guard"),
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


def _with_exponents(tree: ast.AST) -> Iterator[tuple[ast.AST, float]]:
    """Yield every node with the product of the exponents of all powers that enclose it or that it is itself.

    The product is infinite when one of the exponents is not a known constant.
    """
    pending: list[tuple[ast.AST, float]] = [(tree, 1)]
    while pending:
        node, exponent = pending.pop()
        if _is_power(node):
            exponent *= _exponent(node)
        yield node, exponent
        pending += [(child, exponent) for child in ast.iter_child_nodes(node)]


def _is_power(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Pow)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _POWERS


def _exponent(node: ast.AST) -> float:
    """Return the exponent of a power, at least 1; infinity if it is not a constant."""
    if isinstance(node, ast.BinOp):
        found = node.right
    elif isinstance(node, ast.Call) and len(node.args) == 2:
        found = node.args[1]
    else:
        return math.inf
    number = _number(found)
    return math.inf if number is None else max(1.0, abs(number))


def _number(node: ast.expr) -> float | None:
    """Return the value of a constant: 2, -1, Integer(2), Rational(1, 2), Float('0.5'); else None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value if abs(node.value) <= _MAX_INTEGER else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _called_number(node.func.id, node.args)
    return None


def _called_number(name: str, arguments: list[ast.expr]) -> float | None:
    first = arguments[0] if arguments else None
    if name == "Float" and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return float(first.value) if _NUMBER.fullmatch(first.value) else None
    numbers = [_number(item) for item in arguments]
    if name == "Integer" and len(numbers) == 1:
        return numbers[0]
    if name == "Rational" and len(numbers) == 2 and numbers[1]:
        return None if numbers[0] is None else numbers[0] / numbers[1]
    return None


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        module = node.value.id if isinstance(node.value, ast.Name) else ""
        return node.attr in _ATTRIBUTES or node.attr in _QUALIFIED.get(module, ())
    if isinstance(node, ast.Call):
        return _is_plain_call(node)
    if isinstance(node, ast.Constant):
        return _is_plain_constant(node.value)
    if isinstance(node, ast.keyword):
        return _is_plain_keyword(node)
    if isinstance(node, ast.BinOp):  # a text or a tuple times a number can be of any length
        return not any(_is_text_or_tuple(side) for side in (node.left, node.right))
    return True


def _is_text_or_tuple(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_plain_call(node: ast.Call) -> bool:
    function = node.func
    if isinstance(function, ast.Name):
        several = function.id in ("Float", "round") and len(node.args) > 1  # the second: how many digits
        return function.id in _FUNCTIONS and not several
    return isinstance(function, ast.Attribute)


def _is_plain_constant(value: object) -> bool:
    if isinstance(value, str):
        return _TEXT.fullmatch(value) is not None
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and value <= _MAX_INTEGER)


def _is_plain_keyword(node: ast.keyword) -> bool:
    """Return whether a keyword states a symbol's property (`integer=True`) or a Float's precision."""
    value = node.value.value if isinstance(node.value, ast.Constant) else ...
    if node.arg == "precision":
        return isinstance(value, int) and value <= _MAX_PRECISION
    return node.arg is not None and (value is None or isinstance(value, bool))
