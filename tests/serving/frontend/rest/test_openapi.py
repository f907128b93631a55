import re

import pytest

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.rest.openapi import listener_document, management_document, prediction_document


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
        *("version_describeModel", "version_setAutoScale", "version_unregisterModel", "setDefault"),
        *("api-description", "metrics"),
    }


@pytest.mark.parametrize(
    "document",
    [
        listener_document(frozenset({"inference", "management", "metrics"}), "1"),
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


@pytest.mark.parametrize("text", ["", "nope", "[]", "1"])
def test_a_signature_that_is_no_object_is_refused(text):
    with pytest.raises(InvalidRequest, match=r"^Failed to parse signature\.json$"):
        prediction_document("m", text)
