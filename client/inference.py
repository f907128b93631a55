"""The Open Inference Protocol (v2) over REST: inference requests and responses, without I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchere.client import tensors
from torchere.client.errors import ModelFailed, UnreadableAnswer
from torchere.client.exchange import (
    JSON,
    OTHER_FORM,
    Answer,
    Operation,
    Request,
    json_body,
    merged,
    path,
)
from torchere.client.predictions import OCTETS
from torchere.client.tensors import Tensor

if TYPE_CHECKING:
    from torchere.client.tensors import Array

JSON_LENGTH = "inference-header-content-length"  # bytes of JSON before the raw tensors


@dataclass(frozen=True, slots=True)
class InferResult:
    """The response to an inference request.

    Attributes:
        model_name: the model that answered.
        model_version: the version that answered.
        tensors: the outputs as received; `result["name"]` and `outputs` give arrays.
        id: the id of the request, as the client chose it; "" for none.
        parameters: the response parameters.
        request_id: the request id in the server's logs; "" without one.
    """

    model_name: str
    model_version: str
    tensors: tuple[Tensor, ...]
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    request_id: str = ""

    @property
    def outputs(self) -> dict[str, Array]:
        """The outputs as arrays by name, in the model's order; created anew at each access."""
        return {one.name: one.numpy() for one in self.tensors}

    def __getitem__(self, name: str) -> Array:
        for one in self.tensors:
            if one.name == name:
                return one.numpy()
        raise KeyError(f"no output {name!r}; there is {', '.join(one.name for one in self.tensors)}")


@dataclass(frozen=True, slots=True)
class InferOptions:
    """The optional fields of an inference request.

    Args:
        outputs: names of the requested outputs; empty for all.
        binary: send and request tensors as raw bytes; False uses JSON, which is several times slower.
        parameters: for the model, by name; values are text, numbers and booleans.
        id: echoed by the server.
        sequence_id: the sequence of a stateful model that this request belongs to.
        sequence_start: whether this is the first request of the sequence.
        sequence_end: whether this is the last request of the sequence.

    Raises:
        TypeError: `outputs` is a str.
    """

    outputs: Sequence[str] = ()
    binary: bool = True
    parameters: Mapping[str, object] = field(default_factory=dict)
    id: str = ""
    sequence_id: str | int = ""
    sequence_start: bool = False
    sequence_end: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.outputs, str):  # a str is a sequence as well: of names of one letter
            raise TypeError(f"outputs: found {self.outputs!r}, expected a list of names: [{self.outputs!r}]")


Inputs = Mapping[str, object] | Sequence[Tensor]


def infer(
    model: str,
    inputs: Inputs,
    options: InferOptions | None,
    *,
    version: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Operation[InferResult]:
    """Build an inference request. See `Client.infer`.

    Raises:
        TypeError, ValueError: an input can't be sent.
    """
    options = options or InferOptions()
    head, blobs = _message(_tensors(inputs), options)
    text = json_body(head)
    form = {"content-type": OCTETS, JSON_LENGTH: str(len(text))} if options.binary else {"content-type": JSON}
    sent = merged(headers or {}, form)
    body = b"".join([text, *blobs])
    return Operation(Request("POST", model_path(model, version, "infer"), headers=sent, body=body), result)


def infer_stream(
    model: str, inputs: Inputs, options: InferOptions | None, *, version: str | None = None
) -> Operation[object]:
    """Build an inference request for a streamed response: server-sent events, in JSON. See `infer`."""
    return infer(model, inputs, options, version=version, headers={"accept": "text/event-stream"})


class Events:
    """Parses a stream of server-sent events into results: call `feed` for each part, then `end`."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._failure: ModelFailed | None = None

    def feed(self, part: bytes) -> Iterator[InferResult]:
        """Yield the results of the events that this part completes.

        Raises:
            UnreadableAnswer: the part is not an event, or the event holds no inference response.
        """
        for event in self._cut(part):
            answer = Answer(event)
            said = answer.json_object()
            if "error" in said:
                self._failure = ModelFailed(str(said["error"]), answer.status)
            else:
                yield result(answer)

    def end(self) -> None:
        """End the stream, and raise the error event that it contained, if any.

        `feed` does not raise it: a passed deadline is an error event, too, and the transport raises
        `DeadlineExceeded` for it before the stream ends.

        Raises:
            ModelFailed: the model failed during the stream; the status is 200, which was already sent.
            UnreadableAnswer: the last bytes are not a complete event.
        """
        if self._rest.strip():
            raise _no_event(self._rest)
        if self._failure is not None:
            raise self._failure

    def _cut(self, part: bytes) -> Iterator[bytes]:
        start = max(len(self._rest) - 1, 0)  # earlier bytes were searched; an event may span many parts
        self._rest += part
        while (end := self._rest.find(b"\n\n", start)) >= 0:
            event = bytes(self._rest[:end])
            del self._rest[: end + 2]
            start = 0
            if event.startswith(b"data:"):
                yield event.removeprefix(b"data:").strip()
            elif event.strip() and not event.startswith(b":"):  # a colon begins a comment
                raise _no_event(event)


def _no_event(found: bytes | bytearray) -> UnreadableAnswer:
    # A handler that parses JSON itself, as TorchServe's do, ignores the request for events.
    return UnreadableAnswer(f"expected server-sent events, found {bytes(found[:200])!r}")


def model_path(model: str, version: str | None, verb: str = "") -> str:
    """Return the path of a model in this protocol."""
    return path("v2", "models", model, "versions" if version else None, version, verb)


def result(answer: Answer) -> InferResult:
    """Parse an inference response in binary or JSON form.

    Raises:
        UnreadableAnswer: the response is not an inference response.
    """
    head, rest = _split(answer)
    try:
        return InferResult(
            model_name=str(head.get("model_name", "")),
            model_version=str(head.get("model_version", "")),
            tensors=tuple(_outputs(head["outputs"], rest)),
            id=str(head.get("id") or ""),
            parameters=head.get("parameters") or {},
            request_id=answer.request_id,
        )
    except OTHER_FORM as err:
        raise UnreadableAnswer(
            f"expected an inference response, found {answer.body[:200]!r}: {err!r}"
        ) from err


def _tensors(inputs: Inputs) -> list[Tensor]:
    if isinstance(inputs, Mapping):
        return [tensors.tensor(name, value) for name, value in inputs.items()]
    given = list(inputs)
    for one in given:
        if not isinstance(one, Tensor):
            raise TypeError(
                f"the inputs are a {type(inputs).__name__}; expected a dict of arrays by name, or Tensors"
            )
    return given


def _message(inputs: list[Tensor], options: InferOptions) -> tuple[dict[str, Any], list[bytes]]:
    parameters = dict(options.parameters)
    if options.binary and not options.outputs:
        parameters["binary_data_output"] = True
    if options.sequence_id != "":
        parameters["sequence_id"] = options.sequence_id
        parameters["sequence_start"] = options.sequence_start
        parameters["sequence_end"] = options.sequence_end
    head: dict[str, Any] = {"inputs": [_input(one, options.binary) for one in inputs]}
    if options.id:
        head["id"] = options.id
    if parameters:
        head["parameters"] = parameters
    if options.outputs:
        head["outputs"] = [
            {"name": name, "parameters": {"binary_data": options.binary}} for name in options.outputs
        ]
    return head, [one.data for one in inputs] if options.binary else []


def _input(one: Tensor, binary: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
    if binary:
        described["parameters"] = {"binary_data_size": len(one.data)}
    else:
        described["data"] = tensors.to_json(one)
    return described


def _split(answer: Answer) -> tuple[dict[str, Any], memoryview]:
    length = answer.headers.get(JSON_LENGTH)
    if length is None:
        return answer.json_object(), memoryview(b"")
    try:
        head = json.loads(answer.body[: int(length)])
    except (ValueError, RecursionError) as err:
        raise UnreadableAnswer(f"expected {length} bytes of JSON, found {answer.body[:200]!r}") from err
    return head, memoryview(answer.body)[int(length) :]


def _outputs(described: list[dict[str, Any]], rest: memoryview) -> Iterator[Tensor]:
    position = 0
    for one in described:
        name, datatype, shape = str(one["name"]), str(one["datatype"]), [int(size) for size in one["shape"]]
        size = (one.get("parameters") or {}).get("binary_data_size")
        if size is None:
            yield tensors.from_json(name, datatype, shape, one["data"])
            continue
        if not 0 <= size <= len(rest) - position:
            raise ValueError(f"{name!r} has {size} bytes, and {len(rest) - position} are left")
        yield Tensor(name, datatype, tuple(shape), bytes(rest[position : position + size]))
        position += size
