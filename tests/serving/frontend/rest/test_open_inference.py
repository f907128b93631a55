"""The routes of the Open Inference Protocol beside inference."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

from torchere.archiver.signature import Signature, TensorSpec
from torchere.serving.config.model_settings import Asked
from torchere.serving.errors import ModelNotFound, NotAllowed
from torchere.serving.frontend.dataplane import Readiness
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.version import VersionState
from torchere.serving.types import ModelKey

SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, 2)),), (TensorSpec("y", "FP32", (-1,)),))


@pytest.fixture
def ask_v2(planes, ask_listener):
    """`ask_v2(target, body, method, surfaces, switched_on)`: one request."""

    def call(target, body=b"", *, method="GET", surfaces="inference+management", switched_on=True, keys=None):
        services = planes.services(open_inference_protocol=switched_on, keys=keys)
        app = listener_of(frozenset(surfaces.split("+")), planes.data, planes.control, services)
        headers = {"authorization": f"Bearer {keys and 'inference'}"}
        return asyncio.run(ask_listener(app, method, target, body, **headers))

    return call


def test_metadata_keeps_the_misspelt_key_beside_the_right_one(ask_v2):
    told = ask_v2("/v2").json
    assert (told["name"], told["version"], told["extenstion"]) == (
        "Torchserve",
        "0.12.0",
        ["kserve", "kubeflow"],
    )
    assert {"kserve", "binary_tensor_data", "classification", "model_repository", "statistics"} <= set(
        told["extensions"]
    )


def test_live_is_constant_and_ready_tells_the_truth(ask_v2, planes):
    assert ask_v2("/v2/health/live").json == {"live": True}
    assert (ask_v2("/v2/health/ready").status, ask_v2("/v2/health/ready").json) == (200, {"ready": True})
    planes.data.is_ready = Readiness(False, ("echo:1.0 is loading",))
    assert (ask_v2("/v2/health/ready").status, ask_v2("/v2/health/ready").json) == (503, {"ready": False})


def test_a_version_in_the_query_is_none(ask_v2):
    assert ask_v2("/v2/models/echo?version=9").status == 200
    assert ask_v2("/v2/models/echo/versions/9").status == 404


@pytest.mark.parametrize("path", ["/v2/models/echo", "/v2/models/echo/versions/1.0"])
def test_a_model_tells_of_itself(ask_v2, planes, path):
    planes.data.known = replace(planes.data.known, signature=SIGNATURE)
    assert ask_v2(path).json["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    assert ask_v2(f"{path}/ready").json == {"name": "echo", "ready": True}
    assert ask_v2(f"{path}/config").json["input"] == [
        {"name": "x", "data_type": "TYPE_FP32", "dims": [2], "format": "FORMAT_NONE"}
    ]
    assert ask_v2(f"{path}/stats").json["model_stats"][0]["name"] == "echo"
    planes.data.is_ready = Readiness(False, ("loading",))
    assert (ask_v2(f"{path}/ready").status, ask_v2(f"{path}/ready").json["ready"]) == (503, False)


@pytest.mark.parametrize("surfaces", ["inference", "inference+management"])
def test_a_model_tells_the_clients_of_v1_whether_it_is_ready(ask_v2, planes, surfaces):
    ask = partial(ask_v2, surfaces=surfaces, keys=planes.keys)
    assert ask("/v1/models/echo").json == {"name": "echo", "ready": True}
    planes.data.is_ready = Readiness(False, ("loading",))
    assert (ask("/v1/models/echo").status, ask("/v1/models/echo").json["ready"]) == (503, False)
    answer = ask("/v1/models/no")
    assert (answer.status, answer.json["error"]) == (404, "Model not found: no")


@pytest.mark.parametrize("path", ["/v1/models", "/v2/models"])
def test_clients_get_each_model_once(ask_v2, planes, path):
    planes.data.registered = lambda: [ModelKey("b", "1"), ModelKey("a", "1"), ModelKey("b", "2")]
    assert ask_v2(path).json == {"models": ["b", "a"]}


def test_statistics_of_all_models_are_one_list(ask_v2):
    assert [told["version"] for told in ask_v2("/v2/models/stats").json["model_stats"]] == ["1.0"]


def test_statistics_without_a_version_are_those_of_every_version(ask_v2, planes):
    known = replace(planes.data.known, versions=("1.0", "2.0"))

    def facts(model, version):
        return replace(known, key=ModelKey(model, version or "1.0"))

    planes.data.facts = facts
    for path, versions in (("", ["1.0", "2.0"]), ("/versions/2.0", ["2.0"])):
        told = ask_v2(f"/v2/models/echo{path}/stats").json["model_stats"]
        assert [each["version"] for each in told] == versions


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v2/models/none", "Model not found: none"),
        ("/v2/models/none/ready", "Model not found: none"),
        ("/v2/models/echo/versions/9/stats", "Model version: 9 does not exist for model: echo"),
    ],
)
def test_what_is_not_registered_is_404_in_the_protocols_words(ask_v2, path, text):
    answer = ask_v2(path)
    assert (answer.status, answer.json["error"]) == (404, text)


@pytest.mark.parametrize(
    "target",
    [
        *("/v1/models", "/v1/models/echo", "/v2", "/v2/health/ready", "/v2/models", "/v2/models/echo"),
        "/v2/models/echo/versions/1.0/infer",
    ],
)
def test_with_the_switch_off_there_is_what_torchserve_has(ask_v2, target):
    answer = ask_v2(target, surfaces="inference", switched_on=False)
    assert (answer.status, answer.json["type"]) == (404, "ResourceNotFoundException")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("/v2/systemsharedmemory/status", "There is no shared memory here."),
        ("/v2/cudasharedmemory/region/a/register", "There is no shared memory here."),
        ("/v2/trace/setting", "There are no trace settings here."),
        ("/v2/models/echo/trace/setting", "There are no trace settings here."),
        ("/v2/logging", "There are no log settings of Triton's here."),
        ("/v2/repository/index", "The model repository is on the management port."),
        ("/v2/repository/models/echo/load", "The model repository is on the management port."),
    ],
)
def test_what_only_triton_has_is_404_in_the_protocols_words(ask_v2, target, text):
    answer = ask_v2(target, method="POST", surfaces="inference")
    assert (answer.status, answer.json["error"]) == (404, text)


def test_the_index_lists_every_version(ask_v2, planes):
    entry = {"name": "echo", "version": "1.0", "state": "READY"}
    assert ask_v2("/v2/repository/index", method="POST").json == [entry]
    planes.control.description = replace(
        planes.control.description, state=VersionState.FAILED, condition="failed", failure="no such file"
    )
    told = ask_v2("/v2/repository/index", b"{}", method="POST").json
    assert told == [{**entry, "state": "UNAVAILABLE", "reason": "no such file"}]
    assert ask_v2("/v2/repository/index", b'{"ready": true}', method="POST").json == []


def test_a_version_without_an_executor_in_service_is_unavailable_in_the_index(ask_v2, planes):
    planes.control.description = replace(planes.control.description, condition="restarting")
    (entry,) = ask_v2("/v2/repository/index", method="POST").json
    assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "restarting")


def test_load_registers_an_archive_of_the_store(ask_v2, planes):
    body = json.dumps({"parameters": {"url": "b.mar", "initial_workers": 3}}).encode()
    assert ask_v2("/v2/repository/models/a/load", method="POST").status == 200
    assert ask_v2("/v2/repository/models/b/load", body, method="POST").status == 200
    wishes = [call[1] for call in planes.control.calls if call[0] == "register"]
    assert wishes == [
        Wanted("a.mar", Asked(executors=1), name="a"),
        Wanted("b.mar", Asked(executors=3), name="b"),
    ]


def test_a_model_that_is_ready_is_not_loaded_again(ask_v2, planes):
    assert ask_v2("/v2/repository/models/echo/load", method="POST").status == 200
    assert "register" not in [call[0] for call in planes.control.calls]


def test_unload_unregisters_the_default_version_last(ask_v2, planes):
    assert ask_v2("/v2/repository/models/echo/unload", method="POST").status == 200
    assert planes.control.calls[-1] == ("unregister", "echo", "1.0")


@pytest.mark.parametrize(
    ("error", "status"), [(NotAllowed("the API is off"), 405), (ModelNotFound("none"), 404)]
)
def test_refusals_are_in_the_protocols_words(ask_v2, planes, error, status):
    planes.control.error = error
    answer = ask_v2("/v2/repository/models/echo/unload", method="POST")
    assert (answer.status, answer.json["error"]) == (status, error.message)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("index", b'{"ready": 1}', "ready: found 1"),
        ("index", b"[]", "the request: "),
        ("models/a/load", b'{"parameters": []}', "parameters: found []"),
        ("models/a/load", b'{"parameters": {"url": 1}}', "parameters.url: found 1"),
        (
            "models/a/load",
            b'{"parameters": {"initial_workers": "1"}}',
            "parameters.initial_workers: found '1'",
        ),
        ("models/a/load", b"[" * 900, "the request: "),
        ("models/a/load", b'{"a": "\xff"}', "the request: "),
    ],
)
def test_bad_bodies_are_refused_by_their_field(ask_v2, path, body, text):
    answer = ask_v2(f"/v2/repository/{path}", body, method="POST")
    assert answer.status == 400
    assert answer.json["error"].startswith(text)


def test_the_repository_is_management(ask_v2, planes):
    assert ask_v2("/v2/repository/index", method="POST", surfaces="inference").status == 404
    assert ask_v2("/v2/repository/index", method="POST", surfaces="management").status == 200
    assert (
        ask_v2("/v2/repository/index", method="POST", keys=planes.keys).json["type"] == "InvalidKeyException"
    )
    assert ask_v2("/v2/models/echo", keys=planes.keys).status == 200


@pytest.mark.parametrize(
    ("target", "content_type"),
    [("/v2/repository/index", ""), ("/v2/repository/models/a/load", ""), ("/models", "application/json")],
)
def test_parameters_of_a_call_have_a_limit_because_they_are_decoded_on_the_loop(
    planes, ask_listener, target, content_type
):
    app = listener_of(
        frozenset({"inference", "management"}),
        planes.data,
        planes.control,
        planes.services(max_request_bytes=10**6),
    )

    def ask(size, **headers):
        body = b'{"parameters": {"a": "%b"}}' % (b"x" * size)
        return asyncio.run(ask_listener(app, "POST", target, body, content_type=content_type, **headers))

    answer = ask(70_000)
    assert answer.status == 413
    assert b"The parameters of this call have more than 65536 bytes." in answer.body
    assert ask(60_000).status in (200, 400)
