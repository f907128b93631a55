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
        (f"ts_metrics: {{summary: []}}\n{MODEL}", MetricsCacheKeyError, "unknown type 'summary'"),
    ],
)
def test_a_file_of_another_shape_is_refused_by_name(text, error, says):
    with pytest.raises(error) as caught:
        parse_metrics_config(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("3", "ts_metrics.gauge: found int"),
        ("{name: A, unit: ms}", "A lacks dimensions"),
        ("{unit: ms}", "a metric lacks name, dimensions"),
        ("{name: 1, unit: ms, dimensions: []}", "name 1"),
        ("{name: A, unit: 1, dimensions: []}", "unit 1"),
        ('{name: A, unit: "\\ud800", dimensions: []}', r"unit '\ud800'"),
        ("{name: A, unit: ms, dimensions: [1]}", "dimensions of A"),
        ("{name: bad name, unit: ms, dimensions: []}", "bad name"),
        ("{name: A, unit: ms, dimensions: [bad label]}", "bad label"),
        ("{name: A, unit: ms, dimensions: [x, x]}", "twice"),
        ("{name: torchere_x, unit: ms, dimensions: []}", "taken"),
        ("{name: process_open_fds, unit: ms, dimensions: []}", "process_open_fds"),
        ("{name: process_cpu_seconds, unit: ms, dimensions: []}", "cpu_seconds"),
        ("{name: Good, unit: ms, dimensions: []}", "Good is declared twice"),
        ("{name: QueueTime, unit: ms, dimensions: [Level]}", "as many as in"),
    ],
)
def test_an_entry_that_is_wrong_is_dropped_with_what_is_wrong_and_costs_no_other(entry, says):
    good = "{name: Good, unit: ms, dimensions: []}"
    config = parse_metrics_config(f"ts_metrics: {{gauge: [{good}, {entry}]}}\n{MODEL}")
    assert (config.server.keys(), config.model.keys()) == ({"Good"}, {"G"})
    (cause,) = config.dropped
    assert says in cause


def test_of_a_name_in_both_sections_the_servers_metric_is_exposed():
    config = parse_metrics_config("ts_metrics: {counter: [{name: G, unit: n, dimensions: []}]}\n" + MODEL)
    assert (config.server["G"].kind, config.model) == ("counter", {})
    assert config.dropped[0].startswith("G: ")


LOGGED = """
ts_metrics:
  gauge:
    - {name: G, unit: ms, dimensions: [x, x]}
    - {name: my metric, unit: ms, dimensions: [a label]}
    - {name: QueueTime, unit: ms, dimensions: [Level]}
    - {name: process_open_fds, unit: ms, dimensions: []}
"""


def test_metrics_that_are_only_logged_need_no_names_of_prometheus():
    names = {"G", "my metric", "QueueTime", "process_open_fds"}
    for mode in ("log", "legacy"):
        config = parse_metrics_config(
            LOGGED + MODEL.replace("[{", "[{name: a-b, unit: n, dimensions: []}, {"), mode
        )
        assert (config.server.keys(), config.model.keys()) == (names, {"a-b", "G"})
        assert config.dropped == ()
    assert len(parse_metrics_config(LOGGED + MODEL).dropped) == 4


def test_what_legacy_mode_exposes_needs_the_names_of_prometheus():
    entry = "{name: ts_queue_latency_microseconds, unit: ms, dimensions: [a label, b, c]}"
    config = parse_metrics_config(f"ts_metrics: {{counter: [{entry}]}}\n{MODEL}", "legacy")
    assert (config.server, len(config.dropped)) == ({}, 1)


@pytest.mark.parametrize("kind", ["gauge", "histogram"])
def test_what_legacy_mode_exposes_is_a_counter_whatever_its_declared_type(kind):
    entry = "{name: ts_queue_latency_microseconds, unit: ms, dimensions: [a, b, c]}"
    text = f"ts_metrics: {{{kind}: [{entry}]}}\n{MODEL}"
    kinds = [parse_metrics_config(text, mode).server for mode in ("legacy", "prometheus")]
    assert [found["ts_queue_latency_microseconds"].kind for found in kinds] == ["counter", kind]


@pytest.mark.parametrize("name", ["", "a\\nb", "a\\x1bb", "a\\u2028b"])
def test_a_name_that_would_break_a_line_of_the_log_is_dropped(name):
    entry = f'{{name: "{name}", unit: ms, dimensions: []}}'
    config = parse_metrics_config(f"ts_metrics: {{gauge: [{entry}]}}\n{MODEL}", "log")
    assert (config.server, config.model.keys()) == ({}, {"G"})
    assert "printable" in config.dropped[0]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MetricsCacheIOError, match=r"none\.yaml: No such file"):
        read_metrics_config(tmp_path / "none.yaml")


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MetricsCacheIOError, match=r"b\.yaml: "):
        read_metrics_config(tmp_path / "b.yaml")
