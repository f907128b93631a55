"""One gRPC call and how it ended, as the recordings describe them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import grpc
from conformity.comparison import differences
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2

TIMEOUT_S = 60.0
SERVICES = {
    "InferenceAPIsService": ("inference", inference_pb2.DESCRIPTOR),
    "ManagementAPIsService": ("management", management_pb2.DESCRIPTOR),
}


@dataclass(frozen=True, slots=True)
class RpcAnswer:
    """How a call ended.

    `messages` holds the one field that matters of each message, in order: text, with JSON as its value.
    `details` is the status text of a call that failed.
    """

    code: str
    messages: tuple[Any, ...] = ()
    details: str = ""


def call(record: Mapping[str, Any], addresses: Mapping[str, str]) -> RpcAnswer:
    """Make a recorded call on a channel of its own."""
    api, file = SERVICES[record["service"]]
    method = file.services_by_name[record["service"]].methods_by_name[record["method"]]
    with grpc.insecure_channel(addresses[api]) as channel:
        try:
            return RpcAnswer("OK", tuple(_messages(channel, method, record["request"])))
        except grpc.RpcError as err:
            return RpcAnswer(err.code().name, (), err.details() or "")


def _messages(channel: grpc.Channel, method: MethodDescriptor, fields: Any) -> Iterator[Any]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    encode = GetMessageClass(method.input_type).SerializeToString
    decode = GetMessageClass(method.output_type).FromString
    if method.client_streaming:
        requests = iter([_request(method, each) for each in fields])
        replies = list(channel.stream_stream(path, encode, decode)(requests, timeout=TIMEOUT_S))
    elif method.server_streaming:
        replies = list(
            channel.unary_stream(path, encode, decode)(_request(method, fields), timeout=TIMEOUT_S)
        )
    else:
        replies = [channel.unary_unary(path, encode, decode)(_request(method, fields), timeout=TIMEOUT_S)]
    yield from (_telling(reply) for reply in replies)


def _request(method: MethodDescriptor, fields: Mapping[str, Any]) -> Message:
    if "input" in fields:
        fields = {**fields, "input": {name: text.encode() for name, text in fields["input"].items()}}
    return GetMessageClass(method.input_type)(**fields)


def _telling(reply: Message) -> Any:
    """What matters of a message: its first field (health, prediction or msg), or an error in a stream."""
    first = reply.DESCRIPTOR.fields[0].name
    if "status" in reply.DESCRIPTOR.fields_by_name and reply.HasField("status"):
        status = getattr(reply, "status")  # noqa: B009  # generated classes have no attributes to check
        return {"code": status.code, "message": status.message}
    value = getattr(reply, first)
    return _value(value.decode("latin-1") if isinstance(value, bytes) else value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def recorded_rpc_answer(response: Mapping[str, Any]) -> RpcAnswer:
    """The end of a recorded call."""
    if response["code"] != "OK":
        return RpcAnswer(response["code"], (), response.get("details", ""))
    if "messages" in response:
        return RpcAnswer("OK", tuple(_value(message["prediction"]) for message in response["messages"]))
    field = next(name for name in ("health", "msg", "prediction") if name in response)
    return RpcAnswer("OK", (_value(response[field]),))


def rpc_differences(want: RpcAnswer, got: RpcAnswer, ours: Set[str]) -> Iterator[str]:
    """Yield a line for each difference."""
    if want.code != got.code:
        yield f"code {got.code} ({got.details!r}), expected {want.code}"
    elif want.details != got.details:
        yield f"details {got.details!r}, expected {want.details!r}"
    else:
        yield from differences(list(want.messages), list(got.messages), ours, "messages")
