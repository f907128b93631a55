"""Which values and labels a PromQL expression can have, followed from those of the server's metrics.

An alert whose threshold lies beyond them can never fire, and promtool, which knows nothing of the server,
can't say so. The library promql-parser reads the text; of its tree, the part that rules and autoscalers use
is followed, and the rest is `NotUnderstood`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import promql_parser as promql

# Labels that Prometheus adds to each series at a scrape, on Kubernetes and elsewhere.
TARGET_LABELS = frozenset({"job", "instance", "namespace", "pod", "service", "node"})
_SAME = ("min_over_time", "max_over_time", "avg_over_time", "last_over_time")
_GROWTH, _SLOPE = ("rate", "irate", "increase"), ("deriv", "delta")
_AGGREGATIONS = ("sum", "max", "min", "avg", "count")
_COMPARISONS = ("==", "!=", ">", "<", ">=", "<=")


class NotUnderstood(ValueError):
    """The expression is no PromQL, or uses something that is not known here."""


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
        matchers: of its selectors: label, sign and value of each.
        kind: of a selector's metric.
    """

    low: float
    high: float
    labels: frozenset[str] | None
    each: float = math.inf
    bound: float = math.inf
    form: str = ""
    matchers: frozenset[tuple[str, str, str]] = frozenset()
    kind: str = ""


class Reader:
    """Reads one expression; `problems` says what can't be true in it.

    Args:
        text: the expression.
        families: the metrics of a scrape by name.
        recorded: the values of recording rules by name.
    """

    def __init__(self, text: str, families: Mapping[str, Family], recorded: Mapping[str, Value]) -> None:
        self._text = text
        self._families = families
        self._recorded = recorded
        self.problems: list[str] = []

    def read(self) -> Value:
        """Return the range and the labels of the expression.

        Raises:
            NotUnderstood: see there.
        """
        try:
            tree = promql.parse(self._text)
        except ValueError as err:
            raise NotUnderstood(str(err)) from err
        return self._value(tree)

    def _value(self, node: Any) -> Value:
        match node:
            case promql.ParenExpr():
                value = self._value(node.expr)
            case promql.NumberLiteral():
                value = Value(node.val, node.val, None)
            case promql.VectorSelector():
                value = self._selected(node)
            case promql.MatrixSelector():
                value = self._selected(node.vector_selector)
                value = replace(value, form=f"{value.form}[{node.range}]")
            case promql.SubqueryExpr():
                value = self._value(node.expr)
                value = replace(value, form=f"{value.form}[{node.range}:]")
            case promql.AggregateExpr():
                value = self._aggregated(node)
            case promql.Call():
                value = self._called(node.func.name, [self._value(one) for one in node.args])
            case promql.BinaryExpr():
                value = self._combined(node)
            case _:
                raise NotUnderstood(f"{node.prettify()!r} is not understood")
        return value

    def _selected(self, node: Any) -> Value:
        name = node.name
        if name is None or node.matchers.or_matchers:
            raise NotUnderstood(f"{node.prettify()!r} is not understood: it names no metric")
        matchers = [(one.name, str(one.op), one.value) for one in node.matchers.matchers]
        found = self._value_of(name)
        labels = found.labels or frozenset()
        for label, sign, wanted in matchers:
            if label not in labels:
                self.problems.append(f"{name} has no label {label}, only {_listed(labels)}")
            known = self._families[name].values.get(label) if name in self._families else None
            if known and sign in ("MatchOp.Equal", "MatchOp.Re"):
                missing = set(wanted.split("|")) - known
                if missing:
                    self.problems.append(
                        f"{label} of {name} is never {_listed(missing)}, only {_listed(known)}"
                    )
        form = name if node.offset is None else f"{name} offset {node.offset}"
        return replace(found, form=form, matchers=frozenset(matchers))

    def _value_of(self, name: str) -> Value:
        if name in self._recorded:
            return self._recorded[name]
        base = re.sub("_(bucket|count|sum)$", "", name)
        if base in self._families and self._families[base].kind == "histogram" and base != name:
            family = self._families[base]
            more = TARGET_LABELS | ({"le"} if name.endswith("_bucket") else frozenset())
            return Value(0, math.inf, family.labels | more, bound=family.high, kind="counter")
        family = self._families.get(name)
        if family is None or family.kind == "histogram":
            self.problems.append(f"the server has no {name}")
            return Value(-math.inf, math.inf, TARGET_LABELS)
        high = math.inf if family.kind == "counter" else family.high
        return Value(0, high, family.labels | TARGET_LABELS, high, kind=family.kind)

    def _called(self, name: str, arguments: list[Value]) -> Value:
        if name == "time":
            return Value(0, math.inf, None)
        if name == "absent":
            return Value(1, 1, frozenset(label for label, _, _ in arguments[0].matchers), 1)
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

    def _aggregated(self, node: Any) -> Value:
        name, modifier = str(node.op), node.modifier
        if name not in _AGGREGATIONS or (modifier and modifier.type != promql.AggModifierType.By):
            raise NotUnderstood(f"{node.prettify()!r} is not understood")
        by = frozenset(modifier.labels if modifier else ())
        value = self._value(node.expr)
        if by - (value.labels or frozenset()):
            missing = _listed(by - (value.labels or frozenset()))
            self.problems.append(f"{name} by {missing}: {value.form or 'its series'} have no such label")
        low, high = value.low, value.high
        if name == "sum":
            low, high = (low, math.inf if high > 0 else 0.0) if low >= 0 else (-math.inf, math.inf)
        elif name == "count":
            low, high = 1, math.inf
        return replace(value, low=low, high=high, labels=by, form=f"{name} by {_listed(by)} ({value.form})")

    def _combined(self, node: Any) -> Value:
        sign, modifier = str(node.op), node.modifier
        if modifier and modifier.card not in (
            promql.VectorMatchCardinality.OneToOne,
            promql.VectorMatchCardinality.ManyToMany,  # of `and`, `or`, `unless`
        ):
            raise NotUnderstood("group_left and group_right are not understood")
        matching = modifier.matching if modifier else None
        if matching and matching.type != promql.LabelModifierType.Include:
            raise NotUnderstood("ignoring is not understood")
        left, right = self._value(node.lhs), self._value(node.rhs)
        self._check_match(sign, left, right, frozenset(matching.labels) if matching else None)
        if sign == "or":
            return replace(left, low=min(left.low, right.low), high=max(left.high, right.high))
        if sign in ("and", "unless"):
            return left
        if sign in _COMPARISONS:
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
            missing = (on or frozenset()) - (side.labels or frozenset())
            if missing:
                self.problems.append(f"on {_listed(missing)}: a side has no such label")

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
    if sign == "/" and left.low >= 0 and right.low >= 0:
        return left.low / right.high if right.high else 0.0, left.high / right.low if right.low else math.inf
    return -math.inf, math.inf


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
