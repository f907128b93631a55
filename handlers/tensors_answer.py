"""Response bodies of the Open Inference Protocol, encoded from a handler's answers.

A body is JSON, or JSON followed by binary tensors. For callers without headers the length of the JSON comes
first in the body. The executor encodes the body, so the frontend only forwards it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from torchere.archiver.signature import TensorSpec
from torchere.handlers.context import RequestProcessor
from torchere.handlers.encode import encode_answer
from torchere.handlers.signature import archive_signature
from torchere.handlers.tensors import TensorError, shown
from torchere.handlers.tensors_bytes import view_of_tensor
from torchere.handlers.tensors_classes import Labels, classified
from torchere.handlers.tensors_json import json_from_tensor
from torchere.handlers.tensors_outputs import Output, outputs_of

OPEN_INFERENCE = ":open-inference"
"""Header of a request that came as tensors: a `Wish` as JSON. No HTTP header can be called so."""
HEADER_LENGTH = "inference-header-content-length"  # response header: bytes of JSON at the body's start
SEQUENCE_END = "ts_request_sequence_end"
FRAME = struct.Struct("<I")  # length of the JSON in a framed body
_BAD_REQUEST = 400


class WantedOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """An output the client asks for by name."""

    name: str
    binary: bool = False
    classes: int = 0  # above 0: the top values only, this many, as `value:index[:label]`


class Wish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a protocol request other than its inputs; handlers may read them, too."""

    id: str = ""
    parameters: dict[str, bool | int | float | str] = {}
    outputs: tuple[WantedOutput, ...] = ()  # empty: all outputs
    binary: bool = False  # when `outputs` is empty: whether all outputs are binary
    framed: bool = False  # all outputs are binary, and the body begins with the length of its JSON
    ends_sequence: str = ""  # id of the sequence that this request ends


class Encoded(NamedTuple):
    """A body, and the length of its JSON in bytes; None: all of the body is JSON, or it is framed."""

    body: bytes
    json_bytes: int | None


_wish_decoder = msgspec.json.Decoder(Wish)
_encoder = msgspec.json.Encoder()


class AnswerEncoder:
    """Encodes the answers of one handler. Not thread-safe: belongs to one executor.

    Args:
        model_name: as registered.
        model_version: likewise.
        model_dir: the unpacked archive; its signature, which names the outputs, is read at the first request
            with tensors.
    """

    labels: Labels | None = None  # names of classes by index, as handlers keep them in `mapping`

    def __init__(self, model_name: str, model_version: str, model_dir: str) -> None:
        self._identity = {"model_name": model_name, "model_version": model_version}
        self._model_dir = model_dir
        self._specs: tuple[TensorSpec, ...] | None = None

    def encode(self, answer: object, processor: RequestProcessor) -> bytes:
        """Encode one answer: as tensors if the request came as tensors, else by `encode_answer`.

        Raises:
            UnsupportedOutput: the answer has a type that can't be encoded.
        """
        wish_text = processor.get_request_property(OPEN_INFERENCE)
        return encode_answer(answer) if wish_text is None else self._tensors(answer, wish_text, processor)

    def _tensors(self, answer: object, wish_text: str, processor: RequestProcessor) -> bytes:
        """Encode an answer as tensors and set the headers; status 400 if the wish can't be met.

        An answer whose status the handler set to 400 or more is an error text, and is not encoded as tensors.
        """
        wish = read_wish(wish_text)
        if wish.ends_sequence:
            processor.response_headers.setdefault(SEQUENCE_END, wish.ends_sequence)
        if processor.status_code >= _BAD_REQUEST:
            return encode_answer(answer)
        if self._specs is None:
            signature = archive_signature(self._model_dir)
            self._specs = signature.outputs if signature else ()
        try:
            outputs = wanted_outputs(outputs_of(answer, self._specs), wish, self.labels)
            encoded = encode_outputs(self._identity, outputs, wish)
        except TensorError as err:
            processor.report_status(_BAD_REQUEST)
            return str(err).encode()
        _set_headers(processor.response_headers, encoded)
        return encoded.body


def read_wish(text: str) -> Wish:
    """Parse the wish that the frontend put into the header."""
    return _wish_decoder.decode(text)


def wish_header(wish: Wish) -> tuple[str, str]:
    """Return the header that carries a wish to the executor."""
    return OPEN_INFERENCE, _encoder.encode(wish).decode()


def encode_outputs(
    identity: Mapping[str, str], outputs: Sequence[tuple[Output, bool]], wish: Wish
) -> Encoded:
    """Encode a body from (output, whether it is sent as binary data) pairs.

    Raises:
        TensorError: an output to be sent as JSON has BYTES that are not UTF-8.
    """
    blobs = []
    members = []
    for output, is_binary in outputs:
        member: dict[str, Any] = {
            "name": output.name,
            "datatype": output.datatype.name,
            "shape": list(output.shape),
        }
        if is_binary:
            blobs.append(view_of_tensor(output.tensor, output.datatype))  # joining it is its only copy
            member["parameters"] = {"binary_data_size": blobs[-1].nbytes}
        else:
            member["data"] = json_from_tensor(output.tensor, output.datatype, f"output {output.name!r}")
        members.append(member)
    named = {"id": wish.id, **identity} if wish.id else identity
    head = _encoder.encode({**named, "outputs": members})
    if wish.framed:
        return Encoded(b"".join([FRAME.pack(len(head)), head, *blobs]), None)
    if not any(is_binary for _, is_binary in outputs):
        return Encoded(head, None)
    return Encoded(b"".join([head, *blobs]), len(head))


def wanted_outputs(outputs: list[Output], wish: Wish, labels: Labels | None) -> list[tuple[Output, bool]]:
    """Return the outputs that a wish names, in its order, each with whether it is sent as binary data.

    Raises:
        TensorError: the wish names an unknown output, or asks for the classes of a BYTES output.
    """
    if not wish.outputs:
        return [(output, wish.binary or wish.framed) for output in outputs]
    named = {output.name: output for output in outputs}
    chosen = []
    for index, wanted in enumerate(wish.outputs):
        output = named.get(wanted.name)
        if output is None:
            known = ", ".join(map(shown, list(named)[:20])) or "nothing: the model gave no outputs"
            raise TensorError(f"outputs[{index}].name", shown(wanted.name), f"one of {known}")
        if wanted.classes:
            output = classified(output, wanted.classes, labels, f"outputs[{index}]")
        chosen.append((output, wanted.binary or wish.framed))
    return chosen


def _set_headers(headers: dict[str, str], encoded: Encoded) -> None:
    for name in [name for name in headers if name.lower() == "content-type"]:
        del headers[name]  # the handler's content type described the answer before it was encoded as tensors
    headers["content-type"] = "application/json" if encoded.json_bytes is None else "application/octet-stream"
    if encoded.json_bytes is not None:
        headers[HEADER_LENGTH] = str(encoded.json_bytes)
