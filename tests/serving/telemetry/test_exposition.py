import math
import re
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Histogram, Metric
from prometheus_client.parser import text_string_to_metric_families

from torchere.serving.telemetry.catalogue import Families
from torchere.serving.telemetry.exposition import (
    HistogramRow,
    OwnFamily,
    java_double,
    render,
    samples_of,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0.0"), (3, "3.0"), (-3, "-3.0"), (0.5, "0.5"), (5711.86328125, "5711.86328125")],
        *[(0.001, "0.001"), (0.0001, "1.0E-4"), (0.00025, "2.5E-4"), (-1.5e-9, "-1.5E-9")],
        *[(9999999, "9999999.0"), (1e7, "1.0E7"), (123456789, "1.23456789E8"), (1e22, "1.0E22")],
        *[(math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")],
    ],
)
def test_numbers_are_written_as_java_writes_them(value, text):
    assert java_double(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_can_be_read_back(value):
    text = java_double(value)
    assert float(text) == value
    assert re.fullmatch(r"-?\d+\.\d+(E-?\d+)?", text)


@pytest.fixture
def families():
    return Families()


def shown(families, names=()):
    return render(families.registry.collect(), families.declared, names)


def test_a_counter_keeps_the_name_it_was_declared_with(families):
    families.declare("counter", "Requests2XX", "Count", ("Level", "Hostname")).labels("Host", "vm").inc(3)
    families.declare("counter", "ts_inference_requests_total", "Count", ("model_name",)).labels("m").inc()
    assert shown(families) == (
        "# HELP Requests2XX Torchserve prometheus counter metric with unit: Count\n"
        "# TYPE Requests2XX counter\n"
        'Requests2XX{Level="Host",Hostname="vm",} 3.0\n'
        "# HELP ts_inference_requests_total Torchserve prometheus counter metric with unit: Count\n"
        "# TYPE ts_inference_requests_total counter\n"
        'ts_inference_requests_total{model_name="m",} 1.0\n'
    )


def test_a_family_without_samples_has_its_two_lines(families):
    families.declare("gauge", "GPUUtilization", "Percent", ("DeviceId",))
    assert shown(families) == (
        "# HELP GPUUtilization Torchserve prometheus gauge metric with unit: Percent\n"
        "# TYPE GPUUtilization gauge\n"
    )


def test_a_sample_without_labels_has_no_braces(families):
    families.declare("gauge", "plain", "Count", ()).set(1)
    assert shown(families).splitlines()[-1] == "plain 1.0"


def test_a_histogram_has_buckets_count_and_sum(families):
    Histogram("Sizes", "", ("m",), registry=families.registry, buckets=(1, 2)).labels("x").observe(2)
    assert shown(families).splitlines()[2:] == [
        'Sizes_bucket{m="x",le="1.0",} 0.0',
        'Sizes_bucket{m="x",le="2.0",} 1.0',
        'Sizes_bucket{m="x",le="+Inf",} 1.0',
        'Sizes_count{m="x",} 1.0',
        'Sizes_sum{m="x",} 2.0',
    ]


def test_label_values_are_escaped(families):
    families.declare("gauge", "g", "Count", ("m",)).labels('a"b\\c\nd').set(1)
    assert shown(families).splitlines()[-1] == r'g{m="a\"b\\c\nd",} 1.0'


def test_names_pick_samples_and_drop_the_rest(families):
    families.declare("gauge", "a", "Count", ()).set(1)
    families.declare("histogram", "b", "Count", ()).observe(1)
    assert [line.split()[0] for line in shown(families, {"b_sum"}).splitlines()] == ["#", "#", "b_sum"]
    assert shown(families, {"nothing"}) == ""


def test_prometheus_can_read_it(families):
    families.declare("counter", "c_total", "Count", ("m",)).labels("a, b").inc()
    families.declare("histogram", "h", "Count", ("m",)).labels("x").observe(0.3)
    found = {family.name: family for family in text_string_to_metric_families(shown(families))}
    assert found["c"].samples[0].labels == {"m": "a, b"}
    assert found["h"].type == "histogram"


def test_creation_times_are_left_out():
    family = Metric("g", "help", "counter")
    family.add_sample("g_created", {}, 1.0)
    assert "created" not in render([family], {})


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=4),
    st.floats(0, 1e12),
    st.dictionaries(st.sampled_from(["model", "version"]), st.text(max_size=8)),
)
@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_row_is_written_as_its_samples_would_be(openmetrics, counts, total, labels):
    counts = sorted(counts)
    bounds = (*(str(0.5 * bound) for bound in range(1, len(counts))), "+Inf")
    by_row, by_sample = OwnFamily("h", "help", "histogram"), Metric("h", "help", "histogram")
    by_row.rows.append(HistogramRow(labels, bounds, counts, total))
    by_sample.samples = samples_of(by_row)
    form = partial(render, openmetrics=openmetrics)
    assert sorted(form([by_row], {})) == sorted(form([by_sample], {}))  # the order of labels may differ
    assert form([by_row], {}, {"h_sum"}) == form([by_sample], {}, {"h_sum"})
