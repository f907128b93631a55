import asyncio
import dataclasses
import math
import os
import re
import threading
import time
from collections import Counter
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchere.handlers.metrics import MetricSample
from torchere.serving.access.client_limits import ClientLimits, Quota
from torchere.serving.batching.request import Request as Prediction
from torchere.serving.errors import (
    Cancelled,
    DeadlineExceeded,
    HandlerFailed,
    ModelNotFound,
    Quarantined,
    QueueFull,
    Restarting,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from torchere.serving.telemetry import catalogue
from torchere.serving.telemetry import handler_metrics as bounds
from torchere.serving.telemetry.metrics import VERSIONS_A_TURN, Metrics
from torchere.serving.telemetry.scrape import ExecutorLoad, Extent, States, VersionLoad

HOST = 'Level="Host",Hostname="vm",'


class Request(NamedTuple):
    dequeued_s: float = 0.0


def reported(
    name: str,
    value: float,
    unit: str = "Count",
    metric_type: str = "counter",
    dimensions: tuple[tuple[str, str], ...] = (("ModelName", "m"), ("Level", "Model")),
) -> MetricSample:
    return MetricSample(name, value, unit, metric_type, dimensions, ())


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


def test_a_hosts_name_that_is_not_utf_8_can_be_written():
    metrics = Metrics("caf\udce9")
    metrics.request_finished(200)
    assert lines(metrics, "Requests2XX") == ['Requests2XX{Level="Host",Hostname="caf?",} 1.0']
    metrics.exposition().encode()


def test_a_probe_that_says_no_is_not_counted_as_an_answer_of_the_server(metrics):
    metrics.request_finished(503, is_probe=True)
    metrics.request_finished(200, is_probe=True)
    assert lines(metrics, "Requests") == [
        f"Requests2XX{{{HOST}}} 1.0",
        f"Requests4XX{{{HOST}}} 0.0",
        f"Requests5XX{{{HOST}}} 0.0",
    ]


def test_torchserves_counters_go_by_the_version_that_was_asked_for(metrics, shown):
    meter = shown("noop")
    for named in (False, False, True):
        meter.accepted(named)
    assert lines(metrics, "ts_inference_requests_total") == [
        'ts_inference_requests_total{model_name="noop",model_version="default",hostname="vm",} 2.0',
        'ts_inference_requests_total{model_name="noop",model_version="1.0",hostname="vm",} 1.0',
    ]


def test_the_default_counter_of_a_model_is_one_for_all_its_versions(metrics, shown, answer):
    old, new = shown("noop", "1.0"), shown("noop", "2.0")
    answer(old)
    answer(new)
    metrics.forget(old, was_last=False)
    assert lines(metrics, "ts_inference_requests_total") == [
        'ts_inference_requests_total{model_name="noop",model_version="default",hostname="vm",} 2.0'
    ]


def test_latencies_add_up_in_microseconds(metrics, shown, answer):
    meter = shown("noop")
    for _ in range(2):
        answer(meter, total_s=0.5, queue_s=0.125)
    labels = '{model_name="noop",model_version="default",hostname="vm",}'
    assert lines(metrics, "ts_inference_latency") == [f"ts_inference_latency_microseconds{labels} 1000000.0"]
    assert lines(metrics, "ts_queue_latency") == [f"ts_queue_latency_microseconds{labels} 250000.0"]
    assert lines(metrics, "QueueTime") == [f"QueueTime{{{HOST}}} 125.0"]


def test_ours_go_by_the_version_that_answered(metrics, shown, answer):
    answer(shown("noop", "2.0"), named=False)
    for name in ("request_duration_seconds_count", "queue_duration_seconds_count", "requests_total"):
        (line,) = lines(metrics, f"torchere_{name}")
        assert 'model="noop",version="2.0"' in line


def test_a_prediction_is_counted_by_how_it_came_and_what_it_was_told(metrics, shown, answer):
    meter = shown()
    answer(meter)
    answer(meter, protocol="grpc", code="OK")
    for code in (503, 777, 778):
        request = Prediction("r", 0.0)
        request.meter = meter
        metrics.prediction_ends(request, code)
        metrics.prediction_ends(request, 200)  # it is over already
    labels = 'torchere_requests_total{model="m",version="1.0",protocol='
    assert lines(metrics, "torchere_requests_total") == [
        f'{labels}"rest",code="200",}} 1.0',
        f'{labels}"rest",code="503",}} 1.0',
        f'{labels}"rest",code="7xx",}} 2.0',
        f'{labels}"grpc",code="OK",}} 1.0',
    ]
    assert lines(metrics, "torchere_request_duration_seconds_count") == [
        'torchere_request_duration_seconds_count{model="m",version="1.0",} 2.0'
    ]


def test_what_does_not_end_well_is_counted_by_reason_or_stage(metrics, shown):
    meter = shown()
    for error in (QueueFull("full"), Unavailable("none"), DeadlineExceeded("late"), Quarantined("bad")):
        meter.refused(error)
    meter.failed(Cancelled("gone"), Request())
    meter.failed(Cancelled("gone"), Request(dequeued_s=11.0))
    meter.failed(DeadlineExceeded("late"), Request(dequeued_s=11.0))
    meter.failed(DeadlineExceeded("too late to begin"), None)
    meter.failed(Restarting(1.0), Request())
    meter.failed(HandlerFailed(), Request(dequeued_s=11.0))
    meter.restarts["signal"] += 1
    metrics.refused(Unauthorized("who"))
    metrics.refused(ModelNotFound.named("made-up"))
    metrics.refused_body()
    text = metrics.exposition()
    for reason in ("queue_full", "not_ready", "deadline", "quarantined", "restarting"):
        assert f'requests_rejected_total{{model="m",version="1.0",reason="{reason}",}} 1.0' in text
    for reason in ("auth", "not_found", "too_large"):
        assert f'requests_rejected_total{{model="",version="",reason="{reason}",}} 1.0' in text
    for stage in ("queue", "executor"):
        assert f'requests_cancelled_total{{model="m",version="1.0",stage="{stage}",}} 1.0' in text
    assert 'requests_expired_total{model="m",version="1.0",stage="executor",} 1.0' in text
    assert 'requests_expired_total{model="m",version="1.0",stage="queue",} 1.0' in text
    assert 'executor_restarts_total{model="m",version="1.0",reason="signal",} 1.0' in text
    assert "made-up" not in text


def test_an_answer_for_what_was_forgotten_brings_no_labels_back(metrics, shown, answer):
    meter = shown("gone")
    metrics.forget(meter, was_last=True)
    answer(meter)
    assert "gone" not in metrics.exposition()


def test_what_is_not_registered_is_not_shown(metrics, answer):
    answer(metrics.meter("never", "1.0"))
    assert "never" not in metrics.exposition()


def test_a_batch_sets_the_times_of_handler_and_thread(metrics, shown, batch):
    batch(shown(), size=3, succeeded=3)
    assert lines(metrics, "PredictionTime") == [
        'PredictionTime{ModelName="m",Level="Model",Hostname="vm",} 2.54'
    ]
    assert lines(metrics, "WorkerThreadTime") == [f"WorkerThreadTime{{{HOST}}} 7.0"]
    assert 'torchere_batch_size_sum{model="m",version="1.0",} 3.0' in lines(metrics, "torchere_batch_size")
    (line,) = lines(metrics, "torchere_executor_last_progress_timestamp_seconds")
    assert abs(float(line.split()[-1]) - time.time()) < 60


def test_batches_are_counted_by_their_size(metrics, shown, batch):
    meter = shown()
    for size in (1, 2, 3, 3, 300):
        batch(meter, size=size, succeeded=size)
    counts = [line.split("le=")[1] for line in lines(metrics, "torchere_batch_size_bucket")]
    assert counts[:3] == ['"1.0",} 1.0', '"2.0",} 2.0', '"4.0",} 4.0']
    assert counts[-2:] == ['"256.0",} 4.0', '"+Inf",} 5.0']
    assert lines(metrics, "torchere_batch_size_sum")[0].endswith(" 309.0")


def test_a_batch_that_comes_while_metrics_are_written_shows_no_time_that_none_took(metrics, shown, batch):
    begun = metrics.expose()  # its text is made in a thread
    batch(shown())
    assert begun.text(["PredictionTime"]) == ""
    assert metrics.exposition(["PredictionTime"]).endswith(" 2.54\n")


def test_a_handler_that_failed_has_no_prediction_time(metrics, shown, batch):
    batch(shown(), succeeded=0, failed=1)
    assert lines(metrics, "PredictionTime") == []


def test_the_prediction_time_of_a_model_is_that_of_its_last_batch(metrics, shown, batch):
    old, new = shown("m", "1.0"), shown("m", "2.0")
    batch(new, handler_s=0.002)
    batch(old, handler_s=0.001)
    old.last_batch_s = new.last_batch_s + 1
    assert lines(metrics, "PredictionTime")[0].endswith(" 1.0")


def test_an_executor_is_called_as_dashboards_know_it(metrics, shown):
    metrics.executor_loaded(shown("noop", "1.11"), 9000, 1.4035)
    assert lines(metrics, "WorkerLoadTime") == [
        f'WorkerLoadTime{{WorkerName="W-9000-noop_1.11",{HOST}}} 1403.0'
    ]
    assert lines(metrics, "torchere_model_load_duration_seconds") == [
        'torchere_model_load_duration_seconds{model="noop",version="1.11",} 1.4035'
    ]


def test_the_series_of_an_executor_goes_with_it(metrics):
    running = [9000]
    meter = metrics.meter("m", "1.0")
    metrics.show(
        meter, lambda: VersionLoad(executors=tuple(ExecutorLoad(number, "ready") for number in running))
    )
    metrics.executor_loaded(meter, 9000, 1)
    for number in range(9001, 9020):  # one up, one down, and nobody looks meanwhile
        running.append(number)
        metrics.executor_loaded(meter, number, 1)
        running.pop()
    assert len(metrics._executors["m", "1.0"]) <= 2
    (line,) = lines(metrics, "WorkerLoadTime")
    assert "W-9000-m_1.0" in line
    running[:] = []
    assert lines(metrics, "WorkerLoadTime") == []


EXECUTORS = (ExecutorLoad(9000, "ready", os.getpid()), ExecutorLoad(9001, "starting", 2**22 + 1))


def test_load_and_readiness_are_asked_for_when_someone_looks(metrics):
    load = [VersionLoad(3, 9, 0.5, 0.25, EXECUTORS, "ready", 120.0, 1000, 1.0)]
    ready = [True]
    metrics.know_states(States(("starting", "ready"), ("loading", "ready")))
    metrics.show(metrics.meter("m", "1.0"), lambda: load[0])
    metrics.watch_server(lambda: ready[0], lambda: 7, lambda: 5)
    m = 'model="m",version="1.0",'
    assert set(lines(metrics, "torchere_")) >= {
        f"torchere_queue_depth{{{m}}} 3.0",
        f"torchere_queue_capacity{{{m}}} 12.0",
        f"torchere_queue_oldest_age_seconds{{{m}}} 0.5",
        f"torchere_batch_predicted_duration_seconds{{{m}}} 0.25",
        f"torchere_saturation{{{m}}} 0.0",
        f'torchere_executors{{{m}state="ready",}} 1.0',
        f'torchere_executors{{{m}state="starting",}} 1.0',
        f'torchere_executor_state{{{m}executor="9000",state="ready",}} 1.0',
        f'torchere_executor_state{{{m}executor="9000",state="starting",}} 0.0',
        f'torchere_model_state{{{m}state="ready",}} 1.0',
        f'torchere_model_state{{{m}state="loading",}} 0.0',
        f"torchere_model_weights_bytes{{{m}}} 1000.0",
        f"torchere_model_response_timeout_seconds{{{m}}} 120.0",
        f"torchere_model_version_weight{{{m}}} 1.0",
        "torchere_ready 1.0",
        "torchere_inflight 7.0",
        "torchere_access_log_dropped_lines_total 5.0",
    }
    (memory,) = lines(metrics, "torchere_executor_resident_bytes")  # the other process is not there
    assert f'{m}executor="9000"' in memory
    load[0], ready[0] = VersionLoad(), False
    assert lines(metrics, "torchere_queue_depth") == [f"torchere_queue_depth{{{m}}} 0.0"]
    assert lines(metrics, "torchere_ready") == ["torchere_ready 0.0"]


def test_with_auto_detection_handlers_report_under_any_name_by_type(metrics):
    metrics.handler_metrics(
        [
            reported("HandlerTime", 1.04, "ms", "gauge"),
            reported("Seen", 1),
            reported("Seen", 2),
            reported("Size", 5, "Megabytes", "gauge"),
            reported("Score", 0.3, "unit", "histogram"),
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
        reported("bad name", 1),
        reported("", 1),
        reported("x" + "é", 1),
        reported("Odd", 1, metric_type="summary"),
        reported("Odd", 1, dimensions=(("bad label", "x"),)),
        reported("Odd", 1, dimensions=(("__reserved", "x"),)),
        reported("Known", math.nan),
        reported("Known", math.inf),
        reported("torchere_own", 1),
        reported("Known", 1, dimensions=(("Other", "x"),)),
        reported("Known", -1),
        reported("Requests2XX", 1),
        reported("torchere_batch_size", 1),
        reported("ts_inference_requests_total", 1),
        reported("CPUUtilization", 1),
        reported("process_cpu_seconds", 1, metric_type="gauge"),
    ],
)
def test_what_can_not_be_recorded_is_dropped_with_one_warning(metrics, caplog, sample):
    metrics.handler_metrics([reported("Known", 1)])
    before = metrics.exposition({"Known", "Requests2XX", "torchere_batch_size_count"})
    metrics.handler_metrics([sample, sample, reported("Known", 0)])
    assert metrics.exposition({"Known", "Requests2XX", "torchere_batch_size_count"}) == before
    assert len([record for record in caplog.records if "is dropped" in record.getMessage()]) == 1


def test_handlers_can_not_invent_names_without_end(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_FAMILIES", 5)
    metrics = Metrics("vm", auto_detect=True)
    for model in "abcdef":
        metrics.handler_metrics([reported(f"Name{model}{i}", 1) for i in range(20)], model)
    assert len(lines(metrics, "Name")) == 5


def test_a_model_leaves_names_of_metrics_to_others(monkeypatch, caplog):
    monkeypatch.setattr(bounds, "MAX_FAMILIES", 10)
    metrics = Metrics("vm", auto_detect=True)
    for model, own in (("greedy", 5), ("modest", 3), ("last", 1)):
        # A share is of the model that reports, whatever its labels say.
        metrics.handler_metrics([reported(f"Name_{model}_{i}", 1) for i in range(20)], model)
        assert len(lines(metrics, f"Name_{model}_")) == own
    assert "its model has 5 undeclared metrics; 5 of 10 are for others" in caplog.text


def test_handlers_can_not_invent_label_values_without_end(metrics, monkeypatch, caplog):
    monkeypatch.setattr(bounds, "MAX_LABEL_SETS", 8)
    for model, own in (("greedy", 4), ("modest", 2), ("last", 1), ("late", 1), ("none", 0)):
        samples = [reported("Name", 1, dimensions=(("of", f"{model}{i}"),)) for i in range(20)]
        metrics.handler_metrics(samples, model)
        assert len(lines(metrics, f'Name{{of="{model}')) == own
    assert "its model has 4 combinations of label values for this name; 4 of 8 are for others" in caplog.text
    metrics._of_handlers.forget("greedy")
    metrics.handler_metrics([reported("Name", 1, dimensions=(("of", "none"),))], "none")
    assert len(lines(metrics, 'Name{of="none"')) == 1


def test_each_model_has_its_prediction_time_however_many_values_handlers_report(monkeypatch, batch):
    monkeypatch.setattr(bounds, "MAX_LABEL_SETS", 8)
    metrics = Metrics("vm")
    for user in range(20):
        dimensions = (("ModelName", "noisy"), ("Level", f"{user}"))
        metrics.handler_metrics([reported("PredictionTime", 1, dimensions=dimensions)], "noisy")
    for number in range(20):
        meter = metrics.meter(f"m{number}", "1.0")
        metrics.show(meter)
        batch(meter)
    assert len(lines(metrics, 'PredictionTime{ModelName="noisy"')) == 4
    assert len(lines(metrics, 'PredictionTime{ModelName="m')) == 20


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
def test_the_kind_of_a_series_is_looked_up_once_and_not_for_each_value(metrics, monkeypatch, kind):
    looked_up = Mock(wraps=catalogue.updater)
    monkeypatch.setattr(bounds, "updater", looked_up)
    for model in ("a", "b"):
        metrics.handler_metrics([reported("Name", 2, metric_type=kind, dimensions=(("of", model),))] * 3)
    assert looked_up.call_count == 2


def of_users(first: int, last: int, name: str = "Name") -> list[MetricSample]:
    return [reported(f"{name}{i % 3}", 1, dimensions=(("user", str(i)),)) for i in range(first, last)]


def test_handlers_can_not_invent_series_of_many_names_without_end(monkeypatch, caplog):
    monkeypatch.setattr(bounds, "MAX_SERIES", 8)
    metrics = Metrics("vm", auto_detect=True)
    for first, model, own in ((0, "greedy", 4), (20, "modest", 2), (40, "last", 1)):
        metrics.handler_metrics(of_users(first, first + 20, model), model)
        assert len(lines(metrics, model)) == own
    assert "its model has 4 combinations of label values; 4 of 8 are for others" in caplog.text


def test_a_model_that_is_gone_leaves_no_value_and_no_name_that_was_its_own(metrics, monkeypatch):
    for turn in range(3):
        meter = metrics.meter("m", "1.0")
        metrics.show(meter)
        metrics.handler_metrics([*of_users(0, 9), reported("Other", 1, metric_type="gauge")], "m")
        metrics.handler_metrics([*of_users(0, 9, "Kept"), reported("Name0", 1, dimensions=())], f"of {turn}")
        assert len(lines(metrics, "Name")) == 9
        assert len(lines(metrics, "Kept")) == 9
        metrics.forget(meter, was_last=True)
        assert lines(metrics, "Name") + lines(metrics, "Other") == []
        assert "Other" not in metrics.exposition()
        assert len(lines(metrics, "Kept")) == 9
    metrics.handler_metrics([reported("Other", 1, metric_type="histogram")], "another")  # of another type now
    assert "# TYPE Other histogram" in metrics.exposition()


def test_what_two_models_report_as_one_goes_on_for_the_one_that_stays(metrics):
    meter = metrics.meter("m", "1.0")
    metrics.show(meter)
    user, zone = ("user", "1"), ("zone", "2")
    metrics.handler_metrics([reported("Name", 1, dimensions=(user, zone))], "m")
    metrics.handler_metrics([reported("Name", 1, dimensions=(zone, user))], "other")
    metrics.forget(meter, was_last=True)
    metrics.handler_metrics([reported("Name", 3, dimensions=(zone, user))], "other")
    assert [line.partition("}")[2] for line in lines(metrics, "Name{")] == [" 3.0"]


def test_a_value_of_the_server_stays_when_a_model_goes_that_reported_it_first(metrics):
    sample = reported("Time", 1, "ms", "histogram", (("ModelName", "other"), ("Level", "Model")))
    metrics.handler_metrics([sample], "m")
    metrics.handler_metrics([sample])
    metrics._of_handlers.forget("m")
    metrics.handler_metrics([sample])
    assert [line.partition("}")[2] for line in lines(metrics, "Time_count{")] == [" 3.0"]
    metrics._of_handlers.forget("other")
    assert lines(metrics, "Time_") == []


def test_a_counter_that_comes_or_goes_during_a_scrape_has_its_declared_name(metrics):
    metrics.handler_metrics([reported("Old_total", 1)], "m")
    begun = metrics.expose()

    def plain():
        collected = [family for family in begun.families.registry.collect() if family.name == "Old"]
        metrics._of_handlers.forget("m")
        metrics.handler_metrics([reported("New_total", 1)], "other")
        return collected

    text = dataclasses.replace(begun, plain=plain).text({"Old_total", "New_total"})
    assert re.findall(r"^(\w+){ModelName", text, re.MULTILINE) == ["Old_total", "New_total"]
    assert re.findall(r"^# TYPE (\w+)", text, re.MULTILINE) == ["Old_total", "New_total"]


def test_a_name_stays_while_a_model_that_is_still_there_reports_it(metrics):
    meter = metrics.meter("m", "1.0")
    metrics.show(meter)
    for model in ("m", "other"):
        metrics.handler_metrics([reported("Name", 1, dimensions=(("of", model),))], model)
    metrics.forget(meter, was_last=True)
    assert lines(metrics, "Name{") == ['Name{of="other",Hostname="vm",} 1.0']
    metrics._of_handlers.forget("other")
    assert "Name" not in metrics.exposition()


@pytest.mark.parametrize(
    "sample",
    [
        reported("N" * 2000, 1),
        reported("Name", 1, unit="u" * 2000),
        reported("Name", 1, dimensions=(("user", "v" * 2000),)),
        reported("Name", 1, dimensions=(("l" * 2000, "v"),)),
        reported("Name", 1, dimensions=(("Hostname", "v" * 2000),)),
    ],
)
def test_long_texts_of_handlers_are_not_kept(metrics, caplog, sample):
    metrics.handler_metrics([sample])
    assert lines(metrics, "N") == []
    (warning,) = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert "2000 characters, expected at most 1024" in warning
    assert len(warning) < 300


@pytest.mark.parametrize(
    "sample",
    [
        reported("Name", 1, dimensions=(("user", "a\ud800"),)),
        reported("Name", 1, dimensions=(("Hostname", "\udfff"),)),
        reported("Name", 1, unit="\ud800"),
    ],
)
def test_half_a_surrogate_pair_of_a_handler_does_not_reach_the_exposition(metrics, caplog, sample):
    metrics.handler_metrics([sample, sample, reported("Other", 1)])
    assert b"Other{" in metrics.exposition().encode()
    assert lines(metrics, "Name") == []
    (warning,) = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert warning.endswith("is no text of Unicode: surrogates not allowed")


def test_a_dimension_that_is_there_very_often_is_not_kept(metrics, caplog):
    metrics.handler_metrics([reported("Name", 1, dimensions=(("user", "v"),) * 101)])
    assert lines(metrics, "Name") == []
    assert "101 dimensions, expected at most 100" in caplog.text
    metrics.handler_metrics([reported("Name", 1, dimensions=(("user", "v"),) * 100)])
    assert len(lines(metrics, "Name{")) == 1


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            reported,
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


def test_a_version_that_is_gone_leaves_nothing_behind(metrics, shown, answer, batch):
    meters = [shown("noop", version) for version in ("1.0", "2.0")]
    for meter in meters:
        answer(meter, named=True)
        answer(meter)
        batch(meter)
        metrics.executor_loaded(meter, 9000, 1)
        metrics.show(meter, VersionLoad)
    metrics.handler_metrics([reported("Seen", 1, dimensions=(("ModelName", "noop"),))])
    metrics.forget(meters[0], was_last=False)
    text = metrics.exposition()
    assert '"1.0"' not in text.replace('le="1.0"', "")
    assert "noop_1.0" not in text
    assert 'model_version="default"' in text
    metrics.forget(meters[1], was_last=True)
    assert "noop" not in metrics.exposition()


def test_a_version_that_never_served_can_be_forgotten(metrics):
    metrics.forget(metrics.meter("never", "1.0"), was_last=True)
    assert "never" not in metrics.exposition()


def test_the_end_of_a_version_leaves_a_new_one_of_the_same_name_alone(metrics, shown, answer):
    old, new = shown(), shown()
    answer(new)
    metrics.forget(old, was_last=False)
    assert lines(metrics, "torchere_request_duration_seconds_count") == [
        'torchere_request_duration_seconds_count{model="m",version="1.0",} 1.0'
    ]


def test_a_version_that_outlives_the_one_that_replaced_it_leaves_nothing_behind(metrics, shown):
    old, new = shown(), shown()
    metrics.forget(new, was_last=True)
    metrics.handler_metrics([reported("Seen", 1)], "m")  # the last batch of the old one
    metrics.forget(old, was_last=True)
    assert 'ModelName="m"' not in metrics.exposition()


def test_reports_of_handlers_from_many_threads_add_up(metrics):
    def work():
        for _ in range(500):
            metrics.handler_metrics([reported("Seen", 1)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines(metrics, "Seen{") == ['Seen{ModelName="m",Level="Model",Hostname="vm",} 2000.0']


def test_every_family_of_ours_is_there_and_none_is_there_twice(metrics):
    families = [line.split()[2] for line in lines(metrics, "# TYPE")]
    assert len(families) == len(set(families))
    assert {name for name in families if name.startswith("torchere_")} == set(catalogue.FAMILIES)
    for name, row in catalogue.FAMILIES.items():
        assert name.endswith("_total") is (row.kind == "counter"), name


def test_held_bytes_and_refusals_by_budget_are_told():
    metrics = Metrics("host")
    refused = {"all": 1, "connection": 0, "key_free": 2}
    metrics.watch_budgets(lambda: 7, refused)
    metrics.watch_server(lambda: True, lambda: 0, lambda: 0)
    refused["all"] += 1
    told = metrics.exposition(["torchere_held_bytes", "torchere_budget_refusals_total"]).splitlines()
    assert [line for line in told if not line.startswith("#")] == [
        "torchere_held_bytes 7.0",
        'torchere_budget_refusals_total{budget="all",} 2.0',
        'torchere_budget_refusals_total{budget="connection",} 0.0',
        'torchere_budget_refusals_total{budget="key_free",} 2.0',
    ]


def test_clients_are_told_by_identity_and_those_without_one_together():
    metrics = Metrics("host")
    limits = ClientLimits(Quota(concurrency=1), Counter(), lambda: {"team a": {}})
    metrics.watch_clients(limits.tallies)
    for client in ("team a", "10.0.0.1", "10.0.0.2"):
        limits.account(client).enter()
    limits.account("10.0.0.1").running -= 1
    with pytest.raises(TooManyRequests):
        limits.charge("team a", 100.0)
    families = [name for name in catalogue.FAMILIES if name.startswith("torchere_client_")]
    told = [line for line in metrics.exposition(families).splitlines() if not line.startswith("#")]
    assert [line for line in told if not line.endswith(" 0.0")] == [
        'torchere_client_predictions_total{client="",} 2.0',
        'torchere_client_predictions_total{client="team a",} 1.0',
        'torchere_client_predictions_in_flight{client="",} 1.0',
        'torchere_client_predictions_in_flight{client="team a",} 1.0',
        'torchere_client_refusals_total{client="team a",budget="client_concurrency",} 1.0',
    ]


@pytest.mark.parametrize(("stages", "expected"), [("buckets", 12), ("means", 3), ("none", 0)])
def test_the_stages_have_as_many_series_as_wanted(answer, stages, expected):
    metrics = Metrics("vm", extent=Extent(stages))
    meter = metrics.meter("m", "1.0")
    metrics.show(meter)
    answer(meter)
    series = [line for line in lines(metrics, "torchere_stage_duration_seconds") if 'stage="queue"' in line]
    assert len(series) == expected + (expected > 3)
    assert len(lines(metrics, "torchere_request_duration_seconds")) == 22


def test_a_version_that_is_idle_keeps_counters_and_loses_histograms_until_its_next_batch(
    answer, batch, monkeypatch
):
    metrics = Metrics("vm", extent=Extent(idle_s=60))
    meter = metrics.meter("m", "1.0")
    metrics.show(meter)
    began_s = time.time()

    def histograms(idle_s):
        monkeypatch.setattr(time, "time", lambda: began_s + idle_s)
        return {line.split("{")[0] for line in lines(metrics, "torchere_") if 'model="m"' in line} & {
            "torchere_request_duration_seconds_sum",
            "torchere_batch_size_count",
        }

    answer(meter)
    batch(meter)
    assert len(histograms(59)) == 2
    assert histograms(61) == set()
    assert lines(metrics, "torchere_requests_total") != []
    meter.in_flight = 1
    assert len(histograms(62)) == 2
    meter.in_flight = 0
    batch(meter)
    assert len(histograms(63)) == 2


def test_the_time_to_the_first_part_is_that_of_streams_only(metrics, shown, answer):
    meter = shown()
    answer(meter)
    assert lines(metrics, "torchere_first_part") == []
    streamed = Prediction("r1", 10.0)
    streamed.dequeued_s, streamed.answered_s, streamed.sending_s = 10.1, 10.2, 10.5
    streamed.streamed = True
    meter.finished(streamed, 200, 13.0)
    assert lines(metrics, "torchere_first_part_duration_seconds_sum") == [
        'torchere_first_part_duration_seconds_sum{model="m",version="1.0",} 0.5'
    ]


def test_a_scrape_asks_for_the_loads_of_a_few_versions_at_once(metrics):
    turn = [0]
    asked: Counter[int] = Counter()

    def load():
        asked[turn[0]] += 1
        return VersionLoad(queued=7)

    for number in range(100):
        metrics.show(metrics.meter(f"m{number}", "1.0"), load)

    async def main():
        scrape = asyncio.ensure_future(metrics.expose_in_turns())
        while not scrape.done():
            await asyncio.sleep(0)
            turn[0] += 1
        return scrape.result()

    text = asyncio.run(main()).text()
    assert text.count("torchere_queue_depth{") == sum(asked.values()) == 100
    assert max(asked.values()) == VERSIONS_A_TURN


def test_a_scrape_of_many_versions_lets_requests_run_between(metrics, shown, answer):
    meters = [shown(f"m{number}") for number in range(100)]
    for meter in meters:
        answer(meter)
    seen = []

    async def main():
        scrape = asyncio.ensure_future(metrics.expose_in_turns())
        while not scrape.done():
            await asyncio.sleep(0)
            seen.append(scrape.done())
            if len(seen) == 2:
                metrics.forget(meters[0], was_last=True)
        return scrape.result()

    text = asyncio.run(main()).text()
    assert seen.count(False) >= 5
    assert 'torchere_requests_total{model="m99"' in text
    assert 'model="m0"' not in text
