"""Expressions of sizes: what torch writes passes, what runs code or for ever does not."""

from __future__ import annotations

import pytest

from torchere.archiver.scan import UnsafeModel
from torchere.archiver.scan.exported_program import check_expression


@pytest.mark.parametrize(
    "text",
    [
        "s0",
        "Symbol('s77', positive=True, integer=True)",
        "Add(Mul(Integer(2), Symbol('s77', integer=True)), Integer(-1))",
        "Pow(Symbol('s0', integer=True), Integer(2))",
        "Mul(Rational(1, 2), Pow(Add(Pow(Symbol('s0'), Integer(2)), Integer(1)), Integer(-1)))",
        "FloorDiv(Symbol('s0', integer=True), Integer(9223372036854775807))",
        "TruncToInt(FloatTrueDiv(ToFloat(Symbol('s0')), Float('2.5', precision=53)))",
        "L['x'].size()[0] >= 2 and not s0 ** 2 % 3 == 0",
        "PowByNatural(Symbol('s0'), 2)",
        "FloatPow(ToFloat(Symbol('s63', positive=True)), Float('0.5', precision=53))",
        "L['x'][0].size()[1] & -4 >= 0",
        "math.trunc(torch.sym_float(L['x'].size()[2]) ** 0.5) == 4",
    ],
)
def test_what_torch_writes_is_let_through(text: str) -> None:
    check_expression("a size", text)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "9^9^9^9",  # sympy takes it for a power
        "2**s0",
        "Pow(2, Symbol('s0'))",
        "Pow(Pow(Pow(9, 60), 60), 60)",
        "((9**60)**60)**60",
        "pow(2, 10**9)",
        "LShift(1, 10**9)",
        "1 << 1000000000",
        "2**1000000000",
        "2**-1000000000",
        "Pow(2, Integer(1000000000))",
        "Integer(9223372036854775809)",
        "factorial(1000000)",
        "Product(s0, 1, 10)",
        "'a' * 9000000000",
        "(1, 2) * 9000000000",
        "Integer(1e1000000000)",
        "Float('1e1000000000')",
        "Float('0.1', precision=9000000000)",
        "Float(1, 9000000000)",
        "Max(1, key=print)",
        "FloatPow(2, Float('1e999', precision=53))",
        "FloatPow(2, Float('a'))",
        "floor(exp(exp(20)))",
        "exp(9**64)",
        "floor(sin(exp(exp(100))))",
        "floor(log(log(9)))",
    ],
)
def test_what_takes_for_ever_is_refused(text: str) -> None:
    with pytest.raises(UnsafeModel):
        check_expression("a size", text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "eval('a')",
        "S('a')",
        "sympify('a')",
        "Symbol('a' + 'b')",
        "s0.__class__",
        "(lambda: 1)()",
        "[x for x in (1,)]",
        "f'{s0}'",
        "s0 if s1 else s2",
        "(not\ns0)",  # sympy takes the end of the line out: `nots0`
        "\uff3f\uff3fimport\uff3f\uff3f",  # underscores in another width, which Python reads as such
        "torch.load('a')",
        "math.trunc.torch.sym_float",
        "math.factorial(9)",
        "a b",
        "(" * 9000,
        "1" * 20_000,
        None,
        ["s0"],
    ],
)
def test_what_is_no_arithmetic_is_refused(text: object) -> None:
    with pytest.raises(UnsafeModel):
        check_expression("a size", text)


def test_long_sums_are_fine_up_to_what_python_parses() -> None:
    check_expression("a size", " + ".join(["s0"] * 80))
    with pytest.raises(UnsafeModel):
        check_expression("a size", "-" * 9000 + "1")
