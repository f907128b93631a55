"""Requests over gRPC, sent until the answer is right, with gRPC's own client: h2load looks into none."""

from __future__ import annotations

import time

import grpc

from harness.errors import Failed
from harness.models import raw_row
from harness.processes import START_S, Endpoint, last_words
from torchere.serving.frontend.grpc.protos.open_inference_pb2 import ModelInferRequest

MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
_SHOWN_BYTES = 200
_UNBOUNDED = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]


def row_message(model: str, features: int) -> bytes:
    """Return the serialised request of `MODEL_INFER` with a row of float32 as a raw tensor."""
    request = ModelInferRequest(model_name=model, raw_input_contents=[raw_row(features)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, features])
    return request.SerializeToString()


def until_called(endpoint: Endpoint, method: str, message: bytes, wanted: bytes) -> bytes:
    """Call `method` with a serialised message until the answer has `wanted` in it, and return the answer.

    Raises:
        Failed: it did not within `START_S` of the server's start, or the server ended.
    """
    found = ""
    with grpc.insecure_channel(endpoint.grpc, _UNBOUNDED) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)  # bytes in, bytes out
        while time.monotonic() < endpoint.started_s + START_S and endpoint.process.poll() is None:
            try:
                answer = call(message, timeout=START_S, wait_for_ready=True)
            except grpc.RpcError as err:
                found = str(err)
                time.sleep(0.1)
                continue
            if wanted in answer:
                return bytes(answer)
            found = f"{len(answer)} bytes, {answer[:_SHOWN_BYTES]!r}"
    shown = wanted[:_SHOWN_BYTES]
    raise Failed(f"the answer was {found}, expected one with {shown!r}; {last_words(endpoint)}")
