from types import SimpleNamespace
from typing import Any

import pytest

from torchere.handlers.metrics import MetricSample
from torchere.serving.batching.request import Request
from torchere.serving.errors import HandlerFailed
from torchere.serving.registry.observation import RegistryMetrics, load_of, load_sample_of
from torchere.serving.registry.version import VersionState
from torchere.serving.telemetry import handler_metrics
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.saturation import LoadSample
from torchere.serving.telemetry.scrape import ExecutorLoad, VersionLoad
from torchere.serving.types import InferResponse, ModelKey
from torchere.serving.workers.executor import BatchReport, ExecutorState, Unfinished
from torchere.serving.workers.run import Run

KEY = ModelKey("m", "1.0")
DONE = InferResponse(b"")


@pytest.fixture
def metrics():
    return Metrics("vm")


def lines(metrics, start):
    return [line for line in metrics.exposition().splitlines() if line.startswith(start)]


def finish(metrics, outcomes, reported=()):
    """A run whose requests waited 1 s each, and that was in a lane for 2 s, half of that in the handler."""
    requests = [Request(f"r{i}", 0.0) for i in range(len(outcomes))]
    for request in requests:
        request.enqueued_s, request.dequeued_s = 10.0, 11.0
    registry = RegistryMetrics(metrics)
    version = fake_version(registry.watch(KEY))
    registry.registered(version, lambda: 1.0)
    report = BatchReport(outcomes, 1.0, reported)
    unused: Any = None
    version.observer.batch_finished(Run(requests, unused, 11.0), report, 2.0)
    return version.observer


def test_names_of_metrics_are_charged_to_the_model_of_the_version(monkeypatch):
    monkeypatch.setattr(handler_metrics, "MAX_FAMILIES", 4)
    metrics = Metrics("vm", auto_detect=True)
    labels = [(("ModelName", f"forged{i}"),) for i in range(6)]
    finish(metrics, [DONE], [MetricSample(f"Own{i}", 1.0, "", "counter", labels[i], ()) for i in range(6)])
    assert len(lines(metrics, "Own")) == 2


def test_a_batch_is_counted_with_the_time_it_took(metrics):
    meter = finish(metrics, [DONE, HandlerFailed("x"), Unfinished(DONE)]).meter
    assert lines(metrics, "torchere_batch_size_sum{")[0].endswith(" 3.0")
    assert lines(metrics, "PredictionTime{")[0].endswith(" 1000.0")
    assert (meter.requests_succeeded, meter.requests_failed) == (1, 1)
    assert (meter.succeeded_s, meter.failed_s, meter.queue_s) == (3.0, 3.0, 2.0)
    assert (meter.handler_s, meter.around_s) == (1.0, 1.0)


def test_busy_seconds_are_those_of_batches_that_executors_have(metrics):
    meter = finish(metrics, [DONE]).meter
    meter.batches_running(1, 10.0)
    meter.batches_running(0, 12.5)
    assert lines(metrics, "torchere_executor_busy_seconds_total{")[0].endswith(" 2.5")


def test_the_span_of_a_batch_gets_its_requests_and_how_many_wait():
    spans = []

    def batch_finished(version, executor_s, handler_s, requests, succeeded):
        ids = [request.request_id for request in requests]
        spans.append((*version.key, ids, version.load().queued, executor_s, succeeded))

    tracing: Any = SimpleNamespace(batch_finished=batch_finished)
    metrics = Metrics("vm")
    metrics.tracing = tracing
    finish(metrics, [DONE, HandlerFailed("x")])
    finish(metrics, [HandlerFailed("x")])
    assert spans == [("m", "1.0", ["r0", "r1"], 2, 2.0, True), ("m", "1.0", ["r0"], 2, 2.0, False)]


def test_a_batch_that_failed_as_a_whole_has_no_prediction_time(metrics):
    finish(metrics, [HandlerFailed("x")])
    assert lines(metrics, "PredictionTime{") == []


def test_what_a_handler_reported_is_taken_over(metrics):
    labels = (("ModelName", "m"), ("Level", "Model"))
    finish(metrics, [DONE], (MetricSample("HandlerTime", 7.0, "ms", "gauge", labels, ("r0",)),))
    assert lines(metrics, "HandlerTime{") == ['HandlerTime{ModelName="m",Level="Model",Hostname="vm",} 7.0']


def test_what_executors_go_through_is_taken_over(metrics):
    observer = finish(metrics, [DONE])
    observer.executor_loaded(9000, 1.5)
    observer.executor_lost("signal")
    assert lines(metrics, "torchere_model_load_duration_seconds{")[0].endswith(" 1.5")
    restarts = lines(metrics, "torchere_executor_restarts_total{")
    assert [line for line in restarts if line.endswith(" 1.0")] == [
        'torchere_executor_restarts_total{model="m",version="1.0",reason="signal",} 1.0'
    ]
    assert len(restarts) > 3  # the others count from 0


def test_handlers_may_know_what_is_declared(metrics):
    assert {metric.name for metric in RegistryMetrics(metrics).declared_metrics} == {
        "HandlerTime",
        "PredictionTime",
    }


class Pool:
    size = 4

    def __init__(self, states):
        self.states = states
        self.in_service = states.count(ExecutorState.READY)

    def statuses(self):
        return tuple(
            SimpleNamespace(state=state, executor_id=9000 + i, pid=77) for i, state in enumerate(self.states)
        )


STATES = (ExecutorState.READY,) * 3 + (ExecutorState.STARTING,)


def fake_version(observer, isolation="thread", directory="/nowhere", states=STATES):
    batcher = SimpleNamespace(
        queue_length=2, queue_capacity=98, predicted_s=0.25, oldest_age_s=lambda now_s: 0.5
    )
    archive = SimpleNamespace(manifest={"model": {"serializedFile": "net.pt"}}, directory=directory)
    pool = Pool(states)
    return SimpleNamespace(
        observer=observer,
        batcher=batcher,
        pool=pool,
        ready=pool.in_service > 0,
        origin=SimpleNamespace(archive=archive, isolation=isolation),
        state=VersionState.READY,
        settings=SimpleNamespace(response_timeout_s=7.0),
    )


def test_the_load_of_a_version_is_read_from_its_batcher_and_pool(metrics):
    load = load_of(fake_version(None), 1.0, 100)
    assert load == VersionLoad(
        queued=2,
        queue_room=98,
        oldest_age_s=0.5,
        predicted_s=0.25,
        executors=(
            ExecutorLoad(9000, "ready", 77),  # lanes of one process: its memory counts once
            ExecutorLoad(9001, "ready"),
            ExecutorLoad(9002, "ready"),
            ExecutorLoad(9003, "starting"),
        ),
        state="ready",
        response_timeout_s=7.0,
        weights_bytes=100,
        weight=1.0,
    )
    registry = RegistryMetrics(metrics)
    version = fake_version(registry.watch(KEY))
    registry.registered(version, lambda: 1.0)
    assert lines(metrics, "torchere_queue_depth{") == ['torchere_queue_depth{model="m",version="1.0",} 2.0']
    registry.gone(version, was_last=True)
    assert lines(metrics, "torchere_queue_depth{") == []


def test_a_version_whose_executors_are_all_down_is_not_ready(metrics):
    registry = RegistryMetrics(metrics)
    version = fake_version(registry.watch(KEY), states=(ExecutorState.RESTARTING, ExecutorState.STARTING))
    registry.registered(version, lambda: 1.0)
    (line,) = (line for line in lines(metrics, "torchere_model_state{") if line.endswith(" 1.0"))
    assert line == 'torchere_model_state{model="m",version="1.0",state="restarting",} 1.0'


def test_worker_processes_are_told_by_their_id():
    load = load_of(fake_version(None, "process"), 1.0, 0)
    assert {executor.pid for executor in load.executors} - {0} == {77}


def test_the_size_of_weights_is_read_once(metrics, tmp_path):
    (tmp_path / "net.pt").write_bytes(b"x" * 100)
    registry = RegistryMetrics(metrics)
    registry.registered(fake_version(registry.watch(KEY), directory=tmp_path), lambda: 1.0)
    (tmp_path / "net.pt").unlink()
    assert [line.split()[-1] for line in lines(metrics, "torchere_model_weights_bytes{")] == ["100.0"]


def test_saturation_follows_from_the_queue_and_the_executors_in_service():
    assert load_sample_of(fake_version(None)) == LoadSample(queued=2, queue_room=98, executors=3, wanted=4)
