"""Which values and labels a PromQL expression can have, followed from those of the server's metrics.

An alert whose threshold lies beyond them can never fire, and promtool, which knows nothing of the server,
can't say so. This reads the part of PromQL that rules and autoscalers use; the rest is `NotUnderstood`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

# What a scrape adds, on Kubernetes and elsewhere.
TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod", "service", "node"})
_TOKEN = re.compile(
    r"""\s*(?: (?P<string>"(?:[^"\\]|\\.)*") | (?P<matchers>\{(?:"(?:[^"\\]|\\.)*"|[^}"])*\})
    | (?P<range>\[[^\]]*\]) | (?P<duration>\d+[smhdwy]\b) | (?P<number>\d+(?:\.\d+)?)
    | (?P<name>[a-zA-Z_:][\w:]*) | (?P<sign>==|!=|>=|<=|[><+\-*/(),]) )""",
    re.VERBOSE,
)
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_PRECEDENCE = {"or": 1, "and": 2, "unless": 2, **dict.fromkeys(("==", "!=", ">", "<", ">=", "<="), 3),
               "+": 4, "-": 4, "*": 5, "/": 5}  # fmt: skip
_SAME = ("min_over_time", "max_over_time", "avg_over_time", "last_over_time")
_GROWTH, _SLOPE = ("rate", "irate", "increase"), ("deriv", "delta")
_AGGREGATIONS = ("sum", "max", "min", "avg", "count")


class NotUnderstood(ValueError):
    """The expression uses something that is not known here."""


@dataclass(frozen=True)
class Family:
    """What is known of a metric: type, labels of its own, highest value (of a histogram: of a bucket)."""

    kind: str
    labels: frozenset[str] = frozenset()
    high: float = math.inf
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)  # of labels whose values are known


@dataclass(frozen=True)
class Value:
    """The range and the labels of an expression.

    Attributes:
        labels: of its series; None: a number without series.
        each: the highest value of the series that were added up, or `high`.
        bound: the highest finite bucket of its histogram, which no quantile exceeds.
        form: the expression without its matchers, by which a part of a whole is known.
        matchers: of its selectors.
    """

    low: float
    high: float
    labels: frozenset[str] | None
    each: float = math.inf
    bound: float = math.inf
    form: str = ""
    matchers: frozenset[str] = frozenset()
    kind: str = ""  # of a selector's metric


class Reader:
    """Reads one expression; `problems` says what can't be true in it."""

    def __init__(self, text: str, families: Mapping[str, Family], recorded: Mapping[str, Value]) -> None:
        self._families = families
        self._recorded = recorded
        self._tokens = list(_tokens(text))
        self.problems: list[str] = []

    def read(self) -> Value:
        """Return the range and the labels of the whole expression."""
        value = self._binary(1)
        if self._tokens:
            raise NotUnderstood(f"{self._tokens[0][1]!r} is not understood here")
        return value

    def _next(self) -> str:
        return self._tokens[0][1] if self._tokens else ""

    def _take(self, *expected: str) -> str:
        if not self._tokens or (expected and self._next() not in expected):
            raise NotUnderstood(f"{self._next()!r} is not understood here, expected {expected or 'more'}")
        return self._tokens.pop(0)[1]

    def _binary(self, least: int) -> Value:
        left = self._operand()
        while (precedence := _PRECEDENCE.get(self._next(), 0)) >= least:
            sign = self._take()
            on = self._labels() if self._next() == "on" and self._take() else None
            if self._next() == "group_left":
                raise NotUnderstood("group_left is not understood")
            left = self._combine(sign, left, self._binary(precedence + 1), on)
        return left

    def _labels(self) -> frozenset[str]:
        """Read `(a, b)`."""
        self._take("(")
        found = []
        while self._next() != ")":
            found.append(self._take())
            if self._next() == ",":
                self._take()
        self._take(")")
        return frozenset(found)

    def _operand(self) -> Value:
        kind, text = self._tokens[0] if self._tokens else ("", "")
        if text == "(":
            self._take()
            value = self._binary(1)
            self._take(")")
        elif kind == "number":
            number = float(self._take())
            return Value(number, number, None)
        elif kind == "name":
            self._take()
            value = self._named(text)
        else:
            raise NotUnderstood(f"{text!r} is not understood here")
        while self._tokens and (self._tokens[0][0] == "range" or self._next() == "offset"):
            value = replace(value, form=value.form + self._next())
            if self._take() == "offset":
                self._take()
        return value

    def _named(self, name: str) -> Value:
        if name in _AGGREGATIONS:
            by = self._labels() if self._next() == "by" and self._take() else frozenset()
            self._take("(")
            value = self._aggregated(name, by, self._binary(1))
            self._take(")")
            return value
        if self._next() != "(":
            return self._selected(name)
        self._take("(")
        arguments = []
        while self._next() != ")":
            arguments.append(self._binary(1))
            if self._next() == ",":
                self._take()
        self._take(")")
        return self._called(name, arguments)

    def _selected(self, name: str) -> Value:
        text = self._take() if self._tokens and self._tokens[0][0] == "matchers" else "{}"
        matchers = [match.groups() for match in _MATCHER.finditer(text)]
        found = self._value_of(name)
        labels = found.labels or frozenset()
        for label, _, _ in matchers:
            if label not in labels:
                self.problems.append(f"{name} has no label {label}, only {_listed(labels)}")
        for label, sign, wanted in matchers:
            known = self._families[name].values.get(label) if name in self._families else None
            if known and sign in ("=", "=~"):
                missing = set(wanted.split("|")) - known
                if missing:
                    self.problems.append(
                        f"{label} of {name} is never {_listed(missing)}, only {_listed(known)}"
                    )
        return replace(found, matchers=frozenset("".join(each) for each in matchers))

    def _value_of(self, name: str) -> Value:
        if name in self._recorded:
            return replace(self._recorded[name], form=name)
        base = re.sub("_(bucket|count|sum)$", "", name)
        if base in self._families and self._families[base].kind == "histogram" and base != name:
            family = self._families[base]
            more = TARGET_LABELS | ({"le"} if name.endswith("_bucket") else frozenset())
            return Value(0, math.inf, family.labels | more, bound=family.high, form=name, kind="counter")
        family = self._families.get(name)
        if family is None or family.kind == "histogram":
            self.problems.append(f"the server has no {name}")
            return Value(-math.inf, math.inf, TARGET_LABELS, form=name)
        high = math.inf if family.kind == "counter" else family.high
        return Value(0, high, family.labels | TARGET_LABELS, high, form=name, kind=family.kind)

    def _called(self, name: str, arguments: list[Value]) -> Value:
        if name == "time":
            return Value(0, math.inf, None)
        if name == "absent":
            return Value(1, 1, frozenset(re.split(r"\W", each)[0] for each in arguments[0].matchers), 1)
        value = arguments[-1]
        form = f"{name}({value.form})"
        if name == "histogram_quantile":
            if "le" not in (value.labels or ()):
                self.problems.append("histogram_quantile of series without the label le")
            labels = (value.labels or frozenset()) - {"le"}
            return replace(value, low=0, high=value.bound, each=value.bound, labels=labels, form=form)
        if name in _GROWTH:
            if value.kind != "counter":
                self.problems.append(f"{name} of {value.form}, which is no counter")
            return replace(value, low=0, high=math.inf, each=math.inf, form=form, kind="")
        if name in _SLOPE:
            return replace(value, low=-math.inf, high=math.inf, each=math.inf, form=form, kind="")
        if name in _SAME:
            return replace(value, form=form)
        raise NotUnderstood(f"the function {name} is not understood")

    def _aggregated(self, name: str, by: frozenset[str], value: Value) -> Value:
        labels = value.labels or frozenset()
        if by - labels:
            self.problems.append(
                f"{name} by {_listed(by - labels)}: {value.form or 'its series'} have no such label"
            )
        low, high = value.low, value.high
        if name == "sum":
            low, high = (low, math.inf if high > 0 else 0.0) if low >= 0 else (-math.inf, math.inf)
        elif name == "count":
            low, high = 1, math.inf
        return replace(value, low=low, high=high, labels=by, form=f"{name} by {_listed(by)} ({value.form})")

    def _combine(self, sign: str, left: Value, right: Value, on: frozenset[str] | None) -> Value:
        self._check_match(sign, left, right, on)
        if sign == "or":
            return replace(left, low=min(left.low, right.low), high=max(left.high, right.high))
        if sign in ("and", "unless"):
            return left
        if _PRECEDENCE[sign] == 3:
            return self._compared(sign, left, right)
        low, high = _arithmetic(sign, left, right)
        labels = left.labels if left.labels is not None else right.labels
        return Value(low, high, labels, high)

    def _check_match(self, sign: str, left: Value, right: Value, on: frozenset[str] | None) -> None:
        if sign == "or" or left.labels is None or right.labels is None:
            return
        if on is None and left.labels != right.labels:
            only = _listed(left.labels ^ right.labels)
            self.problems.append(f"no series match around {sign!r}: one side only has {only}")
        for side in (left, right):
            if (on or frozenset()) - side.labels:
                self.problems.append(
                    f"on {_listed((on or frozenset()) - side.labels)}: a side has no such label"
                )

    def _compared(self, sign: str, left: Value, right: Value) -> Value:
        never = {
            ">": left.high <= right.low, ">=": left.high < right.low,
            "<": left.low >= right.high, "<=": left.low > right.high,
            "==": left.low > right.high or left.high < right.low,
        }  # fmt: skip
        if never.get(sign):
            span = f"{left.low:g} to {left.high:g}"
            self.problems.append(f"never {sign} {right.low:g}: {left.form or 'the left side'} is {span}")
        low = max(left.low, right.low) if sign in (">", ">=", "==") else left.low
        high = min(left.high, right.high) if sign in ("<", "<=", "==") else left.high
        return replace(left, low=low, high=high)


def _arithmetic(sign: str, left: Value, right: Value) -> tuple[float, float]:
    if sign == "/" and left.form and left.form == right.form and left.matchers >= right.matchers:
        return 0.0, 1.0  # a part of a whole
    corners = [(a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
    if sign == "+":
        return left.low + right.low, left.high + right.high
    if sign == "-":
        return left.low - right.high, left.high - right.low
    if sign == "*":
        products = [0.0 if 0 in pair else pair[0] * pair[1] for pair in corners]
        return min(products), max(products)
    if left.low >= 0 and right.low >= 0:
        return left.low / right.high if right.high else 0.0, left.high / right.low if right.low else math.inf
    return -math.inf, math.inf


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, text = 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotUnderstood(f"{text[at : at + 20]!r} is not understood")
        yield match.lastgroup or "", match[match.lastgroup or 0]
        at = match.end()


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
