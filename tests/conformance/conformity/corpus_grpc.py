"""Calls of both gRPC services; each relies on those before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

INFERENCE, MANAGEMENT = "InferenceAPIsService", "ManagementAPIsService"
WISHES = (
    '{"wish": {"raise": "prediction", "text": "own words", "code": %d}}',
    '{"wish": {"status": %d, "result": "text"}}',
)
PREDICTIONS: tuple[dict[str, Any], ...] = (
    {"model_name": "probe", "input": {"data": "x"}},
    {"model_name": "probe", "model_version": "1.0", "input": {"a": "1", "b": "2"}},
    {"model_name": "probe", "model_version": "9.9", "input": {"data": "x"}},
    {"model_name": "probe", "input": {}},
    {"model_name": "none", "input": {"data": "x"}},
    {"model_name": "", "input": {"data": "x"}},
    {"model_name": "rich", "input": {"data": '{"mode": "raise"}'}},
    {"model_name": "rich", "input": {"data": '{"mode": "memory"}'}},
    {"model_name": "rich", "input": {"data": '{"mode": "wrong_length"}'}},
    {"model_name": "rich", "input": {"data": '{"mode": "stream"}'}},
)
CODES = (400, 401, 403, 404, 409, 413, 416, 418, 429, 499, 500, 501, 503, 504, 507)


def grpc_cases() -> Iterator[dict[str, Any]]:
    """Records as those of the recording, without an answer."""
    for number, (service, method, request) in enumerate([*_inference(), *_management(), *_breaking()]):
        yield {
            "name": f"grpc {number}: {method} {request}",
            "service": service,
            "method": method,
            "request": request,
        }


def _inference() -> Iterator[tuple[str, str, Any]]:
    yield INFERENCE, "Ping", {}
    for request in PREDICTIONS:
        yield INFERENCE, "Predictions", request
    for wish in WISHES:
        for code in CODES:
            yield INFERENCE, "Predictions", {"model_name": "probe", "input": {"data": wish % code}}
    for request in (PREDICTIONS[2], PREDICTIONS[4], PREDICTIONS[5], PREDICTIONS[-1]):
        yield INFERENCE, "StreamPredictions", request
    yield INFERENCE, "StreamPredictions2", []


def _breaking() -> Iterator[tuple[str, str, Any]]:
    """Calls that one server takes and the other does not, and such as cost TorchServe its workers."""
    yield MANAGEMENT, "RegisterModel", {"url": "echo.mar", "model_name": "g space"}
    broken = {"url": "broken.mar", "model_name": "g_broken", "initial_workers": 1, "synchronous": True}
    yield MANAGEMENT, "RegisterModel", broken
    yield INFERENCE, "StreamPredictions", PREDICTIONS[0]
    stream = {"model_name": "probe", "input": {"data": "x"}}
    yield INFERENCE, "StreamPredictions2", [stream]
    yield INFERENCE, "StreamPredictions2", [{**stream, "model_name": "none", "sequence_id": "s1"}]
    yield INFERENCE, "StreamPredictions2", [{**stream, "model_name": "", "sequence_id": "s1"}]
    yield INFERENCE, "StreamPredictions2", [{**stream, "sequence_id": "s1"}]
    yield INFERENCE, "StreamPredictions", {"model_name": "rich", "input": {"data": '{"mode": "raise"}'}}


def _management() -> Iterator[tuple[str, str, Any]]:
    echo = {"url": "echo.mar"}
    for request in (
        {},
        {"url": "missing.mar"},
        {"url": "../echo.mar"},
        {"url": "not_an_archive.mar"},
        {"url": "http://127.0.0.1:9/x.mar"},
        {"url": "s3://bucket/x.mar"},
        {**echo, "model_name": "g_zero"},
        {**echo, "model_name": "g_zero"},
        {**echo, "model_name": "g_negative", "initial_workers": -1},
        {**echo, "model_name": "g_async", "initial_workers": 1},
        {**echo, "model_name": "g_sync", "initial_workers": 1, "synchronous": True},
        {**echo, "model_name": "g_runtime", "runtime": "java"},
        {**echo, "model_name": "g_batch", "batch_size": 3, "max_batch_delay": 40, "response_timeout": 9},
    ):
        yield MANAGEMENT, "RegisterModel", request
    for name, version, customized in (
        ("g_batch", "", True),  # a customized describe waits for the worker, whose status comes next
        ("g_zero", "", True),
        ("g_sync", "", False),
        ("g_batch", "", False),
        ("g_zero", "all", False),
        ("g_sync", "9.9", False),
        ("none", "", False),
        ("none", "all", False),
        ("none", "", True),
        ("g_sync", "9.9", True),
        ("", "", False),
        ("g_sync", "", True),
        ("probe", "1.0", True),
    ):
        request = {"model_name": name, "model_version": version, "customized": customized}
        yield MANAGEMENT, "DescribeModel", request
    for limit, token in ((0, 0), (2, 0), (2, 2), (-1, 0), (1000, 0), (2, -1), (2, 1000)):
        yield MANAGEMENT, "ListModels", {"limit": limit, "next_page_token": token}
    for request in (
        {"model_name": "g_sync", "min_worker": 2, "synchronous": True},
        {"model_name": "g_sync", "min_worker": 1, "synchronous": True, "model_version": "1.0"},
        {"model_name": "g_sync", "synchronous": True},
        {"model_name": "g_sync"},
        {"model_name": "g_sync", "min_worker": 3, "max_worker": 2},
        {"model_name": "g_sync", "min_worker": -1, "max_worker": -1, "synchronous": True},
        {"model_name": "g_sync", "model_version": "9.9", "min_worker": 1},
        {"model_name": "none", "min_worker": 1},
        {"model_name": "", "min_worker": 1},
    ):
        yield MANAGEMENT, "ScaleWorker", request
    for name, version in (("g_sync", "1.0"), ("g_sync", "9.9"), ("g_sync", ""), ("none", "1.0"), ("", "")):
        yield MANAGEMENT, "SetDefault", {"model_name": name, "model_version": version}
    for name, version in (
        ("g_sync", "9.9"),
        ("none", ""),
        ("", ""),
        ("g_sync", "1.0"),
        ("g_sync", ""),
        ("g_zero", ""),
    ):
        yield MANAGEMENT, "UnregisterModel", {"model_name": name, "model_version": version}
