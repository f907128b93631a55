import asyncio
from types import SimpleNamespace

import pytest

from torchere.serving.batching.pending import Pending
from torchere.serving.errors import HandlerFailed
from torchere.serving.execution.executor import BatchReport, ExecutorState, HandlerMetric, Unfinished
from torchere.serving.observation import RegistryMetrics, load_of
from torchere.serving.telemetry.load_metrics import VersionLoad
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.types import InferRequest, InferResponse, ModelKey

KEY = ModelKey("m", "1.0")
DONE = InferResponse(b"")


@pytest.fixture
def metrics():
    return Metrics("vm")


def lines(metrics, start):
    return [line for line in metrics.exposition().splitlines() if line.startswith(start)]


def finish(metrics, outcomes, reported=()):
    """A batch whose requests waited 1 s each, ran 2 s, half of that in the handler."""

    async def pendings():
        loop = asyncio.get_running_loop()
        made = [Pending(InferRequest(f"r{i}", ()), "", 10.0, loop) for i in range(len(outcomes))]
        for pending in made:
            pending.dequeued_s = 11.0
        return made

    observer = RegistryMetrics(metrics).watch(KEY)
    observer.batch_finished(asyncio.run(pendings()), BatchReport(outcomes, 1.0, reported), 2.0)


def stages(metrics):
    return [float(line.split()[-1]) for line in lines(metrics, "torchere_stage_seconds_total")]


def test_a_batch_gives_each_stage_its_share(metrics):
    finish(metrics, [DONE, HandlerFailed("x")])
    assert stages(metrics) == [2.0, 2.0, 2.0]
    assert lines(metrics, "PredictionTime{")


def test_a_batch_that_failed_as_a_whole_has_no_prediction_time(metrics):
    finish(metrics, [HandlerFailed("x")])
    assert lines(metrics, "PredictionTime{") == []


def test_a_request_that_goes_on_has_its_waiting_counted_once(metrics):
    finish(metrics, [Unfinished(DONE)])
    finish(metrics, [DONE])
    assert stages(metrics) == [1.0, 2.0, 2.0]


def test_what_a_handler_reported_is_taken_over(metrics):
    labels = (("ModelName", "m"), ("Level", "Model"))
    finish(metrics, [DONE], (HandlerMetric("HandlerTime", 7.0, "ms", "gauge", labels, ("r0",)),))
    assert lines(metrics, "HandlerTime{") == ['HandlerTime{ModelName="m",Level="Model",Hostname="vm",} 7.0']


def test_handlers_may_know_what_is_declared(metrics):
    assert {metric.name for metric in RegistryMetrics(metrics).declared_metrics} == {
        "HandlerTime",
        "PredictionTime",
    }


class Pool:
    in_service = 3

    def idle_ids(self):
        return (9001,)

    def statuses(self):
        states = (ExecutorState.READY,) * 3 + (ExecutorState.STARTING,)
        return tuple(SimpleNamespace(state=state) for state in states)


def test_the_load_of_a_version_is_read_from_its_batcher_and_pool(metrics):
    batcher = SimpleNamespace(queue_length=2, queue_capacity=98)
    load = load_of(batcher, Pool())
    assert load == VersionLoad(2, 98, 3, 2, {"ready": 3, "starting": 1})
    assert load.saturation == pytest.approx(2 / 3 + 0.02)
    registry = RegistryMetrics(metrics)
    registry.registered(KEY, batcher, Pool())
    assert lines(metrics, "torchere_queue_depth{") == ['torchere_queue_depth{model="m",version="1.0",} 2.0']
    registry.gone(KEY, was_last=True)
    assert lines(metrics, "torchere_queue_depth{") == []


@pytest.mark.parametrize(
    ("load", "saturation"),
    [
        (VersionLoad(), 0.0),
        (VersionLoad(0, 10, 2, 0, {"ready": 2}), 0.0),
        (VersionLoad(10, 0, 2, 2, {"ready": 2}), 2.0),
        (VersionLoad(0, 10, 0, 0, {"starting": 1}), 1.0),
    ],
)
def test_saturation_goes_from_idle_over_all_busy_to_a_full_queue(load, saturation):
    assert load.saturation == saturation
