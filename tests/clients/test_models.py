"""tritonclient: what servers and models tell of themselves, statistics, the model repository."""

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from oip_suite.calls import one_input
from oip_suite.models import SAMPLES
from oip_suite.target import Target
from tritonclient.utils import InferenceServerException

CLIENTS = ("http", "grpc")


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=CLIENTS)
def operator(request: pytest.FixtureRequest, target: Target) -> Any:
    """A client of the port that the repository is controlled on."""
    if request.param == "grpc":
        with tritonclient.grpc.InferenceServerClient(target.grpc) as made:
            yield made
        return
    with tritonclient.http.InferenceServerClient(target.repository) as made:
        yield made


def as_dict(answer: Any) -> dict[str, Any]:
    """JSON over HTTP, a message over gRPC."""
    if isinstance(answer, dict):
        return answer
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(answer, preserving_proto_field_name=True)


def test_the_server_is_live_and_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()


def test_a_model_is_ready_with_and_without_its_version(client: Any) -> None:
    assert client.is_model_ready("identity_FP32")
    assert client.is_model_ready("versioned", "2")


def test_a_model_that_is_not_there_is_not_ready(client: Any) -> None:
    assert not client.is_model_ready("nobody")
    assert not client.is_model_ready("versioned", "7")


def test_the_server_says_what_it_can_do(client: Any) -> None:
    told = as_dict(client.get_server_metadata())
    assert told["name"]
    assert told["version"]
    assert {"classification", "model_repository", "statistics", "binary_tensor_data"} <= set(
        told["extensions"]
    )


def test_a_model_says_what_it_takes_and_gives(client: Any) -> None:
    told = as_dict(client.get_model_metadata("two"))
    assert told["name"] == "two"
    assert told["versions"] == ["1"]
    assert told["platform"]
    shapes = {one["name"]: (one["datatype"], [int(size) for size in one["shape"]]) for one in told["inputs"]}
    assert shapes == {"a": ("FP32", [-1, 4]), "b": ("FP32", [-1, 4])}
    assert [one["name"] for one in told["outputs"]] == ["sum", "difference"]


@pytest.mark.parametrize("datatype", [name for name in SAMPLES if name != "BYTES"])
def test_the_metadata_name_every_datatype(client: Any, datatype: str) -> None:
    (told,) = as_dict(client.get_model_metadata(f"identity_{datatype}"))["inputs"]
    assert told["datatype"] == datatype


def test_all_versions_of_a_model_are_named(client: Any) -> None:
    assert sorted(as_dict(client.get_model_metadata("versioned"))["versions"]) == ["1", "2"]


def test_the_configuration_has_the_tensors_without_the_batch(client: Any) -> None:
    told = as_dict(client.get_model_config("identity_FP32"))
    config = told.get("config", told)
    assert config["name"] == "identity_FP32"
    assert int(config["max_batch_size"]) >= 1
    assert (config["input"][0]["data_type"], [int(n) for n in config["input"][0]["dims"]]) == (
        "TYPE_FP32",
        [4],
    )


def test_the_configuration_over_http_has_the_format_of_an_input(http: Any) -> None:
    assert http.get_model_config("identity_FP32")["input"][0]["format"] == "FORMAT_NONE"


def test_statistics_count_requests(client: Any) -> None:
    def counted() -> dict[str, Any]:
        (told,) = as_dict(client.get_inference_statistics("identity_INT32"))["model_stats"]
        return told

    before = counted()
    for _ in range(3):
        client.infer("identity_INT32", [one_input(client, "x", SAMPLES["INT32"], "INT32")])
    after = counted()
    assert int(after["inference_count"]) - int(before.get("inference_count", 0)) == 3
    assert 1 <= int(after["execution_count"]) - int(before.get("execution_count", 0)) <= 3
    assert int(after["inference_stats"]["success"]["ns"]) > 0
    assert int(after["last_inference"]) > 1_600_000_000_000


def test_statistics_of_all_models_are_given_without_a_name(client: Any) -> None:
    told = as_dict(client.get_inference_statistics())["model_stats"]
    named = {(one["name"], one["version"]) for one in told}
    assert {("identity_FP32", "1"), ("versioned", "1"), ("versioned", "2")} <= named


def test_the_repository_lists_what_is_loaded(operator: Any) -> None:
    told = operator.get_model_repository_index()
    entries = told if isinstance(told, list) else as_dict(told)["models"]
    states = {(one["name"], one.get("version", "")): one.get("state") for one in entries}
    assert states["identity_FP32", "1"] == "READY"
    assert states["versioned", "2"] == "READY"


def test_a_model_is_loaded_and_unloaded(operator: Any, http: Any) -> None:
    sent = [one_input(http, "x", np.ones((1, 4), "f4"), "FP32")]
    operator.load_model("spare")
    assert http.is_model_ready("spare")
    assert np.array_equal(http.infer("spare", sent).as_numpy("y"), np.ones((1, 4)))
    operator.load_model("spare")
    operator.unload_model("spare")
    with pytest.raises(InferenceServerException):
        http.infer("spare", sent)


def test_a_model_that_is_not_in_the_repository_is_not_loaded(operator: Any) -> None:
    with pytest.raises(InferenceServerException):
        operator.load_model("nobody_has_this")
