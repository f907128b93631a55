import json

import pytest

from torchere.serving.config.model_settings import Asked
from torchere.serving.errors import (
    Conflict,
    DefaultVersionInUse,
    DownloadFailed,
    InvalidArchive,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    NotAllowed,
    UnregisterTimeout,
    VersionNotFound,
)
from torchere.serving.frontend.control import Progress
from torchere.serving.frontend.grpc.protos import management_pb2 as m
from torchere.serving.registry.desired import Wanted


def test_registering_takes_zero_and_empty_for_unset_and_does_not_wait_by_default(ask_grpc, planes):
    answer = ask_grpc("management", "RegisterModel", m.RegisterModelRequest(url="echo.mar"))
    assert planes.control.calls == [("register", Wanted("echo.mar", Asked()), {"synchronous": False})]
    assert answer.msg == 'Model "echo" Version: 1.0 registered with 1 initial workers'


def test_registering_passes_on_what_is_said(ask_grpc, planes):
    wish = m.RegisterModelRequest(
        url="echo.mar",
        model_name="two",
        batch_size=3,
        initial_workers=2,
        synchronous=True,
        max_batch_delay=-5,
    )
    ask_grpc("management", "RegisterModel", wish)
    expected = Wanted("echo.mar", Asked(batch_size=3, executors=2, max_batch_delay_ms=None), name="two")
    assert planes.control.calls == [("register", expected, {"synchronous": True})]


@pytest.mark.parametrize("method", ["RegisterModel", "UnregisterModel"])
def test_where_nothing_is_registered_nobody_is_told_what_is_wrong_with_a_call(refusal, planes, method):
    planes.control.model_api_off = True
    request = getattr(m, f"{method}Request")()
    assert refusal("management", method, request)[0] == "PERMISSION_DENIED"
    assert planes.control.calls == []


def test_registering_without_a_url_is_refused(refusal, planes):
    assert refusal("management", "RegisterModel", m.RegisterModelRequest()) == (
        "INVALID_ARGUMENT",
        "Parameter url is required.\norg.pytorch.serve.http.BadRequestException",
    )
    assert planes.control.calls == []


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (
            NotAllowed("x"),
            "PERMISSION_DENIED",
            "Model API disabled\norg.pytorch.serve.archive.model.ModelException",
        ),
        (InvalidRequest("x"), "INVALID_ARGUMENT", "x\norg.pytorch.serve.http.BadRequestException"),
        (InvalidArchive("x"), "INVALID_ARGUMENT", "x\norg.pytorch.serve.archive.model.InvalidModelException"),
        (DownloadFailed("x"), "INVALID_ARGUMENT", "x\norg.pytorch.serve.archive.DownloadArchiveException"),
        (ModelNotFound("x"), "NOT_FOUND", "x\norg.pytorch.serve.archive.model.ModelNotFoundException"),
        (
            VersionNotFound("x"),
            "NOT_FOUND",
            "x\norg.pytorch.serve.archive.model.ModelVersionNotFoundException",
        ),
        (Conflict("x"), "ABORTED", "x\norg.pytorch.serve.http.ConflictStatusException"),
        (LoadFailed("x"), "INTERNAL", "x\norg.pytorch.serve.http.InternalServerException"),
    ],
)
def test_what_registering_failed_of_is_told(refusal, planes, error, code, details):
    planes.control.error = error
    assert refusal("management", "RegisterModel", m.RegisterModelRequest(url="a.mar")) == (code, details)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, 1, 1, False)),
        ({"min_worker": 2}, (None, 2, 2, False)),
        (
            {"min_worker": 2, "max_worker": 4, "synchronous": True, "model_version": "1.0"},
            ("1.0", 2, 4, True),
        ),
        ({"min_worker": -1, "max_worker": -1}, (None, 1, 1, False)),
    ],
)
def test_scaling_takes_zero_and_less_for_unset(ask_grpc, planes, fields, expected):
    version, low, high, synchronous = expected
    answer = ask_grpc("management", "ScaleWorker", m.ScaleWorkerRequest(model_name="echo", **fields))
    how = {"min_executors": low, "max_executors": high, "synchronous": synchronous}
    assert planes.control.calls == [("scale", "echo", version, how)]
    assert answer.msg.startswith(f"Workers scaled to {low} for model: echo")


def test_scaling_that_goes_on_says_so(ask_grpc, planes):
    planes.control.progress = Progress.STARTED
    answer = ask_grpc("management", "ScaleWorker", m.ScaleWorkerRequest(model_name="echo"))
    assert answer.msg == "Processing worker updates..."


def test_describing_answers_the_json_of_rest(ask_grpc, planes):
    answer = ask_grpc("management", "DescribeModel", m.DescribeModelRequest(model_name="echo"))
    assert json.loads(answer.msg)[0]["modelName"] == "echo"
    assert answer.msg.startswith("[\n  {\n")
    ask_grpc("management", "DescribeModel", m.DescribeModelRequest(model_name="echo", model_version="all"))
    assert planes.control.calls == [("describe", "echo", None), ("describe", "echo", "all")]


def test_a_customised_description_asks_the_handler(ask_grpc, planes):
    answer = ask_grpc(
        "management", "DescribeModel", m.DescribeModelRequest(model_name="echo", customized=True)
    )
    assert planes.control.calls[0][:3] == ("describe_customized", "echo", None)
    assert json.loads(answer.msg)[0]["customizedMetadata"] == {"custom": 1}


@pytest.mark.parametrize(("limit", "expected"), [(0, 100), (2, 2), (-1, 100), (1000, 100)])
def test_listing_takes_an_unset_limit_for_a_full_page(ask_grpc, planes, limit, expected):
    answer = ask_grpc("management", "ListModels", m.ListModelsRequest(limit=limit, next_page_token=-3))
    assert planes.control.calls == [("list_models", expected, 0)]
    assert json.loads(answer.msg) == {"models": [{"modelName": "echo", "modelUrl": "echo.mar"}]}


def test_the_default_version_is_set(ask_grpc, planes):
    wish = m.SetDefaultRequest(model_name="echo", model_version="1.0")
    answer = ask_grpc("management", "SetDefault", wish)
    assert planes.control.calls == [("set_default", "echo", "1.0")]
    assert answer.msg == 'Default version successfully updated for model "echo" to "1.0"'


def test_unregistering_takes_an_empty_version_for_the_default_one(ask_grpc, planes):
    answer = ask_grpc("management", "UnregisterModel", m.UnregisterModelRequest(model_name="echo"))
    assert planes.control.calls == [("unregister", "echo", None)]
    assert answer.msg == 'Model "echo" unregistered'


def test_unregistering_nothing_is_refused_in_the_known_words(refusal):
    code, details = refusal("management", "UnregisterModel", m.UnregisterModelRequest())
    assert (code, details.split("\n")[0]) == ("INVALID_ARGUMENT", "Parameter url is required.")


@pytest.mark.parametrize("error", [DefaultVersionInUse("x"), UnregisterTimeout("x")])
def test_a_version_that_can_not_go_now_is_a_failed_precondition(refusal, planes, error):
    planes.control.error = error
    code, _ = refusal("management", "UnregisterModel", m.UnregisterModelRequest(model_name="echo"))
    assert code == "FAILED_PRECONDITION"
