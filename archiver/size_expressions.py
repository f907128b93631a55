"""Checks expressions of sizes in an exported program: arithmetic alone, and nothing that takes long.

torch evaluates sizes by sympy, which calls Python's `eval`, and guards as Python. What it writes itself are
sums, products and comparisons of symbols, as functions of sympy's and of its own
(torch/utils/_sympy/functions.py). A size that comes of a logarithm or a sine has become a number by then; to
sympy these are symbols, of which `floor(exp(exp(20)))` asks for more digits than there is memory.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator

_MAX_LENGTH = 10_000
_MAX_INTEGER = 2**63
_MAX_EXPONENT = 64  # of powers of powers, too: their product
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


class NotArithmetic(ValueError):
    """The text is no expression of sizes; the reason says why."""


def check_expression(text: object) -> None:
    """Raise NotArithmetic unless the text only computes and compares sizes, at little cost.

    It may call what is listed here, and tensor.size() and such. Powers have small constant exponents:
    `9**9**9**9` would keep a processor for ever.
    """
    if not isinstance(text, str) or not text.isascii() or len(text) > _MAX_LENGTH:
        raise NotArithmetic("expected an expression of sizes")
    if "__" in text or "\n" in text or "\r" in text:  # sympy takes line ends out and joins what they part
        raise NotArithmetic("expected an expression of sizes")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotArithmetic("this is no expression") from error
    for node, exponent in _with_exponents(tree):
        if not isinstance(node, _NODES) or not _is_plain(node):
            raise NotArithmetic("expected an expression of sizes")
        if exponent > _MAX_EXPONENT:
            raise NotArithmetic(f"expected powers of at most {_MAX_EXPONENT}, told by a number")


def _with_exponents(tree: ast.AST) -> Iterator[tuple[ast.AST, float]]:
    """Every node with the product of the exponents of all powers around it; infinity for one not known."""
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
    """How large a power may make its base; at least 1."""
    if isinstance(node, ast.BinOp):
        found = node.right
    elif isinstance(node, ast.Call) and len(node.args) == 2:
        found = node.args[1]
    else:
        return math.inf
    number = _number(found)
    return math.inf if number is None else max(1.0, abs(number))


def _number(node: ast.expr) -> float | None:
    """The constant that this is: 2, -1, Integer(2), Rational(1, 2), Float('0.5'); None when it is none."""
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
    if isinstance(node, ast.BinOp):  # a text or a tuple times a number is as long as that says
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
    """What symbols are (`integer=True`), and the precision of a Float."""
    value = node.value.value if isinstance(node.value, ast.Constant) else ...
    if node.arg == "precision":
        return isinstance(value, int) and value <= _MAX_PRECISION
    return node.arg is not None and (value is None or isinstance(value, bool))
