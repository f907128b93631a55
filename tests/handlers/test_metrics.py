from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from torchere.handlers import metrics as metrics_module
from torchere.handlers.errors import MetricsCacheKeyError, MetricsCacheTypeError, MetricsCacheValueError
from torchere.handlers.metrics import (
    CachingMetric,
    Dimension,
    MetricDeclaration,
    MetricSample,
    MetricsCache,
    MetricTypes,
)

_MODEL = (("ModelName", "m"), ("Level", "Model"))


@pytest.fixture
def metrics() -> MetricsCache:
    cache = MetricsCache("m")
    cache.begin_batch({0: "a", 1: "b"})
    return cache


def test_a_counter_belongs_to_every_request_of_the_batch(metrics: MetricsCache) -> None:
    metrics.add_counter("Cats", 2)
    assert metrics.drain() == [MetricSample("Cats", 2.0, "Count", "counter", _MODEL, ("a", "b"))]


def test_a_metric_that_a_handler_makes_reports_to_the_batch_of_its_thread(metrics: MetricsCache) -> None:
    CachingMetric("Cats", "count", ["Level"]).add_or_update(2, ["Model"], request_id="a")
    CachingMetric("Speed", "ms", metric_type=MetricTypes.GAUGE).add_or_update(3)
    assert metrics.drain() == [
        MetricSample("Cats", 2.0, "Count", "counter", (("Level", "Model"),), ("a",)),
        MetricSample("Speed", 3.0, "Milliseconds", "gauge", (), ()),
    ]


def test_the_cache_is_torchserves_and_the_requests_can_be_set(metrics: MetricsCache) -> None:
    declared = metrics.add_metric_to_cache("Cats", "count", ["Level"])
    metrics.set_request_ids("c,d")
    metrics.add_time("Walk", 1)
    assert metrics.cache[MetricTypes.COUNTER] == {"Cats": declared}
    assert metrics.cache_keys() == ["counter:Cats", "gauge:Walk"]
    metrics.set_request_ids({0: "e"})
    metrics.add_time("Walk", 1)
    assert [sample.request_ids for sample in metrics.drain()] == [("c", "d"), ("e",)]


def test_an_index_picks_one_request(metrics: MetricsCache) -> None:
    metrics.add_counter("Cats", 1, idx=1)
    assert metrics.drain()[0].request_ids == ("b",)


def test_own_dimensions_come_before_the_automatic_ones(metrics: MetricsCache) -> None:
    dimensions = [Dimension("Breed", "manx")]
    metrics.add_counter("Cats", 1, dimensions=dimensions)
    assert metrics.drain()[0].dimensions == (("Breed", "manx"), *_MODEL)
    assert [str(item) for item in dimensions] == ["Breed:manx"]


def test_a_dimension_may_get_another_value(metrics: MetricsCache) -> None:
    breed = Dimension("Breed", "manx")
    metrics.add_counter("Cats", 1, dimensions=[breed])
    breed.value = "sphynx"
    metrics.add_counter("Cats", 1, dimensions=[breed])
    found = [sample.dimensions[0] for sample in metrics.drain()]
    assert found == [("Breed", "manx"), ("Breed", "sphynx")]
    assert (str(breed), breed.to_dict()) == ("Breed:sphynx", {"Name": "Breed", "Value": "sphynx"})


def test_each_kind_has_its_unit_and_type(metrics: MetricsCache) -> None:
    metrics.add_time("T", 1.5)
    metrics.add_time("S", 1.5, unit="s", metric_type=MetricTypes.HISTOGRAM)
    metrics.add_size("M", 3)
    metrics.add_percent("P", 50)
    metrics.add_metric("X", 1, "furlongs", metric_type=MetricTypes.GAUGE)
    assert [(s.unit, s.metric_type) for s in metrics.drain()] == [
        ("Milliseconds", "gauge"),
        ("Seconds", "histogram"),
        ("Megabytes", "gauge"),
        ("Percent", "gauge"),
        ("furlongs", "gauge"),
    ]


@pytest.mark.parametrize("name", ["Level", "ModelName"])
def test_a_dimension_of_ones_own_comes_in_place_of_the_automatic_one(
    metrics: MetricsCache, name: str
) -> None:
    metrics.add_counter("Cats", 1, dimensions=[Dimension(name, "own")])
    dimensions = metrics.drain()[0].dimensions
    assert dict(dimensions) == {**dict(_MODEL), name: "own"}
    assert len(dimensions) == 2


def test_an_index_that_is_none_of_the_batch_means_all_of_it(metrics: MetricsCache) -> None:
    metrics.add_counter("Cats", 1, idx=7)
    assert metrics.drain() == [MetricSample("Cats", 1.0, "Count", "counter", _MODEL, ("a", "b"))]


@pytest.mark.parametrize(
    ("given", "ids"),
    [(None, ()), (7, ("7",)), ([7, "b"], ("7", "b")), ({0: "a", 1: "b"}, ("a", "b")), ("", ())],
)
def test_ids_of_any_type_become_texts(metrics: MetricsCache, given: Any, ids: tuple[str, ...]) -> None:
    metrics.add_metric_to_cache("Depth", "cm").add_or_update(1, request_id=given)
    assert metrics.drain()[0].request_ids == ids


def test_an_error_belongs_to_no_request_and_to_no_model_but_one_that_is_named(metrics: MetricsCache) -> None:
    metrics.add_error("Broken", 1)
    metrics.add_error("Broken", 1, [Dimension("ModelName", "m")])
    assert [(s.metric_type, s.dimensions, s.request_ids) for s in metrics.drain()] == [
        ("counter", (("Level", "Error"),), ()),
        ("counter", (("ModelName", "m"), ("Level", "Error")), ()),
    ]


def test_what_is_reported_while_loading_belongs_to_the_model() -> None:
    metrics = MetricsCache("m")
    metrics.add_counter("Loaded", 1)
    assert metrics.drain() == [MetricSample("Loaded", 1.0, "Count", "counter", _MODEL, ())]


def test_there_is_nothing_to_print_for_handlers_that_print_what_they_reported(metrics: MetricsCache) -> None:
    metrics.add_counter("Cats", 1)
    assert list(metrics.store) == []
    assert len(metrics.drain()) == 1


def test_draining_empties(metrics: MetricsCache) -> None:
    metrics.add_counter("Cats", 1)
    metrics.drain()
    assert metrics.drain() == []


def test_the_same_name_may_be_used_with_other_dimensions(metrics: MetricsCache) -> None:
    metrics.add_counter("Cats", 1)
    metrics.add_counter("Cats", 1, dimensions=[Dimension("Breed", "manx")])
    assert [len(sample.dimensions) for sample in metrics.drain()] == [2, 3]


def test_times_and_sizes_know_their_units_only(metrics: MetricsCache) -> None:
    with pytest.raises(MetricsCacheValueError, match="'ms' or 's', found 'h'"):
        metrics.add_time("T", 1, unit="h")
    with pytest.raises(ValueError, match="found 'TB'"):
        metrics.add_size("M", 1, unit="TB")


def test_a_falling_counter_is_logged_and_dropped(
    metrics: MetricsCache, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.add_counter("Cats", -1)
    assert metrics.drain() == []
    assert "a counter can't fall" in caplog.text


def test_a_declared_metric_is_found_and_updated(metrics: MetricsCache) -> None:
    declared = metrics.add_metric_to_cache("Depth", "cm", ["Pool"], MetricTypes.GAUGE)
    assert metrics.get_metric("Depth", MetricTypes.GAUGE) is declared
    declared.add_or_update(3, ["north"], "a")
    declared.update(4, "b", [Dimension("Pool", "south")])
    assert [(s.value, s.unit, s.dimensions, s.request_ids) for s in metrics.drain()] == [
        (3.0, "cm", (("Pool", "north"),), ("a",)),
        (4.0, "cm", (("Pool", "south"),), ("b",)),
    ]


def test_dimensions_of_an_update_take_the_place_of_the_declared_ones_for_its_value(
    metrics: MetricsCache,
) -> None:
    declared = metrics.add_metric_to_cache("Depth", "cm", ["Pool"], MetricTypes.GAUGE)
    declared.update(1, "a", [Dimension("Lake", "south")])
    declared.update(2, dimensions=[Dimension("Lake", "south"), Dimension("Buoy", 3)])  # type: ignore[arg-type]
    declared.update(3, ["b", "c"])
    declared.add_or_update(4, ["north"])
    assert [(sample.value, sample.dimensions, sample.request_ids) for sample in metrics.drain()] == [
        (1.0, (("Lake", "south"),), ("a",)),
        (2.0, (("Lake", "south"), ("Buoy", "3")), ()),
        (3.0, (), ("b", "c")),
        (4.0, (("Pool", "north"),), ()),
    ]


@pytest.mark.parametrize(("value", "dimensions"), [(1, []), (1, ["a", "b"]), ("one", ["a"]), (True, ["a"])])
def test_a_wrong_update_is_logged_not_raised(
    metrics: MetricsCache, caplog: pytest.LogCaptureFixture, value: float, dimensions: list[str]
) -> None:
    metrics.add_metric_to_cache("Depth", "cm", ["Pool"]).add_or_update(value, dimensions)
    assert metrics.drain() == []
    assert "Depth" in caplog.text


@pytest.mark.parametrize("value", [np.int64(3), np.float32(3), np.array(3), torch.tensor(3), "3", "3.0"])
def test_numbers_of_numpy_and_torch_and_texts_of_numbers_are_numbers(
    metrics: MetricsCache, value: Any
) -> None:
    declared = metrics.add_metric_to_cache("Depth", "cm")
    for _ in range(2):
        metrics.add_counter("Cats", value)
    declared.add_or_update(value)
    assert [(type(sample.value), sample.value) for sample in metrics.drain()] == [(float, 3.0)] * 3


@pytest.mark.parametrize(
    "value",
    [10**400, 10**5000, torch.ones(2), np.ones(2), torch.tensor(-1), np.int64(-1), None, b"1", [1]],
    ids=range(9),
)
def test_a_value_that_no_metric_can_have_is_logged_not_raised(
    metrics: MetricsCache, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    metrics.add_counter("Cats", value)
    assert metrics.drain() == []
    assert "metric Cats: " in caplog.text


def test_declaring_again_replaces_with_a_warning(
    metrics: MetricsCache, caplog: pytest.LogCaptureFixture
) -> None:
    first = metrics.add_metric_to_cache("Depth", "cm")
    assert metrics.add_metric_to_cache("Depth", "m") is not first
    assert "declared again" in caplog.text


def test_declarations_are_typed(metrics: MetricsCache) -> None:
    with pytest.raises(MetricsCacheTypeError):
        metrics.add_metric_to_cache(3, "cm")  # type: ignore[arg-type]
    with pytest.raises(MetricsCacheTypeError):
        metrics.add_metric_to_cache("Depth", "cm", [1])  # type: ignore[list-item]
    with pytest.raises(MetricsCacheTypeError):
        metrics.add_metric_to_cache("Depth", "cm", [], "gauge")  # type: ignore[arg-type]
    with pytest.raises(MetricsCacheTypeError):
        metrics.add_metric_to_cache("Depth", "cm", "Level")
    with pytest.raises(MetricsCacheTypeError):
        metrics.get_metric(3)  # type: ignore[arg-type]


def test_an_unknown_metric_is_a_key_error(metrics: MetricsCache) -> None:
    with pytest.raises(MetricsCacheKeyError, match="add_metric_to_cache"):
        metrics.get_metric("Depth")


def test_no_sample_is_lost_between_threads(metrics: MetricsCache) -> None:
    drained: list[MetricSample] = []

    def count() -> None:
        for _ in range(500):
            metrics.add_counter("N", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += metrics.drain()
    assert len(drained + metrics.drain()) == 2000


def test_what_the_configuration_declares_is_found_without_declaring_it_again() -> None:
    declared = MetricDeclaration("Words", "count", ("ModelName", "language"), "gauge")
    metrics = MetricsCache("m", [declared])
    metrics.get_metric("Words", MetricTypes.GAUGE).add_or_update(3, ["m", "en"])
    (sample,) = metrics.drain()
    assert (sample.name, sample.unit, sample.metric_type) == ("Words", "Count", "gauge")
    assert sample.dimensions == (("ModelName", "m"), ("language", "en"))


def test_what_was_reported_before_does_not_change_what_is_reported_now(metrics: MetricsCache) -> None:
    metrics.add_counter("Cats", 1)
    metrics.add_counter("Cats", 2, dimensions=[Dimension("Breed", "manx")])
    metrics.add_metric("Cats", 3, "cats", metric_type=MetricTypes.GAUGE)
    metrics.add_counter("Cats", 4, idx=1)
    metrics.begin_batch({0: "c"})
    metrics.add_counter("Cats", 5)
    metrics.add_error("Cats", 6)
    assert [(s.value, s.metric_type, len(s.dimensions), s.request_ids) for s in metrics.drain()] == [
        (1.0, "counter", 2, ("a", "b")),
        (2.0, "counter", 3, ("a", "b")),
        (3.0, "gauge", 2, ("a", "b")),
        (4.0, "counter", 2, ("b",)),
        (5.0, "counter", 2, ("c",)),
        (6.0, "counter", 1, ()),
    ]


def test_a_declaration_counts_from_the_next_report_on(metrics: MetricsCache) -> None:
    metrics.add_counter("Cats", 1)
    metrics.add_metric_to_cache("Cats", "MB", ("ModelName", "Level"))
    metrics.add_counter("Cats", 1)
    assert [sample.unit for sample in metrics.drain()] == ["Count", "Megabytes"]


@pytest.mark.parametrize("wrong", [-1.0, -1, True, "two", "-1", float("nan")])
def test_a_wrong_value_is_judged_alike_the_first_and_the_second_time(
    metrics: MetricsCache, wrong: float
) -> None:
    metrics.add_counter("Cats", wrong)
    first = len(metrics.drain())
    metrics.add_counter("Cats", 1)
    metrics.drain()
    metrics.add_counter("Cats", wrong)
    assert len(metrics.drain()) == first


def test_names_and_units_that_are_no_texts_become_texts() -> None:
    metrics = MetricsCache("m")
    metrics.add_metric(5, 1, None)  # type: ignore[arg-type]
    metrics.add_counter(5, 1, dimensions=[Dimension(7, 8)])  # type: ignore[arg-type]
    samples = metrics.drain()
    assert [(sample.name, sample.unit) for sample in samples] == [("5", "None"), ("5", "Count")]
    assert samples[1].dimensions[0] == ("7", "8")


def test_what_is_reported_beyond_the_limit_is_dropped_with_one_warning(
    metrics: MetricsCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_SAMPLES", 3)
    for _ in range(2):
        for value in range(5):
            metrics.beside().add_counter("Cats", value)
        assert [sample.value for sample in metrics.drain()] == [0, 1, 2]
    assert caplog.text.count("further ones are dropped") == 1
