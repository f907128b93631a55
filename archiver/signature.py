"""`signature.json`: a model's input and output tensors, so that an archive needs no handler code.

The file stands at the archive's root beside the model:

    {"version": 1,
     "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 64]}],
     "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}]}

Inputs are the model's positional arguments in order; outputs its results in order, a tuple or a dict
flattened. Datatypes are those of the Open Inference Protocol. Other members are optional:

* `limits` of an input, `[{"dimension": 2, "least": 64, "most": 1024, "multiple": 32}]`;
  dimensions whose limits have the same `"name"` have one size in all inputs.
* `values` of an input, `{"least": 0, "most": 30521}`: the numbers that the input may hold.
* `"batched": false` beside `inputs`, which needs version 2: the model runs requests one by one, although the
  first dimensions are free.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

SIGNATURE_NAME = "signature.json"
FORMAT = 2  # the latest; 1 has no `batched`
MAX_TEXT_BYTES = 2**20  # the largest file that readers accept; enough for thousands of tensors
MAX_DIMENSIONS = 64  # torch's own limit
ANY = -1  # a free dimension; a free first dimension is the batch

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
class Limit:
    """The sizes that a free dimension may have: multiples of `multiple` from `least` to `most`.

    Dimensions with the same `name` have the same size in a request; "": the size is independent of others.
    """

    dimension: int
    least: int = 1
    most: int | None = None
    multiple: int = 1
    name: str = ""

    def takes(self, size: int) -> bool:
        """Return whether the dimension may have this size."""
        return self.least <= size <= (self.most or size) and size % self.multiple == 0

    @property
    def smallest(self) -> int:
        """The smallest size that the dimension may have."""
        return -(-self.least // self.multiple) * self.multiple

    def __str__(self) -> str:
        bounds = f"{self.least} to {self.most}" if self.most else f"at least {self.least}"
        sizes = f"a multiple of {self.multiple}, {bounds}" if self.multiple > 1 else bounds
        return f"dimension {self.dimension} to be {sizes}"


def common_limit(limits: Sequence[Limit]) -> Limit:
    """Return the limit for the sizes that all of these allow, with the dimension of the first one."""
    return Limit(
        limits[0].dimension if limits else 0,
        max((limit.least for limit in limits), default=1),
        min((limit.most for limit in limits if limit.most), default=None),
        math.lcm(*(limit.multiple for limit in limits)),
    )


@dataclass(frozen=True, slots=True)
class Values:
    """The whole numbers that a tensor may hold."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"whole numbers from {self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name, datatype and shape. `ANY` in the shape is a dimension that may have any size.

    Only inputs have the other two fields: `limits` for the free dimensions that do not allow every size, and
    `values` that the tensor may hold (None: all of the datatype).
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    limits: tuple[Limit, ...] = ()
    values: Values | None = None

    def exceeded(self, shape: Sequence[int]) -> Limit | None:
        """Return the first limit that the shape violates; the shape has as many dimensions as the tensor."""
        return next((limit for limit in self.limits if not limit.takes(shape[limit.dimension])), None)

    def limits_of(self, dimension: int) -> list[Limit]:
        """Return the limits of a dimension; an empty list if it allows every size."""
        return [limit for limit in self.limits if limit.dimension == dimension]

    @property
    def batched(self) -> bool:
        """Whether the first dimension is the batch."""
        return bool(self.shape) and self.shape[0] == ANY


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of a model, in order. Made by `parse`, or validated by `check`.

    `one_by_one`: a free first dimension is not a batch, but, for example, the points of a cloud.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    one_by_one: bool = False

    @property
    def batched(self) -> bool:
        """Whether rows of several requests can go through the model together.

        They can if every input and every output has the batch as its first dimension.
        """
        return not self.one_by_one and all(spec.batched for spec in (*self.inputs, *self.outputs))

    def check(self) -> None:
        """Raise SignatureError when a field has a value that `parse` would refuse."""
        parse(self.to_json())

    def to_json(self) -> str:
        """Return the text of `signature.json`; `parse` turns it back into an equal signature."""
        members: dict[str, Any] = {
            "version": FORMAT if self.one_by_one else 1,
            "inputs": [_members(spec) for spec in self.inputs],
            "outputs": [_members(spec) for spec in self.outputs],
        }
        if self.one_by_one:
            members["batched"] = False
        return json.dumps(members, indent=2)


def parse(text: str) -> Signature:
    """Read the text of a `signature.json`.

    Raises:
        SignatureError: the text is not JSON, or a field is missing or wrong; the error names the field.
    """
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SignatureError(f"{SIGNATURE_NAME} is not valid JSON: {error}") from error
    if not isinstance(whole, dict):
        _refuse("the whole", whole, "a JSON object")
    version = whole.get("version")
    if isinstance(version, bool) or version not in range(1, FORMAT + 1):
        _refuse("version", version, f"1 or {FORMAT}; a later one needs a later torchere")
    batched = whole.get("batched", True)
    if not isinstance(batched, bool):
        _refuse("batched", batched, "true or false")
    return Signature(_specs(whole, "inputs"), _specs(whole, "outputs"), not batched)


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
    shape = _shape(item.get("shape"), f"{field}.shape")
    limits = _limits(item.get("limits", []), shape, f"{field}.limits")
    return TensorSpec(name, datatype, shape, limits, _values(item.get("values"), f"{field}.values"))


def _values(value: Any, field: str) -> Values | None:
    if value is None:
        return None
    least, most = (value.get("least"), value.get("most")) if isinstance(value, dict) else (None, None)
    if type(least) is not int or type(most) is not int or least > most:
        _refuse(field, value, "an object with the whole numbers least and most")
    return Values(least, most)


_LIMIT = {"dimension": None, "least": 1, "most": None, "multiple": 1, "name": ""}


def _limits(value: Any, shape: tuple[int, ...], field: str) -> tuple[Limit, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        _refuse(field, value, "a list of objects")
    found = tuple(Limit(*(item.get(key, default) for key, default in _LIMIT.items())) for item in value)
    for limit in found:
        sizes = (limit.least, limit.multiple, limit.least if limit.most is None else limit.most)
        if not all(type(size) is int and 1 <= size <= _LARGEST_DIMENSION for size in sizes):
            _refuse(field, value, "whole numbers above 0 as least, most and multiple")
        if not isinstance(limit.name, str):
            _refuse(field, value, "a text as name")
        if type(limit.dimension) is not int or not 0 <= limit.dimension < len(shape):
            _refuse(field, value, f"a dimension from 0 to {len(shape) - 1}")
    return found


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
    members = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    limits = [
        {name: value for name, value in asdict(limit).items() if value not in (None, "")}
        for limit in spec.limits
    ]
    values = asdict(spec.values) if spec.values else None
    more = {"limits": limits, "values": values}
    return members | {name: value for name, value in more.items() if value}


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


def smallest_shapes(specs: Sequence[TensorSpec]) -> list[list[int]]:
    """Return the smallest shape of each input; free dimensions without a limit have the size 1.

    Dimensions whose limits share a name get the same size, which is within the limits of all of them.
    """
    named: dict[str, list[Limit]] = {}
    for spec in specs:
        for limit in spec.limits:
            named.setdefault(limit.name, []).append(limit)
    shared = {name: common_limit(limits).smallest for name, limits in named.items() if name}
    shapes = []
    for spec in specs:
        sizes = {limit.dimension: shared.get(limit.name) or limit.smallest for limit in spec.limits}
        shapes.append([sizes.get(place, 1) if size == ANY else size for place, size in enumerate(spec.shape)])
    return shapes
