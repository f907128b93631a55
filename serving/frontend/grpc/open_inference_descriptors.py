"""Descriptors of the Open Inference Protocol's gRPC service under both of its names, for reflection.

Triton's and KServe's clients call `inference.GRPCInferenceService`. TorchServe's stubs call the same methods,
with the same messages, in another package. Client libraries register these messages in the default descriptor
pool of the process, so our messages use a pool of their own (`protos/generate.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from torchere.serving.frontend.grpc.protos import open_inference_pb2

_FILE: FileDescriptor = open_inference_pb2.DESCRIPTOR
SERVICE: ServiceDescriptor = _FILE.services_by_name["GRPCInferenceService"]
PUBLIC_NAME: str = SERVICE.full_name
TORCHSERVE_PACKAGE = "org.pytorch.serve.grpc.openinference"
TORCHSERVE_NAME = f"{TORCHSERVE_PACKAGE}.{SERVICE.name}"


def reflection_pool(files: Iterable[FileDescriptor]) -> DescriptorPool:
    """Return a descriptor pool with `files`, their imports, and this service under both of its names."""
    pool = DescriptorPool()
    known: set[str] = set()
    for file in (*files, _FILE):
        _add(pool, file, known)
    pool.AddSerializedFile(_under_torchserves_name().SerializeToString())
    return pool


def _add(pool: DescriptorPool, file: FileDescriptor, known: set[str]) -> None:
    if file.name in known:
        return
    known.add(file.name)
    for imported in file.dependencies:
        _add(pool, imported, known)
    pool.AddSerializedFile(file.serialized_pb)


def _under_torchserves_name() -> descriptor_pb2.FileDescriptorProto:
    copy = descriptor_pb2.FileDescriptorProto.FromString(_FILE.serialized_pb)
    copy.name = "torchere/serving/frontend/grpc/protos/open_inference_torchserve.proto"
    before, after = f".{copy.package}.", f".{TORCHSERVE_PACKAGE}."
    copy.package = TORCHSERVE_PACKAGE
    for message in copy.message_type:
        _rename_types(message, before, after)
    for method in copy.service[0].method:
        method.input_type = method.input_type.replace(before, after, 1)
        method.output_type = method.output_type.replace(before, after, 1)
    return copy


def _rename_types(message: descriptor_pb2.DescriptorProto, before: str, after: str) -> None:
    for field in message.field:
        if field.type_name.startswith(before):
            field.type_name = after + field.type_name[len(before) :]
    for nested in message.nested_type:
        _rename_types(nested, before, after)
