"""What the protocol tells of models, in Triton's and KServe's members."""

from dataclasses import replace
from typing import Any

import pytest

from torchere.archiver.signature import Limit, Signature, TensorSpec, Values
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference.metadata import model_config, model_metadata, model_statistics
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import ModelKey

FACTS = ModelFacts(
    key=ModelKey("m", "2"),
    versions=("1", "2"),
    handler="tensor",
    manifest_model={"serializedFile": "m.pt"},
    signature=Signature((TensorSpec("t", "BYTES", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 3)),)),
    max_batch_size=8,
    numbers=VersionNumbers("m", "2"),
)


def test_metadata_are_those_of_the_signature() -> None:
    assert model_metadata(FACTS) == {
        "name": "m",
        "versions": ["1", "2"],
        "platform": "pytorch_torchscript",
        "inputs": [{"name": "t", "datatype": "BYTES", "shape": [-1, 1]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }


def test_metadata_have_the_sizes_and_numbers_that_an_input_takes_as_parameters() -> None:
    limits = (Limit(1, 5, 512, 4, "length"), Limit(0, 1, 64), Limit(2))
    ids = TensorSpec("ids", "INT64", (-1, -1, -1), limits, Values(0, 99))
    mask = TensorSpec("mask", "INT64", (-1, -1), (Limit(1, 10, name="length"),))
    told = model_metadata(replace(FACTS, signature=Signature((ids, mask), (TensorSpec("y", "FP32", (-1,)),))))
    assert [one["shape"] for one in told["inputs"]] == [[-1, -1, -1], [-1, -1]]
    assert told["inputs"][0]["parameters"] == {
        "dimension_1_least": 12,  # a multiple, and in both
        "dimension_1_most": 512,
        "dimension_1_multiple": 4,
        "dimension_1_name": "length",
        "dimension_0_least": 1,
        "dimension_0_most": 64,
        "dimension_2_least": 1,
        "values_least": 0,
        "values_most": 99,
    }
    assert told["inputs"][1]["parameters"] == {"dimension_1_least": 12, "dimension_1_name": "length"}
    assert "parameters" not in told["outputs"][0]


def test_without_a_signature_nothing_is_known_of_tensors() -> None:
    facts = replace(FACTS, signature=None)
    assert model_metadata(facts)["inputs"] == model_metadata(facts)["outputs"] == []
    assert model_config(facts)["max_batch_size"] == 0
    assert not facts.reads_tensors


def test_the_configuration_has_dims_without_the_batch() -> None:
    config = model_config(FACTS)
    assert config["max_batch_size"] == 8
    assert config["input"] == [
        {"name": "t", "data_type": "TYPE_STRING", "dims": [1], "format": "FORMAT_NONE"}
    ]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]
    fixed = Signature((TensorSpec("x", "BF16", (2, 2)),), (TensorSpec("y", "FP32", ()),))
    config = model_config(replace(FACTS, signature=fixed))
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (0, [2, 2])


@pytest.mark.parametrize(
    ("model", "platform"),
    [
        ({"serializedFile": "m.pt2"}, "pytorch_export"),
        ({"serializedFile": "m.pt", "modelFile": "m.py"}, "pytorch_eager"),
        ({"serializedFile": "m.onnx"}, "onnx_onnxv1"),
        ({}, "pytorch_python"),
    ],
)
def test_the_platform_is_what_the_archive_holds(model: dict[str, Any], platform: str) -> None:
    assert replace(FACTS, manifest_model=model).platform == platform


def test_statistics_have_tritons_members() -> None:
    numbers = VersionNumbers("m", "2")
    numbers.batch_finished(
        size=2,
        succeeded=1,
        failed=1,
        succeeded_wait_s=0.5,
        failed_wait_s=0.25,
        executor_s=2.0,
        handler_s=1.5,
    )
    told = model_statistics([replace(FACTS, numbers=numbers)])["model_stats"][0]
    assert (told["name"], told["version"]) == ("m", "2")
    assert (told["inference_count"], told["execution_count"]) == (1, 1)
    spent = told["inference_stats"]
    assert spent["success"] == {"count": 1, "ns": 2_500_000_000}
    assert spent["fail"] == {"count": 1, "ns": 2_250_000_000}
    assert spent["queue"] == {"count": 2, "ns": 750_000_000}
    assert spent["compute_input"] == {"count": 1, "ns": 0}
    assert spent["compute_infer"] == {"count": 1, "ns": 1_500_000_000}
    assert spent["compute_output"] == {"count": 1, "ns": 500_000_000}
    assert told["batch_stats"][0]["batch_size"] == 2
    assert told["batch_stats"][0]["compute_infer"] == {"count": 1, "ns": 1_500_000_000}
    assert told["last_inference"] == int(numbers.last_batch_s * 1000) > 1_600_000_000_000
