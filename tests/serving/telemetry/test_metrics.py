import math
import threading
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.telemetry import handler_metrics as bounds
from torchere.serving.telemetry.load_metrics import VersionLoad
from torchere.serving.telemetry.metrics import Metrics

HOST = 'Level="Host",Hostname="vm",'


class Sample(NamedTuple):
    name: str
    value: float
    unit: str = "Count"
    metric_type: str = "counter"
    dimensions: tuple[tuple[str, str], ...] = (("ModelName", "m"), ("Level", "Model"))
    request_ids: tuple[str, ...] = ()


@pytest.fixture
def metrics():
    return Metrics("vm", auto_detect=True)


def lines(metrics, name):
    return [line for line in metrics.exposition().splitlines() if line.startswith(name)]


def test_answers_are_counted_by_the_class_of_their_status(metrics):
    for status in (200, 299, 404, 503, 302, 100, 799):
        metrics.request_finished(status)
    assert lines(metrics, "Requests") == [
        f"Requests2XX{{{HOST}}} 2.0",
        f"Requests4XX{{{HOST}}} 1.0",
        f"Requests5XX{{{HOST}}} 4.0",
    ]


def test_predictions_are_counted_under_the_version_that_was_asked_for(metrics):
    metrics.prediction_accepted("noop", None)
    metrics.prediction_accepted("noop", None)
    metrics.prediction_accepted("noop", "1.0")
    assert lines(metrics, "ts_inference_requests_total") == [
        'ts_inference_requests_total{model_name="noop",model_version="default",hostname="vm",} 2.0',
        'ts_inference_requests_total{model_name="noop",model_version="1.0",hostname="vm",} 1.0',
    ]


def test_latencies_add_up_in_microseconds(metrics):
    metrics.prediction_accepted("noop", None)
    for _ in range(2):
        metrics.prediction_answered("noop", None, total_s=0.5, queue_s=0.125)
    labels = '{model_name="noop",model_version="default",hostname="vm",}'
    assert lines(metrics, "ts_inference_latency") == [f"ts_inference_latency_microseconds{labels} 1000000.0"]
    assert lines(metrics, "ts_queue_latency") == [f"ts_queue_latency_microseconds{labels} 250000.0"]
    assert lines(metrics, "QueueTime") == [f"QueueTime{{{HOST}}} 125.0"]


def test_durations_are_distributed_over_buckets_that_include_their_bound(metrics):
    metrics.prediction_accepted("noop", None)
    metrics.prediction_answered("noop", None, total_s=0.001, queue_s=500)
    found = dict(line.rsplit(" ", 1) for line in lines(metrics, "torchere_"))
    name = 'torchere_request_duration_seconds_bucket{model="noop",version="default",le='
    assert found[f'{name}"0.0005",}}'] == "0.0"
    assert found[f'{name}"0.001",}}'] == "1.0"
    queue = 'torchere_queue_duration_seconds_bucket{model="noop",version="default",le='
    assert (found[f'{queue}"120.0",}}'], found[f'{queue}"+Inf",}}']) == ("0.0", "1.0")


def test_an_answer_for_what_was_forgotten_brings_no_labels_back(metrics):
    metrics.prediction_answered("gone", None, total_s=1, queue_s=0)
    assert "gone" not in metrics.exposition()


def batch(metrics, model="m", version="1.0", **changes):
    numbers = {"size": 3, "queue_s": 0.5, "executor_s": 0.010, "handler_s": 0.00254, "succeeded_ids": ["a"]}
    metrics.batch_finished(model, version, **(numbers | changes))


def test_a_batch_sets_the_times_of_handler_and_thread(metrics):
    batch(metrics)
    assert lines(metrics, "PredictionTime") == [
        'PredictionTime{ModelName="m",Level="Model",Hostname="vm",} 2.54'
    ]
    assert lines(metrics, "WorkerThreadTime") == [f"WorkerThreadTime{{{HOST}}} 7.0"]
    assert 'torchere_batch_size_sum{model="m",version="1.0",} 3.0' in lines(metrics, "torchere_batch_size")


def test_a_handler_that_failed_has_no_prediction_time(metrics):
    batch(metrics, succeeded_ids=())
    assert lines(metrics, "PredictionTime") == []


def test_the_stages_of_the_requests_add_up_to_their_whole_time(metrics):
    batch(metrics, size=2, queue_s=0.3, executor_s=0.5, handler_s=0.2)
    found = {line.split('"')[5]: float(line.split()[-1]) for line in lines(metrics, "torchere_stage")}
    assert found == {"queue": 0.3, "transfer": 0.6, "handler": 0.4}
    assert sum(found.values()) == pytest.approx(0.3 + 2 * 0.5)


def test_an_executor_is_called_as_dashboards_know_it(metrics):
    metrics.executor_loaded("noop", "1.11", 9000, 1.4035)
    assert lines(metrics, "WorkerLoadTime") == [
        f'WorkerLoadTime{{WorkerName="W-9000-noop_1.11",{HOST}}} 1403.0'
    ]


def test_load_and_readiness_are_asked_for_when_someone_looks(metrics):
    load = [VersionLoad(3, 9, in_service=4, busy=4, executors={"ready": 4, "starting": 1})]
    ready = [True]
    metrics.watch_load("m", "1.0", lambda: load[0])
    metrics.watch_server(lambda: ready[0], lambda: 7)
    assert lines(metrics, "torchere_queue_depth") == ['torchere_queue_depth{model="m",version="1.0",} 3.0']
    assert lines(metrics, "torchere_saturation") == ['torchere_saturation{model="m",version="1.0",} 1.25']
    assert lines(metrics, "torchere_executors") == [
        'torchere_executors{model="m",version="1.0",state="ready",} 4.0',
        'torchere_executors{model="m",version="1.0",state="starting",} 1.0',
    ]
    assert lines(metrics, "torchere_ready") == ["torchere_ready 1.0"]
    assert lines(metrics, "torchere_inflight") == ["torchere_inflight 7.0"]
    load[0], ready[0] = VersionLoad(), False
    assert lines(metrics, "torchere_queue_depth") == ['torchere_queue_depth{model="m",version="1.0",} 0.0']
    assert lines(metrics, "torchere_ready") == ["torchere_ready 0.0"]


def test_with_auto_detection_handlers_report_under_any_name_by_type(metrics):
    metrics.handler_metrics(
        [
            Sample("HandlerTime", 1.04, "ms", "gauge"),
            Sample("Seen", 1),
            Sample("Seen", 2),
            Sample("Size", 5, "Megabytes", "gauge"),
            Sample("Score", 0.3, "unit", "histogram"),
        ]
    )
    labels = '{ModelName="m",Level="Model",Hostname="vm",}'
    text = metrics.exposition()
    assert f"HandlerTime{labels} 1.04\n" in text
    assert f"Seen{labels} 3.0\n" in text
    assert f"with unit: Megabytes\n# TYPE Size gauge\nSize{labels} 5.0\n" in text
    assert f"Score_sum{labels} 0.3\n" in text


@pytest.mark.parametrize(
    "sample",
    [
        Sample("bad name", 1),
        Sample("", 1),
        Sample("x" + "é", 1),
        Sample("Odd", 1, metric_type="summary"),
        Sample("Odd", 1, dimensions=(("bad label", "x"),)),
        Sample("Odd", 1, dimensions=(("__reserved", "x"),)),
        Sample("Known", math.nan),
        Sample("Known", math.inf),
        Sample("torchere_own", 1),
        Sample("Known", 1, dimensions=(("Other", "x"),)),
        Sample("Known", -1),
        Sample("Requests2XX", 1),
        Sample("torchere_batch_size", 1),
        Sample("ts_inference_requests_total", 1),
        Sample("CPUUtilization", 1),
    ],
)
def test_what_can_not_be_recorded_is_dropped_with_one_warning(metrics, caplog, sample):
    metrics.handler_metrics([Sample("Known", 1)])
    before = metrics.exposition({"Known", "Requests2XX", "torchere_batch_size_count"})
    metrics.handler_metrics([sample, sample, Sample("Known", 0)])
    assert metrics.exposition({"Known", "Requests2XX", "torchere_batch_size_count"}) == before
    assert len([record for record in caplog.records if "is dropped" in record.getMessage()]) == 1


def test_handlers_can_not_invent_names_without_end(metrics, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_FAMILIES", 5)
    metrics.handler_metrics([Sample(f"Name{i}", 1) for i in range(20)])
    assert len(lines(metrics, "Name")) == 3  # two of the five are the built-in ones


def test_handlers_can_not_invent_label_values_without_end(metrics, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_LABEL_SETS", 5)
    metrics.handler_metrics([Sample("Name", 1, dimensions=(("user", str(i)),)) for i in range(20)])
    assert len(lines(metrics, "Name{")) == 5


@given(
    st.lists(
        st.builds(
            Sample,
            st.text(max_size=8),
            st.floats(),
            st.text(max_size=8),
            st.sampled_from(["counter", "gauge", "histogram", "x"]),
            st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=3).map(tuple),
        ),
        max_size=8,
    )
)
def test_no_sample_breaks_the_exposition(samples):
    metrics = Metrics("vm", auto_detect=True)
    metrics.handler_metrics(samples)
    assert metrics.exposition().startswith("# HELP Requests2XX")


def test_a_version_that_is_gone_leaves_nothing_behind(metrics):
    for version in (None, "1.0", "2.0"):
        metrics.prediction_accepted("noop", version)
        metrics.prediction_answered("noop", version, 1, 0)
    for version in ("1.0", "2.0"):
        batch(metrics, "noop", version)
        metrics.executor_loaded("noop", version, 9000, 1)
        metrics.watch_load("noop", version, VersionLoad)
    metrics.handler_metrics([Sample("Seen", 1, dimensions=(("ModelName", "noop"),))])
    metrics.forget("noop", "1.0", was_last=False)
    text = metrics.exposition()
    assert '"1.0"' not in text.replace('le="1.0"', "")
    assert "noop_1.0" not in text
    assert 'model_version="default"' in text
    metrics.forget("noop", "2.0", was_last=True)
    assert "noop" not in metrics.exposition()


def test_a_version_that_never_served_can_be_forgotten(metrics):
    metrics.forget("never", "1.0", was_last=True)
    assert "never" not in metrics.exposition()


def test_counts_from_many_threads_add_up(metrics):
    def work():
        for _ in range(500):
            metrics.prediction_accepted("m", None)
            metrics.prediction_answered("m", None, 1.0, 0.5)
            metrics.request_finished(200)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    labels = '{model_name="m",model_version="default",hostname="vm",}'
    assert lines(metrics, "ts_inference_requests_total") == [f"ts_inference_requests_total{labels} 2000.0"]
    assert lines(metrics, "Requests2XX") == [f"Requests2XX{{{HOST}}} 2000.0"]
