"""How calls fail for programs: `grpc-status-details-bin`, beside the text that people read."""

import asyncio

import grpc
import pytest
from google.protobuf import empty_pb2
from google.rpc import error_details_pb2, status_pb2

from torchere.serving.errors import (
    CutOff,
    HandlerFailed,
    ModelNotFound,
    QueueFull,
    Restarting,
    VersionNotFound,
)
from torchere.serving.frontend.grpc.errors import (
    INFERENCE,
    MANAGEMENT,
    OPEN_INFERENCE,
    Table,
    _status,
    failure,
)
from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionsRequest
from torchere.serving.frontend.http2.messages import StatusCode


@pytest.fixture
def rich_failure(serving, planes):
    """`rich_failure(error)`: code, text and `google.rpc.Status` of a prediction that fails so."""

    def fail(error=None, method="Predictions", settings=None):
        async def raising(request):
            raise error

        planes.data.behave = raising
        request = PredictionsRequest(model_name="echo") if method == "Predictions" else empty_pb2.Empty()

        async def main():
            async with serving("inference", **(settings or {})) as served:
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await served.call(method, request, timeout=20)
            return failed.value

        failure = asyncio.run(main())
        trailers = dict(failure.trailing_metadata())
        status = status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b""))
        return failure.code(), failure.details(), status

    return fail


def unpacked(status, kind):
    """The only detail of a kind."""
    found = kind()
    (detail,) = [one for one in status.details if one.Is(kind.DESCRIPTOR)]
    assert detail.Unpack(found)
    return found


def test_a_failure_names_its_error_and_says_the_same_as_the_status(rich_failure):
    code, text, status = rich_failure(HandlerFailed("it \u00e9 broke", 503))
    assert (status.code, status.message) == (code.value[0], text)
    assert code is grpc.StatusCode.UNAVAILABLE
    info = unpacked(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("HANDLER_FAILED", "torchere")
    assert len(status.details) == 1


def test_a_full_queue_says_when_to_try_again(rich_failure):
    code, _, status = rich_failure(QueueFull("full", retry_after_s=1.23))
    assert code is grpc.StatusCode.INTERNAL  # as in TorchServe
    assert unpacked(status, error_details_pb2.ErrorInfo).reason == "QUEUE_FULL"
    assert unpacked(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1300


@pytest.mark.parametrize("table", [MANAGEMENT, INFERENCE, OPEN_INFERENCE])
def test_a_request_that_may_have_run_is_not_told_as_one_to_send_again(table: Table) -> None:
    assert failure(CutOff("it was unloaded"), table).code is StatusCode.INTERNAL


def test_an_outage_is_unavailable_and_says_when_to_try_again(rich_failure):
    code, text, status = rich_failure(Restarting(retry_after_s=2.5))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert text.splitlines()[1] == "org.pytorch.serve.http.ServiceUnavailableException"
    assert unpacked(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 2500


def test_a_bug_tells_no_more_than_its_text(rich_failure, planes, monkeypatch):
    nothing: dict[str, str] = {}
    monkeypatch.setattr(planes.data, "healthy", lambda: nothing["a secret"])
    code, text, status = rich_failure(method="Ping")
    assert (code, status.message) == (grpc.StatusCode.INTERNAL, text)
    assert unpacked(status, error_details_pb2.ErrorInfo).reason == "INTERNAL"
    assert "secret" not in str(status)


def test_a_call_without_its_key_names_the_error(rich_failure, planes):
    _, text, status = rich_failure(method="Ping", settings={"keys": planes.keys})
    assert (status.message, status.code) == (text, grpc.StatusCode.PERMISSION_DENIED.value[0])
    assert unpacked(status, error_details_pb2.ErrorInfo).reason == "UNAUTHORIZED"


@pytest.mark.parametrize("size", [3_000, 20_000])
def test_a_text_too_long_for_both_is_sent_alone(rich_failure, size):
    _, text, status = rich_failure(HandlerFailed("m" * size, 500))
    assert text.startswith("m" * min(size, 5_000))
    assert status == status_pb2.Status()


def test_half_a_surrogate_in_a_text_fails_as_any_other(rich_failure):
    _, text, status = rich_failure(HandlerFailed("half \udce9", 500))
    assert (status.message, text.split("\n")[0]) == (text, "half ?")


def test_the_status_of_a_long_text_is_not_kept():
    _status.cache_clear()
    found = failure(HandlerFailed("m" * 1_000_000), INFERENCE)
    assert found.trailers()[2] == b""
    assert _status.cache_info().currsize == 0
    assert len(failure(ModelNotFound.named("m" * 1_000_000), INFERENCE).details) < 400
    assert len(failure(VersionNotFound.of("m" * 1_000_000, "1" * 1_000_000), INFERENCE).details) < 800
