"""The gRPC calls of `torchere predict`; converts gRPC errors to those of the REST client."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import EncodeError, Message

from torchere.client import (
    AnswerError,
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InferResult,
    ModelMetadata,
    Prediction,
    Tensor,
    TensorMetadata,
    Unauthorized,
    UnreadableAnswer,
)
from torchere.client.exchange import bearer
from torchere.client.key_file import is_loopback
from torchere.client.transport import certificates_named
from torchere.serving.frontend.grpc.protos import inference_pb2, open_inference_pb2

_PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_METADATA = "/inference.GRPCInferenceService/ModelMetadata"
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_UNBOUNDED = -1  # no limit in the client: the server enforces its own


class Connection:
    """A channel to a server, with some of the methods of `torchere.client.Client`, and its errors.

    Use it in a `with` statement.

    Args:
        address: host:port. The prefix https:// selects TLS; trusted certificates are OpenSSL's or those in
            `SSL_CERT_FILE`, as over REST.
        token: the inference key; None: no key is sent.
        timeout_s: the timeout of each call, in seconds.
    """

    def __init__(self, address: str, token: str | None, timeout_s: float) -> None:
        self._address = address
        self._metadata = [("authorization", bearer(token))] if token is not None else []
        self._timeout_s = timeout_s
        self._channel = _channel(address)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_error: object) -> None:
        self._channel.close()

    def predict(
        self, model: str, data: bytes, *, version: str | None = None, content_type: str | None = None
    ) -> Prediction:
        """Call TorchServe's `Predictions`; the handler gets the bytes as `data`, and no content type."""
        request = inference_pb2.PredictionsRequest(
            model_name=model, model_version=version or "", input={"data": data}
        )
        return Prediction(self._call(_PREDICTIONS, request, inference_pb2.PredictionResponse).prediction)

    def model_metadata(self, model: str, version: str | None = None) -> ModelMetadata:
        """Call the Open Inference Protocol's `ModelMetadata`; the archive declares the inputs and outputs."""
        request = open_inference_pb2.ModelMetadataRequest(name=model, version=version or "")
        told = self._call(_METADATA, request, open_inference_pb2.ModelMetadataResponse)
        inputs, outputs = (
            tuple(TensorMetadata(one.name, one.datatype, tuple(one.shape)) for one in tensors)
            for tensors in (told.inputs, told.outputs)
        )
        return ModelMetadata(told.name, tuple(told.versions), told.platform, inputs, outputs)

    def infer(self, model: str, inputs: Sequence[Tensor], *, version: str | None = None) -> InferResult:
        """Call the Open Inference Protocol's `ModelInfer` with raw tensors."""
        request = open_inference_pb2.ModelInferRequest(model_name=model, model_version=version or "")
        for one in inputs:
            request.inputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
            request.raw_input_contents.append(one.data)
        answer = self._call(_INFER, request, open_inference_pb2.ModelInferResponse)
        if len(answer.raw_output_contents) != len(answer.outputs):
            raise UnreadableAnswer("expected raw tensors, found others; ask this server over REST")
        outputs = tuple(
            Tensor(one.name, one.datatype, tuple(one.shape), raw)
            for one, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        )
        return InferResult(answer.model_name, answer.model_version, outputs)

    def _call(self, path: str, request: Message, answer: type[Message]) -> Any:
        call: Any = self._channel.unary_unary(path, response_deserializer=answer.FromString)
        try:  # not in the call, where grpcio prints a traceback for any error
            body = request.SerializeToString()
        except EncodeError as err:
            raise ValueError("the request is larger than 2 GiB, or does not fit into memory") from err
        try:
            return call(body, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as err:
            raise self._error(err) from err

    def _error(self, err: Any) -> ClientError:
        code, details = err.code(), err.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"no answer within {self._timeout_s:g} s")
        if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
            return ConnectionFailed(f"no connection to {self._address}: {details}", refused=True)
        # The second line of TorchServe's error details is the name of a Java class.
        kind = Unauthorized if code is grpc.StatusCode.PERMISSION_DENIED else AnswerError
        return kind(details.partition("\n")[0], code.value[0], kind=code.name)


def _channel(address: str) -> grpc.Channel:
    options = [(f"grpc.max_{way}_message_length", _UNBOUNDED) for way in ("send", "receive")]
    if is_loopback(address):  # as with REST, a proxy that the environment sets must not get the key
        options.append(("grpc.enable_http_proxy", 0))
    scheme, separator, peer = address.rpartition("://")
    if not separator:
        return grpc.insecure_channel(address, options)
    if scheme != "https":
        raise ValueError(f"the address is {address!r}; expected host:port, or https://host:port for TLS")
    # None: the certificates bundled with gRPC. A file that is not there would be None, too, from `ssl` alone.
    trusted = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    with certificates_named():
        ssl.create_default_context(cafile=trusted)  # raises an error for a bad file; gRPC only logs it
    roots = Path(trusted).read_bytes() if trusted else None
    return grpc.secure_channel(peer, grpc.ssl_channel_credentials(roots), options)
