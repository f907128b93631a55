import asyncio
import re
from pathlib import Path

import pytest

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.authorisation import Surfaces
from torchere.serving.frontend.rest.openapi import (
    MANAGEMENT,
    listener_document,
    management_document,
    prediction_document,
)
from torchere.serving.frontend.rest.server import listener_of

ALL: Surfaces = frozenset({"inference", "management", "metrics"})


def operations(document):
    return {operation["operationId"] for path in document["paths"].values() for operation in path.values()}


def test_the_inference_document_has_the_known_operations():
    document = listener_document(frozenset({"inference"}), "1.2.3")
    assert document["info"] == {
        "title": "TorchServe APIs",
        "description": "TorchServe is a flexible and easy to use tool for serving deep learning models",
        "version": "1.2.3",
    }
    assert {"apiDescription", "ping", "predictions", "version_predictions", "api-description", "metrics"} <= (
        operations(document)
    )
    assert "listModels" not in operations(document)


def test_the_management_document_has_the_known_operations():
    assert operations(listener_document(frozenset({"management"}), "1")) == {
        *(
            "apiDescription",
            "listModels",
            "registerModel",
            "describeModel",
            "setAutoScale",
            "unregisterModel",
        ),
        *("quarantine", "liftQuarantine", "liftQuarantineOfRequest"),
        *("version_describeModel", "version_setAutoScale", "version_unregisterModel", "setDefault"),
        *("api-description", "metrics"),
        *("listWorkflows", "registerWorkflow", "describeWorkflow", "unregisterWorkflow"),
    }


def test_the_page_on_management_has_each_call_and_parameter():
    text = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    page = text[text.index("\n## Management API\n") : text.index("\n## Start and stop\n")]
    for row in MANAGEMENT:
        path = row.path.replace("{model_name}", "MODEL").replace("{model_version}", "VERSION")
        assert path.replace("{digest}", "").rstrip("/") in page
        assert [name for name, _ in row.query if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "document",
    [
        listener_document(ALL, "1"),
        listener_document(ALL, "1", open_inference=True),
        management_document("m"),
        prediction_document("m", '{"inputs": [1], "outputs": [2]}'),
    ],
)
def test_every_parameter_in_a_path_is_declared_and_every_operation_has_answers(document):
    for path, methods in document["paths"].items():
        for operation in methods.values():
            declared = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert declared == set(re.findall(r"{(\w+)}", path))
            assert all(answer["description"] for answer in operation["responses"].values())


@pytest.mark.parametrize("surface", ["inference", "management", "metrics"])
def test_with_the_open_inference_protocol_its_operations_stand_behind_torchserves(surface):
    surfaces = frozenset({surface})
    without = listener_document(surfaces, "1")
    document = listener_document(surfaces, "1", open_inference=True)
    assert [*document["paths"]][: len(without["paths"])] == [*without["paths"]]
    assert {path: document["paths"][path] for path in without["paths"]} == without["paths"]
    added = document["paths"].keys() - without["paths"].keys()
    expected = {"inference": 20, "management": 3, "metrics": 0}
    assert len(added) == expected[surface]
    assert all(path.startswith(("/v1/models", "/v2")) for path in added)


def test_operations_of_one_document_have_names_of_their_own():
    document = listener_document(ALL, "1", open_inference=True)
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("switch", "there"), [(True, True), (False, False)])
def test_the_open_inference_protocol_is_described_where_it_is_on(planes, ask_listener, switch, there):
    services = planes.services(open_inference_protocol=switch)
    app = listener_of(frozenset({"inference"}), planes.data, planes.control, services)
    answer = asyncio.run(ask_listener(app, "OPTIONS", "/"))
    assert ("/v2/models/{model_name}/versions/{model_version}/infer" in answer.json["paths"]) is there


def test_a_models_document_has_its_three_paths():
    document = prediction_document("m", None)
    assert [*document["paths"]] == [
        "/prediction/m",
        "/v1/models/{model_name}:predict",
        "/v2/models/{model_name}/infer",
    ]
    assert operations(document) == {"m"}


def test_a_signature_is_merged_into_the_models_document():
    operation = prediction_document("m", '{"inputs": [{"name": "x"}], "outputs": 1}')["paths"][
        "/prediction/m"
    ]["post"]
    assert operation["requestBody"]["content"]["application/json"]["example"] == [{"name": "x"}]
    assert operation["responses"]["200"]["content"]["application/json"]["example"] == 1


@pytest.mark.parametrize("text", ["", "nope", "[]", "1", 2000 * "["])
def test_a_signature_that_is_no_object_is_refused(text):
    with pytest.raises(InvalidRequest, match=r"^Failed to parse signature\.json$"):
        prediction_document("m", text)


def test_workflows_and_the_paths_of_sagemaker_are_described_where_they_are_served():
    surfaces: Surfaces = frozenset({"inference"})
    inference = listener_document(surfaces, "1")
    assert {"wfpredict", "invocations", "invoke"} <= operations(inference)
    assert list(inference["paths"]["/models/{model_name}/invoke"]) == ["post"]
    surfaces = frozenset({"management"})
    management = listener_document(surfaces, "1")
    assert set(management["paths"]["/workflows"]) == {"get", "post"}
    assert set(management["paths"]["/workflows/{workflow_name}"]) == {"get", "delete"}
    assert operations(management).isdisjoint({"wfpredict", "invocations"})
