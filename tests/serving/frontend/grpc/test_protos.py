"""The names and numbers that TorchServe's clients have compiled in."""

from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2


def numbers(module, message):
    return {field.name: field.number for field in module.DESCRIPTOR.message_types_by_name[message].fields}


def methods(module, service):
    described = module.DESCRIPTOR.services_by_name[service]
    return {m.name: (m.client_streaming, m.server_streaming) for m in described.methods}


def test_the_inference_package_is_torchserves():
    assert inference_pb2.DESCRIPTOR.package == "org.pytorch.serve.grpc.inference"
    assert numbers(inference_pb2, "PredictionsRequest") == {
        "model_name": 1,
        "model_version": 2,
        "input": 3,
        "sequence_id": 4,
    }
    assert numbers(inference_pb2, "PredictionResponse") == {"prediction": 1, "sequence_id": 2, "status": 3}
    assert numbers(inference_pb2, "TorchServeHealthResponse") == {"health": 1}
    assert methods(inference_pb2, "InferenceAPIsService") == {
        "Ping": (False, False),
        "Predictions": (False, False),
        "StreamPredictions": (False, True),
        "StreamPredictions2": (True, True),
    }


def test_the_management_package_is_torchserves():
    assert management_pb2.DESCRIPTOR.package == "org.pytorch.serve.grpc.management"
    assert [*numbers(management_pb2, "RegisterModelRequest").items()] == [
        *[
            ("batch_size", 1),
            ("handler", 2),
            ("initial_workers", 3),
            ("max_batch_delay", 4),
            ("model_name", 5),
        ],
        *[("response_timeout", 6), ("runtime", 7), ("synchronous", 8), ("url", 9), ("s3_sse_kms", 10)],
        ("startup_timeout", 11),
    ]
    assert [*numbers(management_pb2, "ScaleWorkerRequest")] == [
        *("model_name", "model_version", "max_worker", "min_worker", "number_gpu", "synchronous", "timeout")
    ]
    assert numbers(management_pb2, "ListModelsRequest") == {"limit": 1, "next_page_token": 2}
    assert set(methods(management_pb2, "ManagementAPIsService")) == {
        *("DescribeModel", "ListModels", "RegisterModel", "ScaleWorker", "SetDefault", "UnregisterModel")
    }


def test_the_files_are_registered_under_a_name_of_their_own():
    assert inference_pb2.DESCRIPTOR.name.startswith("torchere/")
    assert management_pb2.DESCRIPTOR.name.startswith("torchere/")
