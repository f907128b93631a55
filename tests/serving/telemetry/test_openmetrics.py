import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from torchere.serving.batching.request import Request
from torchere.serving.logs.trace_context import TraceContext
from torchere.serving.telemetry.metrics import Metrics

TRACE = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)


@pytest.fixture
def used(metrics, shown, answer, batch):
    meter = shown()
    answer(meter, total_s=0.5, trace=TRACE)
    metrics.request_finished(200)
    batch(meter, executor_s=0.2, handler_s=0.1)
    return metrics


def test_it_can_be_parsed_and_says_the_same_as_the_text_format(used):
    text = used.expose().text(openmetrics=True)
    parsed = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    plain = [line for line in used.exposition().splitlines() if not line.startswith("#")]
    assert len(plain) > 100
    for line in plain:
        parts = re.fullmatch(r"(\w+)(?:\{(.*),\})? (\S+)", line)
        assert parts is not None
        name, labels, value = parts.groups()
        pairs = re.findall(r'(\w+)="([^"]*)"', labels or "")
        key = (name, *sorted(pairs))
        assert key in parsed, line
        if not name.startswith(("process_", "torchere_event_loop", "torchere_gc", "torchere_cgroup")):
            assert parsed[key] == float(value), line
    assert len(parsed) == len(plain)


def test_torchserves_counters_keep_their_names(used):
    text = used.expose().text({"Requests2XX", "ts_inference_requests_total"}, openmetrics=True)
    assert text.splitlines()[1:3] == [
        "# TYPE Requests2XX gauge",
        'Requests2XX{Hostname="vm",Level="Host"} 1.0',
    ]
    assert "# TYPE ts_inference_requests counter" in text
    assert text.endswith("# EOF\n")


def test_who_takes_it_for_plain_text_reads_all_up_to_the_families_with_exemplars(used):
    families = used.expose().text(openmetrics=True).split("# HELP ")[1:]
    kinds = {re.findall(r"# TYPE \S+ (\S+)", family)[0] for family in families}
    has_exemplars = ["# {" in family for family in families]

    assert kinds == {"counter", "gauge", "histogram"}
    assert any(has_exemplars)
    assert has_exemplars == sorted(has_exemplars)


def test_a_sampled_trace_is_the_exemplar_of_its_bucket(used):
    text = used.expose().text(openmetrics=True)
    (line,) = [
        line
        for line in text.splitlines()
        if "torchere_request_duration_seconds_bucket" in line and "#" in line
    ]
    assert re.search(rf'le="0.5",.* 1.0 # {{trace_id="{TRACE.trace_id}"}} 0.5 \d+', line)
    assert "# {" not in used.exposition()  # the text format has no place for it


@pytest.mark.parametrize("sampled", [True, False])
def test_the_first_part_of_a_stream_has_the_exemplar_of_a_sampled_trace(metrics, shown, sampled):
    streamed = Request("r1", 10.0)
    streamed.trace, streamed.streamed = TRACE._replace(sampled=sampled), True
    streamed.dequeued_s, streamed.answered_s, streamed.sending_s = 10.1, 10.2, 10.5
    shown().finished(streamed, 200, 13.0)
    text = metrics.expose().text(openmetrics=True)
    found = re.findall(r'torchere_first_part_duration_seconds_bucket.*le="([^"]+)",.* # {(.*)} 0.5 ', text)
    assert found == ([("0.5", f'trace_id="{TRACE.trace_id}"')] if sampled else [])


def test_a_trace_that_is_not_sampled_leads_nowhere(metrics, shown, answer):
    answer(shown(), trace=TRACE._replace(sampled=False))
    assert "trace_id" not in metrics.expose().text(openmetrics=True)


def test_nothing_that_was_asked_for_is_still_well_formed():
    assert Metrics("vm").expose().text({"nope"}, openmetrics=True) == "# EOF\n"
