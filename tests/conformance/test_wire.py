"""The messages have the field numbers and types of TorchServe's own .proto files.

The replay uses our generated messages for both sides, so a wrong number would not show there.
"""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor

from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2

STRING, BYTES, INT32, BOOL, MESSAGE = (
    FieldDescriptor.TYPE_STRING,
    FieldDescriptor.TYPE_BYTES,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_BOOL,
    FieldDescriptor.TYPE_MESSAGE,
)
Fields = dict[str, tuple[int, int]]
INFERENCE: dict[str, Fields] = {
    "PredictionsRequest": {
        "model_name": (1, STRING),
        "model_version": (2, STRING),
        "input": (3, MESSAGE),
        "sequence_id": (4, STRING),
    },
    "PredictionResponse": {"prediction": (1, BYTES), "sequence_id": (2, STRING), "status": (3, MESSAGE)},
    "TorchServeHealthResponse": {"health": (1, STRING)},
}
MANAGEMENT: dict[str, Fields] = {
    "ManagementResponse": {"msg": (1, STRING)},
    "DescribeModelRequest": {
        "model_name": (1, STRING),
        "model_version": (2, STRING),
        "customized": (3, BOOL),
    },
    "ListModelsRequest": {"limit": (1, INT32), "next_page_token": (2, INT32)},
    "RegisterModelRequest": {
        "batch_size": (1, INT32),
        "handler": (2, STRING),
        "initial_workers": (3, INT32),
        "max_batch_delay": (4, INT32),
        "model_name": (5, STRING),
        "response_timeout": (6, INT32),
        "runtime": (7, STRING),
        "synchronous": (8, BOOL),
        "url": (9, STRING),
        "s3_sse_kms": (10, BOOL),
        "startup_timeout": (11, INT32),
    },
    "ScaleWorkerRequest": {
        "model_name": (1, STRING),
        "model_version": (2, STRING),
        "max_worker": (3, INT32),
        "min_worker": (4, INT32),
        "number_gpu": (5, INT32),
        "synchronous": (6, BOOL),
        "timeout": (7, INT32),
    },
    "SetDefaultRequest": {"model_name": (1, STRING), "model_version": (2, STRING)},
    "UnregisterModelRequest": {"model_name": (1, STRING), "model_version": (2, STRING)},
}
METHODS = {
    "InferenceAPIsService": {
        "Ping": ("Empty", "TorchServeHealthResponse", False, False),
        "Predictions": ("PredictionsRequest", "PredictionResponse", False, False),
        "StreamPredictions": ("PredictionsRequest", "PredictionResponse", False, True),
        "StreamPredictions2": ("PredictionsRequest", "PredictionResponse", True, True),
    },
    "ManagementAPIsService": {
        "DescribeModel": ("DescribeModelRequest", "ManagementResponse", False, False),
        "ListModels": ("ListModelsRequest", "ManagementResponse", False, False),
        "RegisterModel": ("RegisterModelRequest", "ManagementResponse", False, False),
        "ScaleWorker": ("ScaleWorkerRequest", "ManagementResponse", False, False),
        "SetDefault": ("SetDefaultRequest", "ManagementResponse", False, False),
        "UnregisterModel": ("UnregisterModelRequest", "ManagementResponse", False, False),
    },
}
FILES = [
    (inference_pb2.DESCRIPTOR, "org.pytorch.serve.grpc.inference", INFERENCE),
    (management_pb2.DESCRIPTOR, "org.pytorch.serve.grpc.management", MANAGEMENT),
]


@pytest.mark.parametrize(("file", "package", "messages"), FILES)
def test_every_message_has_the_fields_of_the_contract(
    file: FileDescriptor, package: str, messages: dict[str, Fields]
) -> None:
    found = {
        name: {field.name: (field.number, field.type) for field in message.fields}
        for name, message in file.message_types_by_name.items()
    }

    assert file.package == package
    assert found == messages


@pytest.mark.parametrize(("file", "service"), list(zip([file for file, _, _ in FILES], METHODS, strict=True)))
def test_every_service_has_the_methods_of_the_contract(file: FileDescriptor, service: str) -> None:
    def shape(method: Any) -> tuple[str, str, bool, bool]:
        types = method.input_type.name, method.output_type.name
        return *types, method.client_streaming, method.server_streaming

    found = {method.name: shape(method) for method in file.services_by_name[service].methods}

    assert found == METHODS[service]
