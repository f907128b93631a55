"""The classification extension of the protocol: the largest values of an output, with class names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from torchere.handlers.tensors import BF16, BYTES, Array, TensorError
from torchere.handlers.tensors_bytes import objects_array
from torchere.handlers.tensors_outputs import Output

Labels = Mapping[str, Any]


def classified(output: Output, classes: int, labels: Labels | None, field: str) -> Output:
    """Return the `classes` largest values of an output, largest first, as BYTES `value:index[:label]`.

    With several dimensions, the first is the batch, and each row has its own largest values. `classes` is
    limited to the number of values.

    Raises:
        TensorError: the output is BYTES, not numbers.
    """
    if output.datatype is BYTES:
        raise TensorError(f"{field}.parameters.classification", "an output of BYTES", "one of numbers")
    is_torch = output.datatype is BF16 and not isinstance(output.tensor, np.ndarray)
    values: Array = output.tensor.float().numpy() if is_torch else output.tensor
    is_batch = values.ndim > 1
    rows = values.reshape(values.shape[0], -1) if is_batch and values.size else values.reshape(1, -1)
    count = min(classes, rows.shape[1])
    # A stable sort of the reversed rows, read backwards: of equal values the first one comes first.
    order = np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, ::-1]
    best = rows.shape[1] - 1 - order[:, :count]
    texts = [
        _text(row[index], int(index), labels)
        for row, places in zip(rows, best, strict=True)
        for index in places
    ]
    shape = (rows.shape[0], count) if is_batch else (count,)
    return Output(output.name, BYTES, shape, objects_array(texts, shape))


def _text(value: Any, index: int, labels: Labels | None) -> str:
    label = labels.get(str(index)) if labels else None
    if isinstance(label, (list, tuple)):  # [id, name], as ImageNet's index_to_name.json has it
        label = label[-1] if label else None
    return f"{float(value):f}:{index}" + (f":{label}" if label is not None else "")
