"""Descriptors, for reflection, of the two services with two names: the v2 protocol's, and reflection itself.

Triton's and KServe's clients call `inference.GRPCInferenceService`. TorchServe's stubs call the same methods,
with the same messages, in another package. Client libraries register these messages in the default descriptor
pool of the process, so our messages use a pool of their own (`protos/generate.py`).

Version 1 of reflection has the messages of version 1alpha, which the library has, in another package.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2

from torchere.serving.frontend.grpc.protos import open_inference_pb2

_FILE: FileDescriptor = open_inference_pb2.DESCRIPTOR
SERVICE: ServiceDescriptor = _FILE.services_by_name["GRPCInferenceService"]
PUBLIC_NAME: str = SERVICE.full_name
TORCHSERVE_PACKAGE = "org.pytorch.serve.grpc.openinference"
TORCHSERVE_NAME = f"{TORCHSERVE_PACKAGE}.{SERVICE.name}"

REFLECTION: ServiceDescriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_REFLECTION_PACKAGE = "grpc.reflection.v1"  # newer clients call it first, and some do not fall back
REFLECTION_NAMES = (f"{_REFLECTION_PACKAGE}.{REFLECTION.name}", REFLECTION.full_name)


def reflection_pool(files: Iterable[FileDescriptor]) -> DescriptorPool:
    """Return a descriptor pool with `files`, their imports, and both services under both of their names."""
    pool = DescriptorPool()
    known: set[str] = set()
    for file in (*files, _FILE, REFLECTION.file):
        _add(pool, file, known)
    path = "torchere/serving/frontend/grpc/protos/open_inference_torchserve.proto"
    pool.AddSerializedFile(_in_package(_FILE, TORCHSERVE_PACKAGE, path).SerializeToString())
    path = "grpc/reflection/v1/reflection.proto"
    pool.AddSerializedFile(_in_package(REFLECTION.file, _REFLECTION_PACKAGE, path).SerializeToString())
    return pool


def _add(pool: DescriptorPool, file: FileDescriptor, known: set[str]) -> None:
    if file.name in known:
        return
    known.add(file.name)
    for imported in file.dependencies:
        _add(pool, imported, known)
    pool.AddSerializedFile(file.serialized_pb)


def _in_package(file: FileDescriptor, package: str, path: str) -> descriptor_pb2.FileDescriptorProto:
    copy = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
    copy.name = path
    before, after = f".{copy.package}.", f".{package}."
    copy.package = package
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
