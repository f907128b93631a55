import pytest

from torchere.handlers.errors import (
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from torchere.serving.telemetry.declared import (
    BUILT_IN_FILE,
    built_in_config,
    parse_metrics_config,
    read_metrics_config,
)

MODEL = "model_metrics: {gauge: [{name: G, unit: ms, dimensions: [ModelName, Level]}]}\n"


def test_the_built_in_set_is_torchserves():
    config = built_in_config()
    assert len(config.server) == 19
    assert {name for name, metric in config.server.items() if metric.kind == "counter"} == {
        *("Requests2XX", "Requests4XX", "Requests5XX", "ts_inference_requests_total"),
        *("ts_inference_latency_microseconds", "ts_queue_latency_microseconds"),
    }
    assert config.server["GPUUtilization"].labels == ("Level", "DeviceId", "Hostname")
    assert config.model.keys() == {"HandlerTime", "PredictionTime"}
    assert config.model["HandlerTime"].labels == ("ModelName", "Level", "Hostname")


def test_the_built_in_file_can_be_read_as_a_users():
    assert read_metrics_config(BUILT_IN_FILE) == built_in_config()


def test_handler_metrics_get_the_label_of_the_host_once():
    text = "ts_metrics:\n" + MODEL.replace("Level]", "Hostname, Level]")
    assert parse_metrics_config(text).model["G"].labels == ("ModelName", "Level", "Hostname")


def test_the_server_may_have_no_metric_at_all():
    assert parse_metrics_config("ts_metrics:\n" + MODEL).server == {}
    assert parse_metrics_config(MODEL).server == {}


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("a: [", MetricsCachePyYamlError, "not YAML"),
        ("a: " + "9" * 5000, MetricsCachePyYamlError, "a number of 5000 characters"),
        ("a: 2026-02-30", MetricsCachePyYamlError, "not YAML: day"),
        ("a: !!bool maybe", MetricsCachePyYamlError, "does not have the type of its tag"),
        ("a: !!timestamp then", MetricsCachePyYamlError, "does not have the type of its tag"),
        ("[]", MetricsCacheTypeError, "found list"),
        ("", MetricsCacheTypeError, "found NoneType"),
        ("ts_metrics: {}", MetricsCacheKeyError, "model_metrics is missing"),
        ("ts_metrics: {}\nmodel_metrics:", MetricsCacheValueError, "empty"),
        ("ts_metrics: {}\nmodel_metrics: {gauge: []}", MetricsCacheValueError, "empty"),
        (f"ts_metrics: {{}}\nmore: 1\n{MODEL}", MetricsCacheKeyError, "unknown ['more']"),
        (f"ts_metrics: 3\n{MODEL}", MetricsCacheTypeError, "ts_metrics is int"),
        (f"ts_metrics: {{gauge: 3}}\n{MODEL}", MetricsCacheTypeError, "ts_metrics.gauge is int"),
        (f"ts_metrics: {{gauge: [3]}}\n{MODEL}", MetricsCacheTypeError, "ts_metrics.gauge: found int"),
        (f"ts_metrics: {{summary: []}}\n{MODEL}", MetricsCacheKeyError, "unknown type 'summary'"),
    ],
)
def test_a_file_of_another_shape_is_refused_by_name(text, error, says):
    with pytest.raises(error) as caught:
        parse_metrics_config(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "error", "says"),
    [
        ("{name: A, unit: ms}", MetricsCacheKeyError, "A lacks dimensions"),
        ("{unit: ms}", MetricsCacheKeyError, "a metric lacks name, dimensions"),
        ("{name: 1, unit: ms, dimensions: []}", MetricsCacheTypeError, "name 1"),
        ("{name: A, unit: 1, dimensions: []}", MetricsCacheTypeError, "unit 1"),
        ('{name: A, unit: "\\ud800", dimensions: []}', MetricsCacheTypeError, r"unit '\ud800'"),
        ("{name: A, unit: ms, dimensions: [1]}", MetricsCacheTypeError, "dimensions of A"),
        ("{name: bad name, unit: ms, dimensions: []}", MetricsCacheValueError, "bad name"),
        ("{name: A, unit: ms, dimensions: [bad label]}", MetricsCacheValueError, "bad label"),
        ("{name: A, unit: ms, dimensions: [x, x]}", MetricsCacheValueError, "twice"),
        ("{name: torchere_x, unit: ms, dimensions: []}", MetricsCacheValueError, "taken"),
        ("{name: process_open_fds, unit: ms, dimensions: []}", MetricsCacheValueError, "process_open_fds"),
        ("{name: process_cpu_seconds, unit: ms, dimensions: []}", MetricsCacheValueError, "cpu_seconds"),
        ("{name: G, unit: ms, dimensions: []}", MetricsCacheValueError, "G"),
        ("{name: QueueTime, unit: ms, dimensions: [Level]}", MetricsCacheValueError, "as many as in"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_with_what_is_wrong(entry, error, says):
    with pytest.raises(error) as caught:
        parse_metrics_config(f"ts_metrics: {{gauge: [{entry}]}}\n{MODEL}")
    assert says in str(caught.value)


def test_a_metric_can_not_be_declared_twice():
    entry = "{name: A, unit: ms, dimensions: []}"
    with pytest.raises(MetricsCacheValueError, match="A is declared twice"):
        parse_metrics_config(f"ts_metrics: {{gauge: [{entry}], counter: [{entry}]}}\n{MODEL}")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MetricsCacheIOError, match=r"none\.yaml: No such file"):
        read_metrics_config(tmp_path / "none.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MetricsCacheIOError, match=r"b\.yaml: "):
        read_metrics_config(tmp_path / "b.yaml")
