"""The routes of the Open Inference Protocol that TorchServe has, when they are switched on."""

import asyncio

import pytest

from torchere.serving.frontend.dataplane import Readiness
from torchere.serving.frontend.rest.app import inference_app


@pytest.fixture
def ask_v2(planes, ask_app):
    """`ask_v2(target, switched_on)`: one GET."""

    def call(target: str, switched_on: bool = True):
        services = planes.services(open_inference_protocol=switched_on)
        app = inference_app(planes.data, planes.control, services)
        return asyncio.run(ask_app(app, "GET", target))

    return call


def test_metadata_keeps_the_misspelt_key_beside_the_right_one(ask_v2):
    assert ask_v2("/v2").json == {
        "name": "Torchserve",
        "version": "0.12.0",
        "extenstion": ["kserve", "kubeflow"],
        "extensions": ["kserve", "kubeflow"],
    }


def test_live_is_constant_and_ready_tells_the_truth(ask_v2, planes):
    assert ask_v2("/v2/health/live").json == {"live": True}
    assert (ask_v2("/v2/health/ready").status, ask_v2("/v2/health/ready").json) == (200, {"ready": True})
    planes.data.is_ready = Readiness(False, ("echo:1.0 is loading",))
    assert (ask_v2("/v2/health/ready").status, ask_v2("/v2/health/ready").json) == (503, {"ready": False})


def test_versions_in_paths_are_refused_as_torchserve_does(ask_v2):
    answer = ask_v2("/v2/models/echo/versions/1.0/infer")
    assert (answer.status, answer.json) == (501, {"error": "Model versioning is not yet supported."})


@pytest.mark.parametrize("target", ["/v2", "/v2/health/ready", "/v2/models/echo/versions/1/infer"])
def test_without_the_switch_there_is_nothing(ask_v2, target):
    assert ask_v2(target, switched_on=False).status == 404
