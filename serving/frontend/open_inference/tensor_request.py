"""A request of the Open Inference Protocol, independent of REST and gRPC, and its executor form.

Each input becomes one parameter of an `InferRequest`: its raw bytes, with datatype and shape as the content
type. The other members of the request travel as a `Wish` in a header, which also tells the executor to answer
with tensors.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

from torchere.handlers.tensors import Datatype, TensorError, check_shape, shown, tensor_type
from torchere.handlers.tensors.answer import WantedOutput, Wish, wish_header
from torchere.handlers.tensors.codec import check_byte_count
from torchere.handlers.tensors.enveloped import BytesAs
from torchere.serving.batching.stateful import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START
from torchere.serving.errors import InvalidRequest
from torchere.serving.types import InferRequest, Parameter

ParameterValue: TypeAlias = bool | int | float | str
Pairs: TypeAlias = tuple[tuple[str, str], ...]

MAX_TENSORS = 1000  # inputs, or outputs, of a request
MAX_PARAMETERS = 1000
MAX_NAME_LENGTH = 1024  # characters, of the names of tensors and of the ids of requests and sequences


class InputTensor(NamedTuple):
    """One input: raw little-endian elements. Their byte count matches datatype and shape."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    raw: bytes | memoryview


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """A client's request; its names have passed `check_names`.

    `binary` is the default form of outputs that `outputs` does not name. `framed` asks for a response body
    that delimits its own parts, for a caller that sees no headers (`tensor_answer.read_framed`).
    """

    inputs: tuple[InputTensor, ...]
    id: str = ""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    outputs: tuple[WantedOutput, ...] = ()
    binary: bool = False
    framed: bool = False


def input_tensor(
    name: str, datatype: Datatype, shape: Sequence[object], raw: bytes | memoryview, where: str
) -> InputTensor:
    """Return an input made of raw bytes; `where` names it in errors, for example `inputs[0]`.

    Raises:
        InvalidRequest: the shape is invalid, or the number of bytes does not match it.
    """
    try:
        sizes = check_shape(shape, f"{where}.shape")
        check_byte_count(len(raw), datatype, sizes, where)
    except TensorError as err:
        raise InvalidRequest(str(err)) from err
    return InputTensor(name, datatype, sizes, raw)


def infer_request(request: TensorRequest, json_bytes_as: BytesAs | None = None) -> InferRequest:
    """Translate a request to an `InferRequest`, without the id and the headers of a call.

    The protocol's parameter `timeout` is no deadline: Triton heeds it only where a model's queue allows it,
    which is not its default, and many clients pass seconds instead of microseconds.

    The client's id is for the response; of the handlers, only those that read JSON get it.

    `json_bytes_as` says how elements of BYTES are written in the JSON that the handler reads; None: it reads
    tensors.

    Raises:
        InvalidRequest: the id is too long, or there are too many parameters, or one that the server
            interprets is invalid; the text names the field.
    """
    check_length("id", request.id)
    if len(request.parameters) > MAX_PARAMETERS:
        raise InvalidRequest(
            f"parameters: found {len(request.parameters)}, expected at most {MAX_PARAMETERS}"
        )
    sequence = sequence_headers(request.parameters)
    wish = Wish(
        # The caller of a framed request adds the id to the response itself.
        id="" if request.framed and json_bytes_as is None else request.id,
        parameters=dict(request.parameters),
        outputs=request.outputs,
        binary=request.binary,
        framed=request.framed,
        ends_sequence=dict(sequence).get(SEQUENCE_END, ""),
        json_bytes_as=json_bytes_as,
    )
    values = tuple(
        [
            Parameter(tensor.name, cast("bytes", tensor.raw), tensor_type(tensor.datatype, tensor.shape))
            for tensor in request.inputs
        ]
    )
    return InferRequest("", values, (*sequence, wish_header(wish)))


def sequence_headers(parameters: Mapping[str, ParameterValue]) -> Pairs:
    """Return TorchServe's headers for the parameters `sequence_id`, `sequence_start` and `sequence_end`.

    An id of 0 or "" means that there is no sequence, as in Triton.

    Raises:
        InvalidRequest: the id is invalid, or there is a start or an end without an id.
    """
    sequence_id = parameters.get("sequence_id", 0)
    if isinstance(sequence_id, (bool, float)) or (isinstance(sequence_id, int) and sequence_id < 0):
        raise InvalidRequest(
            f"parameters.sequence_id: found {shown(sequence_id)}, "
            "expected a text, or a whole number of 0 or more"
        )
    check_length("parameters.sequence_id", str(sequence_id) if isinstance(sequence_id, str) else "")
    starts, ends = flag(parameters, "sequence_start"), flag(parameters, "sequence_end")
    if not sequence_id:
        if starts or ends:
            raise InvalidRequest(
                "parameters.sequence_id: found none, expected the id of the sequence that starts or ends"
            )
        return ()
    pairs = [(SEQUENCE_ID, str(sequence_id))]
    if starts:
        pairs.append((SEQUENCE_START, "true"))
    if ends:
        pairs.append((SEQUENCE_END, str(sequence_id)))
    return tuple(pairs)


def refuse_shared_memory(parameters: Container[str], where: str) -> None:
    """Refuse an input or output whose data is in Triton's shared memory.

    Raises:
        InvalidRequest: the parameters name a shared memory region.
    """
    if "shared_memory_region" in parameters:
        raise InvalidRequest(f"{where}: found shared_memory_region, and there is no shared memory here")


def check_names(where: str, names: Sequence[str]) -> None:
    """Refuse a list with too many names, or with a name that is too long, empty or repeated.

    Raises:
        InvalidRequest: a name is invalid; the text names the field, as `inputs[3].name`.
    """
    if len(names) > MAX_TENSORS:
        raise InvalidRequest(f"{where}: found {len(names)}, expected at most {MAX_TENSORS}")
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        if not name:
            raise InvalidRequest(f"{where}[{index}].name: found '', expected the name of a tensor")
        check_length(f"{where}[{index}].name", name)
        if name in seen:
            raise InvalidRequest(
                f"{where}[{index}].name: found {shown(name)}, expected a name that {where}[{seen[name]}] "
                "does not have"
            )
        seen[name] = index


def check_length(where: str, text: str) -> None:
    """Refuse a string that is longer than `MAX_NAME_LENGTH`.

    Raises:
        InvalidRequest: it is longer; the text names the field.
    """
    if len(text) > MAX_NAME_LENGTH:
        raise InvalidRequest(
            f"{where}: found a text of {len(text)} characters, expected at most {MAX_NAME_LENGTH}"
        )


def flag(
    parameters: Mapping[str, object], name: str, where: str = "parameters", default: bool = False
) -> bool:
    """Return the boolean called `name`; raise `InvalidRequest` for any other value."""
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{where}.{name}: found {shown(value)}, expected true or false")
    return value
