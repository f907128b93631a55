"""The smallest input that a signature takes, for examples and for the metadata of models. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchere.archiver.signature import ANY, Limit, TensorSpec


def smallest_shapes(specs: Sequence[TensorSpec]) -> list[list[int]]:
    """Return the smallest shape of each input; free dimensions without a limit have the size 1.

    Dimensions whose limits share a name get one size, which is within the limits of them all.
    """
    named: dict[str, list[Limit]] = {}
    for spec in specs:
        for limit in spec.limits:
            named.setdefault(limit.name, []).append(limit)
    shared = {name: _smallest_size(limits) for name, limits in named.items() if name}
    shapes = []
    for spec in specs:
        sizes = {limit.dimension: shared.get(limit.name) or _smallest_size([limit]) for limit in spec.limits}
        shapes.append([sizes.get(place, 1) if size == ANY else size for place, size in enumerate(spec.shape)])
    return shapes


def plain_value(spec: TensorSpec) -> object:
    """Return a value that the input may hold: 0, or the number nearest to it; a word for BYTES."""
    if spec.datatype == "BYTES":
        return "text"
    if spec.datatype == "BOOL":
        return False
    if spec.datatype.startswith(("F", "BF")):
        return 0.0
    return 0 if spec.values is None else min(max(0, spec.values.least), spec.values.most)


def _smallest_size(limits: Sequence[Limit]) -> int:
    step = math.lcm(*(limit.multiple for limit in limits))
    return step * -(-max(limit.least for limit in limits) // step)
