from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchere.serving.telemetry.catalogue import families
from torchere.serving.telemetry.distributions import (
    FOLD_ROWS,
    SECONDS_BUCKETS,
    Distributions,
    add_histogram,
)
from torchere.serving.telemetry.exposition import samples_of


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1000), st.sampled_from(SECONDS_BUCKETS)), max_size=2 * FOLD_ROWS + 5))
def test_every_value_is_counted_in_the_bucket_it_belongs_to(rows):
    distributions = Distributions(2)
    for row in rows:
        distributions.add(row)
    for column, histogram in enumerate(distributions.histograms()):
        expected = [0] * (len(SECONDS_BUCKETS) + 1)
        for row in rows:
            expected[bisect_left(SECONDS_BUCKETS, row[column])] += 1
        assert histogram.counts == expected
        assert histogram.total == pytest.approx(sum(row[column] for row in rows))


def samples(histogram, every=1):
    shown = families()["torchere_request_duration_seconds"]
    add_histogram(shown, {"model": "m"}, histogram, every)
    return {(s.name.removeprefix(shown.name), s.labels.get("le")): s for s in samples_of(shown)}


def test_a_bound_that_is_left_out_adds_to_the_next():
    distributions = Distributions(1)
    for value in (0.0001, 0.0002, 0.0004, 500.0):
        distributions.add((value,))
    found = samples(distributions.histograms()[0], every=2)
    values = {key: sample.value for key, sample in found.items()}
    assert values["_bucket", "0.0001"] == 1
    assert ("_bucket", "0.00025") not in values
    assert values["_bucket", "0.0005"] == 3
    assert values["_bucket", "120.0"] == 3
    assert values["_bucket", "+Inf"] == values["_count", None] == 4


@pytest.mark.parametrize("every", [1, 2])
def test_an_exemplar_stands_in_the_bucket_of_its_value(every):
    distributions = Distributions(1)
    for value in (0.0002, 0.0003, 300.0):
        distributions.add((value,))
        distributions.note((value,), {"trace_id": f"t{value}"}, 1000.0)
    found = samples(distributions.histograms()[0], every)
    exemplars = {key[1]: s.exemplar.labels["trace_id"] for key, s in found.items() if s.exemplar}
    assert exemplars["0.0005"] == "t0.0003"
    assert exemplars["+Inf"] == "t300.0"
    assert all(float(s.exemplar.value) <= float(bound) for (_, bound), s in found.items() if s.exemplar)


def test_without_bounds_a_histogram_tells_number_and_sum():
    distributions = Distributions(1)
    for value in (0.25, 0.5):
        distributions.add((value,))
    found = samples(distributions.histograms()[0], every=0)
    assert {key: sample.value for key, sample in found.items()} == {
        ("_bucket", "+Inf"): 2,
        ("_count", None): 2,
        ("_sum", None): 0.75,
    }
