"""Names, numbers and types of the public protocol, held against those of Triton's own client."""

import subprocess
import sys

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from torchere.serving.frontend.grpc.open_inference_descriptors import (
    PUBLIC_NAME,
    SERVICE,
    TORCHSERVE_NAME,
    reflection_pool,
)
from torchere.serving.frontend.grpc.protos import inference_pb2, open_inference_pb2

OURS = open_inference_pb2.DESCRIPTOR


def flat(messages):
    found = {}
    for message in messages:
        found[message.full_name] = message
        found.update(flat(message.nested_types))
    return found


THEIRS = flat(
    [
        *service_pb2.DESCRIPTOR.message_types_by_name.values(),
        *model_config_pb2.DESCRIPTOR.message_types_by_name.values(),
    ]
)


def shape(field):
    named = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else None
    # protobuf 5 has `label` only, protobuf 7 `is_repeated` only.
    repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
    return field.number, field.type, repeated, named.full_name if named else None, oneof


KSERVES = {  # the fields of messages that are empty in Triton's
    f"inference.RepositoryModel{verb}Response": {
        "model_name": (1, FieldDescriptor.TYPE_STRING, False, None, None),
        f"is{verb}ed": (2, FieldDescriptor.TYPE_BOOL, False, None, None),
    }
    for verb in ("Load", "Unload")
}


@pytest.mark.parametrize("name", sorted(flat(OURS.message_types_by_name.values())))
def test_every_field_has_tritons_number_and_type(name):
    ours = flat(OURS.message_types_by_name.values())[name]
    theirs = KSERVES.get(name) or {field.name: shape(field) for field in THEIRS[name].fields}
    assert {field.name: shape(field) for field in ours.fields}.items() <= theirs.items()


def test_every_method_has_tritons_messages():
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert PUBLIC_NAME == "inference.GRPCInferenceService"
    for method in SERVICE.methods:
        known = theirs[method.name]
        assert method.input_type.full_name == known.input_type.full_name
        assert method.output_type.full_name == known.output_type.full_name
        assert method.client_streaming == known.client_streaming
        assert method.server_streaming == known.server_streaming


def test_the_datatypes_have_tritons_numbers():
    ours, theirs = (
        module.DESCRIPTOR.enum_types_by_name["DataType"] for module in (open_inference_pb2, model_config_pb2)
    )
    assert {v.name: v.number for v in ours.values} == {v.name: v.number for v in theirs.values}


@pytest.mark.parametrize("order", [("ours", "theirs"), ("theirs", "ours")])
def test_both_can_be_imported_in_one_process(order):
    modules = {
        "ours": "torchere.serving.frontend.grpc.protos.open_inference_pb2",
        "theirs": "tritonclient.grpc.service_pb2",
    }
    code = "import warnings; warnings.simplefilter('ignore')\n" + "".join(
        f"import {modules[one]}\n" for one in order
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_our_messages_stay_out_of_the_processs_pool():
    assert OURS.pool is not descriptor_pool.Default()
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName(OURS.name)


def test_reflection_knows_the_protocol_under_both_names():
    pool = reflection_pool([inference_pb2.DESCRIPTOR])
    public, torchserves = pool.FindServiceByName(PUBLIC_NAME), pool.FindServiceByName(TORCHSERVE_NAME)
    assert TORCHSERVE_NAME == "org.pytorch.serve.grpc.openinference.GRPCInferenceService"
    assert [method.name for method in public.methods] == [method.name for method in torchserves.methods]
    wanted = torchserves.methods_by_name["ModelInfer"].input_type
    assert wanted.full_name == "org.pytorch.serve.grpc.openinference.ModelInferRequest"
    tensor = wanted.fields_by_name["inputs"].message_type
    assert tensor is not None
    assert tensor.full_name == "org.pytorch.serve.grpc.openinference.ModelInferRequest.InferInputTensor"
    assert pool.FindServiceByName("org.pytorch.serve.grpc.inference.InferenceAPIsService")
