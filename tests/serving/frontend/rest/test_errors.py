import asyncio
import json
import threading

import pytest

from torchere.serving import errors as e
from torchere.serving.errors import WorkflowNotFound
from torchere.serving.frontend.authorisation import Surfaces
from torchere.serving.frontend.rest.errors import BodyTooLong, status_and_type
from torchere.serving.frontend.rest.server import listener_of
from torchere.serving.frontend.rest.wire import error_answer


@pytest.mark.parametrize(
    ("error", "status", "type_name"),
    [
        (e.InvalidRequest("x"), 400, "BadRequestException"),
        (e.NotFound("x"), 404, "ResourceNotFoundException"),
        (e.ModelNotFound("x"), 404, "ModelNotFoundException"),
        (e.VersionNotFound("x"), 404, "ModelVersionNotFoundException"),
        (WorkflowNotFound("x"), 404, "WorkflowNotFoundException"),
        (e.Conflict("x"), 409, "ConflictStatusException"),
        (e.DefaultVersionInUse("x"), 403, "InvalidModelVersionException"),
        (e.NotAllowed("x"), 405, "MethodNotAllowedException"),
        (e.Unauthorized("x"), 400, "InvalidKeyException"),
        (e.InvalidArchive("x"), 400, "InvalidModelException"),
        (e.DownloadFailed("x"), 400, "DownloadArchiveException"),
        (e.Unavailable("x"), 503, "ServiceUnavailableException"),
        (e.QueueFull("x"), 503, "ServiceUnavailableException"),
        (e.DeadlineExceeded("x"), 504, "RequestTimeoutException"),
        (e.HandlerFailed(), 503, "InternalServerException"),
        (e.HandlerFailed("x", 513), 513, "InternalServerException"),
        (e.HandlerFailed("x", 413), 507, "InternalServerException"),
        (e.HandlerFailed("x", 200), 500, "InternalServerException"),
        (e.HandlerFailed("x", 99999), 500, "InternalServerException"),
        (e.OutOfResources("x"), 507, "InternalServerException"),
        (e.ExecutorDied(), 500, "InternalServerException"),
        (e.LoadFailed("x"), 500, "InternalServerException"),
        (e.LoadFailed("x", out_of_memory=True), 507, "InternalServerException"),
        (e.UnregisterTimeout("x"), 408, "RequestTimeoutException"),
        (e.ServingError("x"), 500, "InternalServerException"),
    ],
)
def test_each_error_has_its_status_and_type(error, status, type_name):
    assert status_and_type(error) == (status, type_name)


def test_an_error_without_a_row_gets_that_of_its_parent():
    class Odd(e.ModelNotFound):
        pass

    assert status_and_type(Odd("x")) == (404, "ModelNotFoundException")


def test_the_detail_is_shown_to_operators_only():
    def body(error: e.ServingError, *, show_detail: bool) -> dict:
        return json.loads(error_answer(error, show_detail=show_detail)[2])

    error = e.ExecutorDied("exit code 7")
    assert "detail" not in body(error, show_detail=False)
    assert body(error, show_detail=True)["detail"] == "exit code 7"
    assert "detail" not in body(e.ExecutorDied(), show_detail=True)


@pytest.mark.parametrize("error", [None, e.Conflict("x"), BodyTooLong(9), e.Cancelled(), RuntimeError("x")])
def test_no_thread_is_begun_for_the_answer_to_an_error(planes, ask_listener, error):
    planes.control.error = error

    async def main():
        surfaces: Surfaces = frozenset({"management"})
        app = listener_of(surfaces, planes.data, planes.control, planes.services())
        answer = await ask_listener(app, "GET", "/models" if error else "/nowhere")
        return answer.status, [thread.name for thread in threading.enumerate()]

    status, names = asyncio.run(main())
    assert status >= 400
    assert "AnyIO worker thread" not in names
