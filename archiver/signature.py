"""`signature.json`: a model's input and output tensors, so that an archive needs no handler code.

The file stands at the archive's root beside the model:

    {"version": 1,
     "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 64]}],
     "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}]}

Inputs are the model's positional arguments in order; outputs its results in order, a tuple or a dict
flattened. Datatypes are those of the Open Inference Protocol.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

SIGNATURE_NAME = "signature.json"
FORMAT = 1
MAX_TEXT_BYTES = 2**20  # the largest text that a reader must accept; thousands of tensors
MAX_DIMENSIONS = 64  # torch's own limit
ANY = -1  # a dimension that is free; the first one is then the batch

# Open Inference Protocol, "Tensor Data Types"; BF16 is the extension that Triton and KServe share.
DATATYPES = (
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
)
_LARGEST_DIMENSION = 2**63 - 1


class SignatureError(ValueError):
    """A signature is wrong; `str(error)` is one line: the field, the value found and the expected one."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name, datatype and shape. `ANY` in the shape is a dimension that may have any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def batched(self) -> bool:
        """Whether the first dimension is the batch."""
        return bool(self.shape) and self.shape[0] == ANY


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of a model, in order. Made by `parse`, or validated by `check`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def batched(self) -> bool:
        """Whether rows of several requests can go through the model together.

        They can when every input and every output has the batch as its first dimension.
        """
        return all(spec.batched for spec in (*self.inputs, *self.outputs))

    def check(self) -> None:
        """Raise SignatureError when a field has a value that `parse` would refuse."""
        parse(self.to_json())

    def to_json(self) -> str:
        """Return the text of `signature.json`; `parse` turns it back into an equal signature."""
        members = {
            "version": FORMAT,
            "inputs": [_members(spec) for spec in self.inputs],
            "outputs": [_members(spec) for spec in self.outputs],
        }
        return json.dumps(members, indent=2)


def parse(text: str) -> Signature:
    """Read the text of a `signature.json`.

    Raises:
        SignatureError: it is not JSON, or a field is missing or wrong; the text names the field.
    """
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SignatureError(f"{SIGNATURE_NAME} is not valid JSON: {error}") from error
    if not isinstance(whole, dict):
        _refuse("the whole", whole, "a JSON object")
    version = whole.get("version")
    if isinstance(version, bool) or version != FORMAT:
        _refuse("version", version, f"{FORMAT}; a later one needs a later torchere")
    return Signature(_specs(whole, "inputs"), _specs(whole, "outputs"))


def _specs(whole: dict[str, Any], field: str) -> tuple[TensorSpec, ...]:
    items = whole.get(field)
    if not isinstance(items, list) or not items:
        _refuse(field, items, "a list of at least one tensor")
    specs = tuple(_spec(item, f"{field}[{index}]") for index, item in enumerate(items))
    _refuse_twins(specs, field)
    return specs


def _spec(item: Any, field: str) -> TensorSpec:
    if not isinstance(item, dict):
        _refuse(field, item, "an object with name, datatype and shape")
    name, datatype = item.get("name"), item.get("datatype")
    if not isinstance(name, str) or not name or not name.isprintable():
        _refuse(f"{field}.name", name, "a text of printable characters")
    if datatype not in DATATYPES:
        _refuse(f"{field}.datatype", datatype, f"one of {', '.join(DATATYPES)}")
    return TensorSpec(name, datatype, _shape(item.get("shape"), f"{field}.shape"))


def _shape(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        _refuse(field, value, f"a list of at most {MAX_DIMENSIONS} sizes")
    for size in value:
        if isinstance(size, bool) or not isinstance(size, int) or not ANY <= size <= _LARGEST_DIMENSION:
            _refuse(field, value, "whole numbers: sizes, or -1 for any size")
    return tuple(value)


def _refuse_twins(specs: Sequence[TensorSpec], field: str) -> None:
    seen: set[str] = set()
    for index, spec in enumerate(specs):
        if spec.name in seen:
            _refuse(f"{field}[{index}].name", spec.name, f"a name that no other of the {field} has")
        seen.add(spec.name)


def _members(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _refuse(field: str, found: Any, expected: str) -> NoReturn:
    shown = ascii(found)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise SignatureError(f"{SIGNATURE_NAME}: {field} is {shown}; expected {expected}")


def read_signature(model_dir: str | Path) -> Signature | None:
    """Return the signature of an archive; None when it has none.

    Raises:
        SignatureError: the file exists and is invalid.
    """
    path = Path(model_dir, SIGNATURE_NAME)
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise SignatureError(
            f"{SIGNATURE_NAME} has {path.stat().st_size} bytes; expected at most {MAX_TEXT_BYTES}"
        )
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as err:
        raise SignatureError(f"{SIGNATURE_NAME} is no UTF-8 text: {err}") from err


def archive_signature(model_dir: str | Path) -> Signature | None:
    """Return the signature like `read_signature`, but None for an invalid file, with a warning.

    An archive may use a file of that name for a purpose of its own.
    """
    try:
        return read_signature(model_dir)
    except SignatureError as err:
        logger.warning("%s is not used: %s", Path(model_dir, SIGNATURE_NAME), err)
        return None
