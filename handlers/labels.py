"""Class names: reads `index_to_name.json`, and replaces class indices in answers by names."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


def load_label_mapping(mapping_file_path: str) -> dict[str, str] | None:
    """Read `{"class index": "name"}`; a list in place of a name stands for its last item.

    The older form `{"object_type_names": ["a", "b"]}` is accepted too.

    Returns:
        Index (as a string) to name; None, with a line in the log, when there is no such file.

    Raises:
        ValueError: the file is not JSON, or not of one of these forms.
    """
    file = Path(mapping_file_path)
    if not file.is_file():
        logger.info("%s is missing. Inference output will not include class name.", file)
        return None
    try:
        mapping = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ValueError(f"{file} is not valid JSON: {err}") from err
    if not isinstance(mapping, dict):
        raise ValueError(
            f'index->name JSON mapping should be in "class": "label" format; {file} holds a '
            f"{type(mapping).__name__}"
        )
    names = mapping.get("object_type_names")
    if isinstance(names, list):
        mapping = {str(index): name for index, name in enumerate(names)}
    return {key: _label(file, key, value) for key, value in mapping.items()}


def _label(file: Path, key: str, value: object) -> str:
    label = value[-1] if isinstance(value, list) and value else value
    if not isinstance(label, str):
        raise ValueError(
            f"labels in index->name mapping must be either str or List[str]; {file} has {value!r} at {key!r}"
        )
    return label


def map_class_to_label(
    probs: list[Sequence[object]],
    mapping: dict[str, str] | None = None,
    lbl_classes: Sequence[Sequence[int]] | None = None,
) -> list[dict[str, object]]:
    """Return a dict from class name to value for each row; where classes share a name, the largest float.

    Args:
        probs: one row per request; usually probabilities.
        mapping: index to name; without it the index itself, as a string, is the name.
        lbl_classes: for each row, the class index of each value; by default 0, 1, 2, ...

    Raises:
        TypeError: `probs` is not a list or `mapping` not a dict.
        KeyError: the mapping lacks a class that was predicted.
    """
    if not isinstance(probs, list):
        raise TypeError(f"Convert classes to list before doing mapping; found {type(probs).__name__}")
    if mapping is not None and not isinstance(mapping, dict):
        raise TypeError(f"Mapping must be a dict; found {type(mapping).__name__}")
    rows = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    return [_named(classes, row, mapping) for classes, row in zip(rows, probs, strict=False)]


def _named(
    classes: Sequence[int], row: Sequence[object], mapping: dict[str, str] | None
) -> dict[str, object]:
    named: dict[str, object] = {}
    for index, value in zip(classes, row, strict=False):
        name = _name(index, mapping)
        earlier = named.get(name)  # ImageNet has two classes named crane
        if isinstance(earlier, float) and isinstance(value, float) and not value > earlier:
            continue
        named[name] = value
    return named


def _name(index: int, mapping: dict[str, str] | None) -> str:
    if mapping is None:
        return str(index)
    if str(index) not in mapping:
        raise KeyError(f"the model predicted class {index}, which index_to_name.json does not name")
    return mapping[str(index)]
