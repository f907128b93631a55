"""Plain numbers of what versions did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchere.serving.frontend.rest.errors import BodyTooLong, InflatesTooFar, UnknownCoding
from torchere.serving.telemetry import numbers
from torchere.serving.telemetry.numbers import (
    FOLD_ROWS,
    Listener,
    ServerNumbers,
    VersionNumbers,
    refusal_reason,
)
from torchere.serving.telemetry.saturation import LoadSample
from torchere.serving.telemetry.stages import COLUMNS


def request(**marks: Any) -> Any:
    """An object with the marks of a request that waited 1 s and was answered after 3 s."""
    usual: dict[str, Any] = {"started_s": 0.0, "read_s": 0.5, "enqueued_s": 0.5, "dequeued_s": 1.5}
    usual |= {"company_s": 0.0, "stages_s": (0.0, 1.0, 0.0, 0.0), "answered_s": 3.0, "sending_s": 3.0}
    return SimpleNamespace(**(usual | {"named": False, "streamed": False, "trace": None} | marks))


def batch(version: VersionNumbers, **changes: Any) -> None:
    event = {"size": 1, "succeeded": 1, "failed": 0, "succeeded_wait_s": 0.0, "failed_wait_s": 0.0}
    version.batch_finished(**(event | {"executor_s": 1.0, "handler_s": 1.0} | changes))


def test_each_request_has_the_time_of_its_whole_batch() -> None:
    version = VersionNumbers("m", "1")
    batch(version, size=2, succeeded=2, succeeded_wait_s=1.0, executor_s=2.0, handler_s=1.5)
    assert (version.requests_succeeded, version.handler_s, version.around_s) == (2, 3.0, 1.0)
    assert (version.succeeded_s, version.queue_s) == (5.0, 1.0)
    assert (version.by_size[2].batches, version.by_size[2].handler_s) == (1, 1.5)
    assert version.batches == 1


def test_a_batch_of_requests_that_go_on_is_a_run_without_requests() -> None:
    version = VersionNumbers("m", "1")
    batch(version, size=3, succeeded=0)
    batch(version, size=3, succeeded=1)
    assert (version.batches, version.requests_succeeded) == (2, 1)
    assert {size: of_size.batches for size, of_size in version.by_size.items()} == {3: 0, 1: 1}
    assert version.snapshot().requests_run == 6


def test_failures_are_no_computing() -> None:
    version = VersionNumbers("m", "1")
    batch(version, succeeded=0, failed=1, failed_wait_s=0.5, handler_s=3.0)
    assert (version.requests_failed, version.failed_s, version.queue_s) == (1, 1.5, 0.5)
    assert (version.handler_s, version.around_s, version.last_handler_s) == (0.0, 0.0, None)


def test_any_object_with_the_marks_is_counted() -> None:
    version = VersionNumbers("m", "1")
    version.finished(request(), 200, 4.0)
    version.finished(request(answered_s=0.0), 503, 4.0)
    snapshot = version.snapshot()
    assert snapshot.codes == {("rest", "200"): 1, ("rest", "503"): 1}
    found = {name: snapshot.histograms[place].total for place, name in enumerate(COLUMNS)}
    assert (found["total"], found["wait"], found["inference"], found["transfer"]) == (4.0, 1.0, 1.0, 0.5)


@pytest.mark.parametrize("count", [1, FOLD_ROWS - 1, FOLD_ROWS, FOLD_ROWS + 1, 3 * FOLD_ROWS + 7])
def test_no_request_is_lost_or_counted_twice_between_two_folds(count: int) -> None:
    version = VersionNumbers("m", "1")
    for number in range(count):
        version.finished(request(named=number % 2 == 0), 200, 4.0)
    for _ in range(2):
        snapshot = version.snapshot()
        assert sum(snapshot.histograms[0].counts) == count
        assert (version.named.total_s, version.unnamed.total_s) == (
            4.0 * ((count + 1) // 2),
            4.0 * (count // 2),
        )
    version.finished(request(), 200, 4.0)
    assert sum(version.snapshot().histograms[0].counts) == count + 1


def test_the_times_of_a_version_that_is_gone_stay_in_the_sums_of_its_model() -> None:
    server = ServerNumbers()
    old, new = (VersionNumbers("m", name, server=server) for name in ("1", "2"))
    for version in (old, new):
        server.show(version)
        version.accepted(named=False)
        version.finished(request(), 200, 4.0)
    assert server.forget(old, was_last=False)
    new.fold()
    assert (server.unnamed["m"].requests, server.unnamed["m"].total_s) == (2, 8.0)
    assert server.forget(new, was_last=True)
    assert server.unnamed == {}


def test_a_listener_sees_each_event() -> None:
    class Noting(Listener):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def accepted(self, version: VersionNumbers, named: bool) -> None:
            self.seen.append(("accepted", named))

        def answered(self, version: VersionNumbers, named: bool, total_s: float, wait_s: float) -> None:
            self.seen.append(("answered", named, total_s, wait_s))

        def batch_finished(self, version: VersionNumbers, *batch: Any) -> None:
            self.seen.append(("batch", *batch))

    noting = Noting()
    version = VersionNumbers("m", "1", listeners=(noting,))
    version.accepted(named=True)
    version.finished(request(named=True), 200, 4.0)
    batch(version, requests=("a",), handler_s=0.25)
    batch(version, requests=("b",), succeeded=0, failed=1)
    assert noting.seen == [
        ("accepted", True),
        ("answered", True, 4.0, 1.0),
        ("batch", 1.0, 0.25, ("a",), True),
        ("batch", 1.0, 1.0, ("b",), False),
    ]


def test_busy_seconds_are_those_of_running_batches_as_far_as_there_are_executors() -> None:
    version = VersionNumbers("m", "1", now=lambda: 10.0)
    version.load = lambda: LoadSample(executors=2)
    version.batches_running(1, 0.0)
    version.batches_running(2, 1.0)
    version.batches_running(5, 2.0)  # three were sent ahead
    version.batches_running(1, 4.0)
    version.batches_running(0, 5.0)
    assert version.snapshot().busy_s == 1 + 2 + 4 + 1
    version.batches_running(1, 8.0)  # and runs still
    assert version.snapshot().busy_s == 8 + 2


def test_codes_of_both_protocols_are_told_apart() -> None:
    version = VersionNumbers("m", "1")
    for code in (200, "OK", 777, 778, "OK"):
        version.finished(request(answered_s=0.0), code, 4.0)
    assert version.snapshot().codes == {("rest", "200"): 1, ("rest", "7xx"): 2, ("grpc", "OK"): 2}
    assert numbers.code_label(503) == "503"


def test_a_body_that_is_too_large_is_no_invalid_one() -> None:
    for error in (BodyTooLong(5), InflatesTooFar("5 bytes at most")):
        assert refusal_reason(error) == "too_large"
    assert refusal_reason(UnknownCoding("br")) == "invalid"
