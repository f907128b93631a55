"""What a configuration file and `metrics_mode` make of the same events."""

import logging
import re

import pytest

from torchere.handlers.metrics import MetricSample
from torchere.serving.batching.request import Request
from torchere.serving.telemetry.catalogue import Families
from torchere.serving.telemetry.declared import (
    DeclaredMetric,
    MetricsConfig,
    built_in_config,
    parse_metrics_config,
)
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.numbers import ServerNumbers
from torchere.serving.telemetry.torchserve import (
    ServerMetrics,
    close_metric_files,
    log_value,
    open_metric_files,
)

FILE = """
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [level, host]}
  gauge:
    - {name: ts_inference_requests_total, unit: Count, dimensions: [m, v, h]}
  histogram:
    - {name: ts_inference_latency_microseconds, unit: us, dimensions: [m, v, h]}
model_metrics:
  counter:
    - {name: Words, unit: count, dimensions: [model, Level]}
  gauge:
    - {name: PredictionTime, unit: ms, dimensions: [Level, ModelName]}
"""


def reported(name, value=1.0, kind="gauge", dimensions=(("ModelName", "m"), ("Level", "Model"))):
    return MetricSample(name, value, "Count", kind, dimensions, ("r1", "r2"))


def work(metrics, answer, batch):
    metrics.request_finished(200)
    meter = metrics.meter("m", "1.0")
    metrics.show(meter)
    answer(meter, total_s=0.25, queue_s=0.002)
    batch(meter, executor_s=0.02, handler_s=0.0123, requests=[Request("r1", 0.0)])
    metrics.executor_loaded(meter, 9000, 1.5)
    return meter


def shown(metrics):
    text = metrics.exposition()
    return {line for line in text.splitlines() if not line.startswith(("#", "torchere_", "process_"))}


def test_a_file_decides_which_metrics_there_are_and_how_their_labels_are_called(answer, batch):
    metrics = Metrics("vm", config=parse_metrics_config(FILE))
    meter = work(metrics, answer, batch)
    meter.accepted(named=False)
    metrics.handler_metrics([reported("Words", 2.0), reported("Words", 3.0)])
    found = shown(metrics)
    assert {line for line in found if "_bucket" not in line} == {
        'Requests2XX{level="Host",host="vm",} 1.0',
        'ts_inference_requests_total{m="m",v="default",h="vm",} 1.0',  # a gauge: the last update
        'ts_inference_latency_microseconds_sum{m="m",v="default",h="vm",} 250000.0',
        'ts_inference_latency_microseconds_count{m="m",v="default",h="vm",} 1.0',
        'PredictionTime{Level="Model",ModelName="m",Hostname="vm",} 12.3',
        'Words{model="m",Level="Model",Hostname="vm",} 5.0',  # a counter, whatever the handler calls it
    }
    metrics.forget(meter, was_last=True)
    other = metrics.meter("other", "1.0")
    metrics.show(other)
    other.accepted(named=False)
    assert not any('"m"' in line for line in shown(metrics))


def test_a_handler_metric_that_is_not_declared_is_dropped(caplog):
    metrics = Metrics("vm")
    metrics.handler_metrics([reported("Words"), reported("Words"), reported("HandlerTime", 4.0)])
    assert shown(metrics) >= {'HandlerTime{ModelName="m",Level="Model",Hostname="vm",} 4.0'}
    assert "Words" not in metrics.exposition()
    assert caplog.text.count("model_metrics_auto_detect is false") == 1


def test_times_of_stages_that_a_model_config_asks_for_need_no_declaration(files):
    for mode in ("prometheus", "log"):
        metrics = Metrics("vm", mode=mode, config=built_in_config())
        metrics.handler_metrics([reported("ts_handler_preprocess", 1.5), reported("Words")])
        exposed = {line for line in shown(metrics) if line.startswith(("ts_handler_", "Words"))}
        line = 'ts_handler_preprocess{ModelName="m",Level="Model",Hostname="vm",} 1.5'
        assert exposed == ({line} if mode == "prometheus" else set())
    assert logged(files, "model_metrics.log") == [
        "ts_handler_preprocess.Count:1.5|#ModelName:m,Level:Model|#hostname:vm,requestID:r1,r2,timestamp:0"
    ]


def test_a_handler_metric_with_other_dimensions_than_declared_is_dropped(caplog):
    metrics = Metrics("vm")
    metrics.handler_metrics([reported("HandlerTime", dimensions=(("ModelName", "m"),))])
    assert "HandlerTime{" not in metrics.exposition()
    assert "it has the dimensions ['ModelName'], expected ['ModelName', 'Level']" in caplog.text


def test_where_each_prediction_time_counts_all_are_recorded(answer, batch):
    text = FILE.replace("  gauge:\n    - {name: PredictionTime", "  histogram:\n    - {name: PredictionTime")
    metrics = Metrics("vm", config=parse_metrics_config(text))
    batch(work(metrics, answer, batch))
    assert 'PredictionTime_count{Level="Model",ModelName="m",Hostname="vm",} 2.0' in shown(metrics)


def test_an_empty_configuration_records_ours_only(answer, batch, caplog):
    metrics = Metrics("vm", config=MetricsConfig())
    work(metrics, answer, batch)
    caplog.clear()
    assert shown(metrics) == set()
    assert caplog.text == ""  # the server offers no time that would be dropped
    assert 'torchere_batch_size_sum{model="m",version="1.0",} 1.0' in metrics.exposition()


@pytest.fixture
def files(tmp_path):
    assert open_metric_files(tmp_path / "logs")
    yield tmp_path / "logs"
    close_metric_files()


STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - ", re.MULTILINE)


def logged(folder, name):
    text = (folder / name).read_text()
    assert len(STAMP.findall(text)) == len(text.splitlines())
    return [re.sub(r"timestamp:\d{10}$", "timestamp:0", line) for line in STAMP.sub("", text).splitlines()]


def test_in_log_mode_every_update_is_a_line_and_nothing_is_shown(files, answer, batch):
    metrics = Metrics("vm", mode="log")
    meter = work(metrics, answer, batch)
    metrics.handler_metrics([reported("HandlerTime", 11.5), reported("Dropped")])
    host, model = "#Level:Host|#hostname:vm,timestamp:0", "model_name:m,model_version:default"
    assert logged(files, "ts_metrics.log") == [
        f"Requests2XX.Count:1.0|{host}",
        f"ts_inference_requests_total.Count:1.0|#{model}|#hostname:vm,timestamp:0",
        f"ts_inference_latency_microseconds.Microseconds:250000.0|#{model}|#hostname:vm,timestamp:0",
        f"ts_queue_latency_microseconds.Microseconds:2000.0|#{model}|#hostname:vm,timestamp:0",
        f"QueueTime.Milliseconds:2.0|{host}",
        f"WorkerThreadTime.Milliseconds:7.0|{host}",
        "WorkerLoadTime.Milliseconds:1500.0|#WorkerName:W-9000-m_1.0,Level:Host|#hostname:vm,timestamp:0",
    ]
    assert logged(files, "model_metrics.log") == [
        "PredictionTime.ms:12.3|#ModelName:m,Level:Model|#hostname:vm,requestID:r1,timestamp:0",
        "HandlerTime.ms:11.5|#ModelName:m,Level:Model|#hostname:vm,requestID:r1,r2,timestamp:0",
    ]
    assert shown(metrics) == set()
    metrics.forget(meter, was_last=True)
    assert metrics.exposition().count("torchere_ready") > 0


def test_in_legacy_mode_the_three_counters_are_shown_and_all_others_logged(files, answer, batch):
    metrics = Metrics("vm", mode="legacy")
    work(metrics, answer, batch)
    labels = '{model_name="m",model_version="default",hostname="vm",}'
    assert shown(metrics) == {
        f"ts_inference_requests_total{labels} 1.0",
        f"ts_inference_latency_microseconds{labels} 250000.0",
        f"ts_queue_latency_microseconds{labels} 2000.0",
    }
    lines = [*logged(files, "ts_metrics.log"), *logged(files, "model_metrics.log")]
    names = [line.split(".")[0] for line in lines]
    assert names == ["Requests2XX", "QueueTime", "WorkerThreadTime", "WorkerLoadTime", "PredictionTime"]


def test_in_prometheus_mode_nothing_is_logged(files, answer, batch):
    metrics = Metrics("vm")
    work(metrics, answer, batch)
    assert (logged(files, "ts_metrics.log"), logged(files, "model_metrics.log")) == ([], [])


def test_in_log_mode_a_new_name_is_logged_with_auto_detection(files):
    metrics = Metrics("vm", mode="log", config=built_in_config(), auto_detect=True)
    metrics.handler_metrics([reported("Words", 2.0, "counter")])
    assert logged(files, "model_metrics.log") == [
        "Words.Count:2.0|#ModelName:m,Level:Model|#hostname:vm,requestID:r1,r2,timestamp:0"
    ]


def test_in_log_mode_one_name_may_be_of_the_server_and_of_handlers(files):
    text = "ts_metrics: {gauge: [{name: Words, unit: n, dimensions: [Level, Hostname]}]}\n"
    text += "model_metrics: {counter: [{name: Words, unit: count, dimensions: [ModelName, Level]}]}"
    metrics = Metrics("vm", mode="log", config=parse_metrics_config(text, "log"))
    metrics.handler_metrics([reported("Words", 2.0)])
    assert logged(files, "model_metrics.log") == [
        "Words.count:2.0|#ModelName:m,Level:Model|#hostname:vm,requestID:r1,r2,timestamp:0"
    ]


@pytest.mark.parametrize("mode", ["log", "legacy"])
def test_a_name_that_is_only_logged_may_have_blanks(files, mode):
    metrics = Metrics("vm", mode=mode, config=built_in_config(), auto_detect=True)
    metrics.handler_metrics([reported("Transform Fn", 2.0, dimensions=(("a label", "x"),))])
    assert logged(files, "model_metrics.log") == [
        "Transform Fn.Count:2.0|#a label:x|#hostname:vm,requestID:r1,r2,timestamp:0"
    ]


@pytest.mark.parametrize(
    "name", ["a\nb.Count:1.0|#|#hostname:vm,timestamp:1", "a\r", "\x1b[2K", "a\u2028b", ""]
)
def test_a_name_that_would_break_a_line_of_the_log_is_dropped(files, caplog, name):
    metrics = Metrics("vm", mode="log", auto_detect=True)
    metrics.handler_metrics([reported(name), reported("Words", dimensions=((name, "x"),))])
    assert logged(files, "model_metrics.log") == []
    assert caplog.text.count("names must have printable characters only") == 2


@pytest.mark.parametrize("labels", ["[hostname]", "[Level]", "[]"])
def test_the_last_label_of_the_servers_metrics_is_the_host_and_takes_no_other_value(files, labels):
    text = f"ts_metrics: {{gauge: [{{name: OpenSessions, unit: Count, dimensions: {labels}}}]}}\n"
    text += "model_metrics: {gauge: [{name: G, unit: ms, dimensions: []}]}"
    declared = parse_metrics_config(text, "log").server
    server = ServerMetrics(declared, Families(), "vm", "log", numbers=ServerNumbers())
    server.update("OpenSessions", 2.0, "Host")
    assert logged(files, "ts_metrics.log") == ["OpenSessions.Count:2.0|#|#hostname:vm,timestamp:0"]


def test_lines_are_written_whatever_the_servers_log_level_is(files):
    logging.getLogger().setLevel(logging.WARNING)
    Metrics("vm", mode="log").request_finished(404)
    assert logged(files, "ts_metrics.log") == ["Requests4XX.Count:1.0|#Level:Host|#hostname:vm,timestamp:0"]


def test_a_level_of_the_loggers_own_that_the_settings_set_stays(files):
    close_metric_files()
    logging.getLogger("TS_METRICS").setLevel(logging.WARNING)
    assert open_metric_files(files)
    Metrics("vm", mode="log").request_finished(404)
    logging.getLogger("TS_METRICS").setLevel(logging.NOTSET)
    assert logged(files, "ts_metrics.log") == []


def test_files_that_are_opened_again_have_each_line_once(files):
    assert open_metric_files(files)
    Metrics("vm", mode="log").request_finished(404)
    assert len(logged(files, "ts_metrics.log")) == 1


def test_closed_files_get_no_more_lines_and_leave_nothing_behind(files):
    close_metric_files()
    Metrics("vm", mode="log").request_finished(404)
    assert logged(files, "ts_metrics.log") == []
    assert not logging.getLogger("TS_METRICS").handlers


def test_a_metric_without_dimensions_has_an_empty_part(files):
    log_value("TS_METRICS", DeclaredMetric("N", "counter", "u", ("Hostname",)), 1, (), hostname="h")
    assert logged(files, "ts_metrics.log") == ["N.u:1.0|#|#hostname:h,timestamp:0"]


def test_files_that_can_not_be_opened_are_warned_about(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert not open_metric_files(tmp_path / "file")
    assert "no metric files in" in caplog.text
