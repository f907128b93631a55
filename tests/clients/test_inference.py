"""tritonclient, synchronous: tensors of every datatype come back as they went."""

import os
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from oip_suite.calls import module_of, one_input
from oip_suite.models import SAMPLES
from oip_suite.target import Target

IS_TRITON = os.environ.get("TORCHERE_CLIENTS_TARGET") == "triton"
ECHOES = () if IS_TRITON else ("echo_thread", "echo_process")  # take whatever comes
# A TorchScript model takes no BYTES; Triton's Python backend does.
FIXED = [datatype for datatype in SAMPLES if IS_TRITON or datatype != "BYTES"]
CASES = [
    *((f"identity_{datatype}", datatype) for datatype in FIXED),
    *((model, datatype) for model in ECHOES for datatype in SAMPLES),
    *(() if IS_TRITON else [("identity_process", "FP32")]),
]


@pytest.mark.parametrize(("model", "datatype"), CASES)
def test_a_tensor_comes_back_over_grpc(grpc: Any, model: str, datatype: str) -> None:
    sent = SAMPLES[datatype]
    result = grpc.infer(model, [one_input(grpc, "x", sent, datatype)], request_id="mine")
    assert np.array_equal(result.as_numpy("y"), sent)
    head = result.get_response()
    assert (head.model_name, head.model_version, head.id) == (model, "1", "mine")
    assert [(one.name, one.datatype, list(one.shape)) for one in head.outputs] == [("y", datatype, [1, 4])]


@pytest.mark.parametrize(("model", "datatype"), CASES)
def test_a_tensor_comes_back_over_http_as_raw_bytes(http: Any, model: str, datatype: str) -> None:
    sent = SAMPLES[datatype]
    result = http.infer(model, [one_input(http, "x", sent, datatype)], request_id="mine")
    assert np.array_equal(result.as_numpy("y"), sent)
    assert result.get_response()["id"] == "mine"
    assert result.get_output("y")["datatype"] == datatype


@pytest.mark.parametrize(("model", "datatype"), [case for case in CASES if case[1] not in ("FP16", "BF16")])
def test_a_tensor_comes_back_over_http_as_json(http: Any, model: str, datatype: str) -> None:
    # tritonclient itself sends no FP16 and BF16 as JSON.
    sent = SAMPLES[datatype]
    given = one_input(http, "x", sent, datatype, binary_data=False)
    wanted = tritonclient.http.InferRequestedOutput("y", binary_data=False)
    # The echo has no signature: without a version in the path, torchere leaves JSON to such a handler.
    result = http.infer(model, [given], model_version="1", outputs=[wanted])
    assert "parameters" not in result.get_output("y")
    found = result.as_numpy("y")
    if datatype == "BYTES":
        found = np.char.encode(found.astype(str))
    assert np.array_equal(found, sent)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_batch_of_rows_is_one_request(http: Any, grpc: Any, rows: int) -> None:
    if rows == 0 and IS_TRITON:
        pytest.skip("Triton's batching takes no empty batch")
    sent = np.arange(rows * 4, dtype="f4").reshape(rows, 4)
    for client in (http, grpc):
        result = client.infer("identity_FP32", [one_input(client, "x", sent, "FP32")])
        assert np.array_equal(result.as_numpy("y"), sent)


def test_the_timeout_of_a_request_does_not_end_it(http: Any, grpc: Any) -> None:
    for client in (http, grpc):
        given = [one_input(client, "x", SAMPLES["FP32"], "FP32")]
        result = client.infer("identity_FP32", given, timeout=1)  # a microsecond
        assert np.array_equal(result.as_numpy("y"), SAMPLES["FP32"])


def test_several_inputs_and_outputs_have_names(http: Any, grpc: Any) -> None:
    a, b = np.array([[1, 2, 3, 4]], "f4"), np.array([[10, 20, 30, 40]], "f4")
    for client in (http, grpc):
        given = [one_input(client, "b", b, "FP32"), one_input(client, "a", a, "FP32")]
        result = client.infer("two", given)
        assert np.array_equal(result.as_numpy("sum"), a + b)
        assert np.array_equal(result.as_numpy("difference"), a - b)


def test_only_the_outputs_that_are_asked_for_come(http: Any, grpc: Any) -> None:
    ones = np.ones((1, 4), "f4")
    for client in (http, grpc):
        given = [one_input(client, name, ones, "FP32") for name in "ab"]
        result = client.infer("two", given, outputs=[module_of(client).InferRequestedOutput("difference")])
        assert result.as_numpy("sum") is None
        assert np.array_equal(result.as_numpy("difference"), np.zeros((1, 4)))


def test_the_best_classes_are_given_on_request(http: Any, grpc: Any) -> None:
    scores = np.array([[0.125, 0.5, 0.25, 0.0]], "f4")
    for client in (http, grpc):
        wanted = module_of(client).InferRequestedOutput("y", class_count=2)
        result = client.infer("identity_FP32", [one_input(client, "x", scores, "FP32")], outputs=[wanted])
        assert result.as_numpy("y").tolist() == [[b"0.500000:1", b"0.250000:2"]]


@pytest.mark.parametrize("version", ["1", "2"])
def test_each_version_of_a_model_answers(http: Any, grpc: Any, version: str) -> None:
    zero = np.zeros((1, 1), "f4")
    for client in (http, grpc):
        given = [one_input(client, "x", zero, "FP32")]
        assert client.infer("versioned", given, model_version=version).as_numpy("y").tolist() == [
            [float(version)]
        ]


def test_without_a_version_the_default_one_answers(http: Any, grpc: Any, target: Target) -> None:
    expected = 1.0 if "first version is the default" in target.differs else 2.0
    for client in (http, grpc):
        given = [one_input(client, "x", np.zeros((1, 1), "f4"), "FP32")]
        assert client.infer("versioned", given).as_numpy("y").tolist() == [[expected]]


def test_compressed_requests_are_read(grpc: Any) -> None:
    given = [one_input(grpc, "x", SAMPLES["FP32"], "FP32")]
    result = grpc.infer("identity_FP32", given, compression_algorithm="gzip")
    assert np.array_equal(result.as_numpy("y"), SAMPLES["FP32"])


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compressed_bodies_go_both_ways_over_http(http: Any, coding: str, binary: bool) -> None:
    sent = np.arange(4000, dtype="f4").reshape(1000, 4) if not IS_TRITON else SAMPLES["FP32"]
    given = [one_input(http, "x", sent, "FP32", binary_data=binary)]
    wanted = [tritonclient.http.InferRequestedOutput("y", binary_data=binary)]
    result = http.infer(
        "identity_FP32",
        given,
        outputs=wanted,
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    assert np.array_equal(result.as_numpy("y"), sent)


def test_a_large_tensor_comes_back(http: Any, grpc: Any) -> None:
    rows = 8 if IS_TRITON else 2**16  # Triton's batches are bounded
    sent = np.arange(rows * 4, dtype="f4").reshape(rows, 4)
    for client in (http, grpc):
        result = client.infer("identity_FP32", [one_input(client, "x", sent, "FP32")])
        assert np.array_equal(result.as_numpy("y"), sent)


def test_many_calls_at_once_are_answered_each_with_its_own(target: Target) -> None:
    with tritonclient.http.InferenceServerClient(target.http, concurrency=8) as client:
        arrays = [np.full((1, 4), number, "f4") for number in range(40)]
        waiting = [
            client.async_infer("identity_FP32", [one_input(client, "x", one, "FP32")]) for one in arrays
        ]
        for one, result in zip(arrays, waiting, strict=True):
            assert np.array_equal(result.get_result().as_numpy("y"), one)
