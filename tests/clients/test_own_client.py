"""torchere's own client; what it says of the Open Inference Protocol holds for Triton, too."""

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest
from oip_suite.models import SAMPLES
from oip_suite.target import Target

from torchere.client import (
    AsyncClient,
    Client,
    InferOptions,
    InvalidRequest,
    ModelFailed,
    NotFound,
    Unavailable,
)

IS_TRITON = os.environ.get("TORCHERE_CLIENTS_TARGET") == "triton"
ours = pytest.mark.skipif(IS_TRITON, reason="TorchServe's APIs, and event streams at infer, are not Triton's")


@pytest.fixture
def client(target: Target) -> Iterator[Client]:
    with Client(f"http://{target.http}", management_address=f"http://{target.repository}") as made:
        yield made


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", [name for name in SAMPLES if IS_TRITON or name != "BYTES"])
def test_arrays_of_every_datatype_come_back(client: Client, datatype: str, binary: bool) -> None:
    if IS_TRITON and not binary and datatype in ("FP16", "BF16"):
        pytest.skip("Triton takes these as raw bytes only")
    sent = SAMPLES[datatype]
    result = client.infer(f"identity_{datatype}", {"x": sent}, InferOptions(binary=binary, id="mine"))
    assert (result.model_name, result.model_version, result.id) == (f"identity_{datatype}", "1", "mine")
    assert np.array_equal(result["y"], sent.astype("f4") if datatype == "BF16" else sent)


def test_named_outputs_and_versions(client: Client) -> None:
    ones = np.ones((1, 4), "f4")
    result = client.infer("two", {"a": ones, "b": ones}, InferOptions(outputs=["difference"]))
    assert list(result.outputs) == ["difference"]
    assert client.infer("versioned", {"x": np.zeros((1, 1), "f4")}, version="2")["y"].tolist() == [[2.0]]


def test_metadata_readiness_and_statistics(client: Client) -> None:
    assert client.is_live()
    assert client.is_ready()
    assert client.is_model_ready("two")
    assert client.server_metadata().extensions
    told = client.model_metadata("two")
    assert [(one.name, one.datatype, one.shape) for one in told.inputs] == [
        ("a", "FP32", (-1, 4)),
        ("b", "FP32", (-1, 4)),
    ]
    (statistics,) = client.statistics("two")
    assert (statistics["name"], statistics["version"]) == ("two", "1")


def test_the_repository_is_controlled(client: Client) -> None:
    client.load("spare")
    assert "spare" in {line.name for line in client.repository_index() if line.state == "READY"}
    assert client.infer("spare", {"x": np.ones((1, 4), "f4")})["y"].tolist() == [[1.0] * 4]
    client.unload("spare")
    assert "spare" not in {line.name for line in client.repository_index(ready_only=True)}


def test_errors_have_their_classes(client: Client) -> None:
    given = {"x": np.ones((1, 4), "f4")}
    with pytest.raises((NotFound, InvalidRequest), match="nobody"):
        client.infer("nobody", given)
    with pytest.raises(InvalidRequest):
        client.infer("identity_FP32", {"x": np.ones((1, 5), "f4")})
    with pytest.raises(ModelFailed):
        client.infer("failing", {"x": np.ones((1, 1), "f4")})


@ours
def test_predictions_are_answered(client: Client) -> None:
    answer = client.predict("identity_FP32", {"x": [1, 2, 3, 4]})
    assert answer.json() == [1.0, 2.0, 3.0, 4.0]
    assert answer.request_id
    with pytest.raises(NotFound) as caught:
        client.predict("nobody", b"")
    assert (caught.value.kind, caught.value.message) == ("ModelNotFoundException", "Model not found: nobody")
    assert caught.value.request_id


@ours
def test_a_streamed_inference_comes_in_parts(client: Client) -> None:
    parts = client.infer_stream("streaming", {"x": np.array([3], "i4")})
    assert [part["y"].tolist() for part in parts] == [[0], [1], [2]]


@ours
def test_models_are_managed(client: Client) -> None:
    assert client.ping()
    client.register("spare.mar", model_name="managed", initial_workers=0)
    with pytest.raises(Unavailable):
        client.predict("managed", {"x": [1, 2, 3, 4]}, timeout_s=1)
    client.scale("managed", 1)
    assert client.predict("managed", {"x": [1, 2, 3, 4]}).json() == [1.0, 2.0, 3.0, 4.0]
    assert "managed" in {entry.name for entry in client.list_models()}
    (told,) = client.describe("managed")
    assert told["minWorkers"] == 1
    assert client.unregister("managed") == 'Model "managed" unregistered'


def test_many_calls_at_once(target: Target) -> None:
    async def main() -> list[float]:
        async with AsyncClient(f"http://{target.http}") as client:
            arrays = [np.full((1, 4), number, "f4") for number in range(32)]
            results = await asyncio.gather(*(client.infer("identity_FP32", {"x": one}) for one in arrays))
            return [float(result["y"][0, 0]) for result in results]

    assert asyncio.run(main()) == list(range(32))
