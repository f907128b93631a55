from __future__ import annotations

import json
import logging
import socket
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest

from torchere.handlers.base import BaseHandler
from torchere.handlers.envelopes import KServev2Envelope
from torchere.handlers.metrics import Dimension, MetricsCache, MetricTypes
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.ts_compat import legacy
from torchere.handlers.ts_compat.legacy import (
    Metric,
    MetricEncoder,
    MetricsStore,
    MockContext,
    deprecated,
    emit_metrics,
    get_yaml_config,
    import_class,
    timeit,
)


def test_emitted_metrics_reach_the_batch_of_this_thread() -> None:
    cache = MetricsCache("m")
    cache.begin_batch({0: "a"})
    metric = Metric("Speed", 3, "ms", [Dimension("Level", "Host")], request_id="a")
    metric.update(4)
    emit_metrics([metric])
    (sample,) = cache.drain()
    assert (sample.name, sample.value, sample.unit, sample.metric_type) == (
        "Speed",
        4.0,
        "Milliseconds",
        "gauge",
    )
    assert (sample.dimensions, sample.request_ids) == ((("Level", "Host"),), ("a",))


def test_a_counter_adds_up() -> None:
    metric = Metric("N", 1, "count", [], metric_method="counter")
    metric.update(2)
    assert (metric.value, metric.sample().metric_type, metric.sample().request_ids) == (3.0, "counter", ())


def test_a_metric_is_a_dict_and_json_as_in_torchserve() -> None:
    metric = Metric("N", 1, "ms", [Dimension("Level", "Host")], request_id="a")
    found = metric.to_dict()
    assert (found["MetricName"], found["Dimensions"], found["RequestId"]) == ("N", metric.dimensions, "a")
    written = json.loads(json.dumps(metric, cls=MetricEncoder))
    assert written.pop("Timestamp") > 0
    assert written == {
        "MetricName": "N",
        "Value": 1.0,
        "Unit": "Milliseconds",
        "Dimensions": [{"Name": "Level", "Value": "Host"}],
        "HostName": socket.gethostname(),
        "RequestId": "a",
    }
    metric.reset()
    assert (metric.value, metric.metric_type) == (0.0, MetricTypes.GAUGE)


def test_outside_a_batch_nobody_collects() -> None:
    done: list[bool] = []

    def emit() -> None:
        emit_metrics([Metric("N", 1, "", [])])
        done.append(True)

    thread = threading.Thread(target=emit)
    thread.start()
    thread.join()
    assert done == [True]


def test_items_that_are_no_metrics_are_logged_and_fail_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = MetricsCache("m")
    cache.begin_batch({0: "a"})
    cache.add_time("Walk", 2)
    caplog.set_level(logging.INFO)
    emit_metrics(cache.cache)
    emit_metrics(["N.Count:1|#Level:Host|#hostname:h,1", Metric("M", 1, "", [])])
    assert caplog.messages == ["[METRICS]MetricTypes.GAUGE", "[METRICS]N.Count:1|#Level:Host|#hostname:h,1"]
    assert [sample.name for sample in cache.drain()] == ["Walk", "M"]


def test_a_store_of_ones_own_can_be_emitted() -> None:
    cache = MetricsCache("m")
    cache.begin_batch({0: "a", 1: "b"})
    store = MetricsStore({0: "a", 1: "b"}, "m")
    store.add_counter("N", 1)
    store.add_counter("N", 2)
    store.add_time("T", 3, 1)
    store.add_time("T", 4, 1)
    store.add_time("T", 5, 0)
    emit_metrics(store.store)
    found = [(sample.name, sample.value, sample.metric_type, sample.request_ids) for sample in cache.drain()]
    assert found == [
        ("N", 3.0, "counter", ("a", "b")),
        ("T", 4.0, "gauge", ("b",)),
        ("T", 5.0, "gauge", ("a",)),
    ]


def test_a_store_is_a_list_of_metrics_which_reading_does_not_change() -> None:
    store = MetricsStore({0: "a", 1: "b"}, "m")
    store.add_counter("Cats", 2)
    store.add_time("Walk", 2.5, 0)
    host = f"|#ModelName:m,Level:Model|#hostname:{socket.gethostname()},"
    for _ in range(2):
        lines = [str(metric).split(host) for metric in store.store]
        assert [(line[0], line[1].split(",")[1:]) for line in lines] == [
            ("Cats.Count:2", ["a", "b"]),
            ("Walk.Milliseconds:2.5", ["a"]),
        ]
    store.store.clear()
    store.add_counter("Cats", 1)
    assert [metric.value for metric in store.store] == [1.0]


def test_each_observation_of_a_histogram_is_kept() -> None:
    store = MetricsStore({}, "m")
    for value in (1, 2):
        store.add_metric("H", value, "ms", metric_type=MetricTypes.HISTOGRAM)
    assert [(metric.value, metric.metric_type) for metric in store.store] == [
        (1.0, MetricTypes.HISTOGRAM),
        (2.0, MetricTypes.HISTOGRAM),
    ]


def test_a_full_store_drops_its_oldest_values_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MetricsStore, "_has_dropped", threading.Event())
    for name, most in (("MAX_STORED", 4), ("MAX_STORED_OF_REQUEST", 3)):
        monkeypatch.setattr(legacy, name, most)
    for _ in range(2):
        store = MetricsStore({}, "m")
        for index in range(9):
            store.set_request_ids(f"r{index}")
            store.add_counter("Cats", 1, 0)
            store.add_counter("Cats", 1, 0)
        assert [(metric.request_id, metric.value) for metric in store.store] == [
            *(("r5", 2.0), ("r6", 2.0), ("r7", 2.0), ("r8", 2.0))
        ]
        store.set_request_ids("r0")
        store.add_counter("Cats", 1, 0)  # a new one, as its old one is dropped
        assert [(metric.request_id, metric.value) for metric in store.store][-1] == ("r0", 1.0)
    assert [record.getMessage()[:37] for record in caplog.records] == [
        "a MetricsStore has more than 4 values"
    ]


def test_a_store_has_room_for_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy, "MAX_STORED", 2)
    monkeypatch.setattr(legacy, "MAX_STORED_OF_REQUEST", 1)
    store = MetricsStore(dict(enumerate("abcdef")), "m")
    for index in range(6):
        store.add_time("Walk", 1, index)
    assert "".join(metric.request_id for metric in store.store) == "abcdef"
    store.set_request_ids("")
    store.add_time("Run", 1)
    assert [metric.name for metric in store.store] == ["Walk", "Run"]


def test_a_store_of_histograms_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy, "MAX_STORED", 2)
    store = MetricsStore({}, "m")
    for value in (1, 2, 3, 4):
        store.add_metric("H", value, "ms", metric_type=MetricTypes.HISTOGRAM)
    assert [metric.value for metric in store.store] == [3.0, 4.0]


def test_a_store_made_by_hand_belongs_to_no_request() -> None:
    store = MetricsStore(uuid.uuid4(), "m")
    store.add_counter("Cats", 1)
    store.add_time("Walk", 2.5, 0)
    assert [(metric.name, metric.request_id) for metric in store.store] == [("Cats", None), ("Walk", None)]


def test_a_class_is_found_with_and_without_a_prefix() -> None:
    assert import_class("collections.OrderedDict") is OrderedDict
    assert import_class("OrderedDict", "collections") is OrderedDict
    assert import_class("handlers.RotatingFileHandler", "logging").__name__ == "RotatingFileHandler"


@pytest.mark.parametrize("name", ["OrderedDict", "collections.Nothing", "no_such_module.Thing"])
def test_what_is_not_there_is_an_import_error(name: str) -> None:
    with pytest.raises(ImportError):
        import_class(name)


def test_the_archives_own_classes_are_found(write_archive: Callable[..., Path], make_context: Any) -> None:
    code = """
        from ts.handler_utils.utils import import_class
        def handle(data, context):
            return data and [import_class("net.Net").__module__]
    """
    context = make_context(write_archive({"my.py": code, "net.py": "class Net: pass"}))
    answers: Any = load_entry_point("my.py", context)([{}], context)
    (module,) = answers
    assert module.startswith("_torchere_archive.m.")
    assert module.endswith(".net")


class Rows(BaseHandler):
    """Answers without a model."""

    def initialize(self, context: object) -> None:
        self.initialized = True

    def preprocess(self, data: object) -> object:
        return data

    def inference(self, data: object, *args: object, **kwargs: object) -> object:
        return data

    def postprocess(self, data: object) -> object:
        return data


def test_a_handler_runs_with_it(write_archive: Callable[..., Path]) -> None:
    folder = write_archive({"model-config.yaml": "handler:\n  depth: 3\n"})
    context = MockContext(model_dir=str(folder), model_file="", model_yaml_config_file="model-config.yaml")
    assert context.manifest == {"model": {"serializedFile": "model.pt"}}
    assert context.system_properties["model_dir"] == str(folder)
    assert context.model_yaml_config == {"handler": {"depth": 3}}
    assert Rows().handle([1, 2], context) == [1, 2]
    assert [sample.name for sample in context.metrics.store] == ["HandlerTime"]


@pytest.mark.parametrize("kind", [SimpleNamespace, Mock, MagicMock])
def test_a_handler_loads_and_answers_with_the_context_that_a_users_test_makes(
    scripted_doubler: Path, kind: type
) -> None:
    context = kind(
        system_properties={"model_dir": str(scripted_doubler), "gpu_id": None},
        manifest={"model": {"serializedFile": "doubler.pt"}},
        metrics=MetricsCache("m"),
        get_request_header=lambda index, name: None,
    )
    handler = BaseHandler()
    handler.initialize(context)
    assert handler.handle([[1.0]], context) == [[2.0]]


def test_a_context_may_lack_the_name_of_the_model(
    scripted_doubler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "true")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    context: Any = MockContext(model_dir=str(scripted_doubler), model_pt_file="doubler.pt", model_file=None)
    del context.model_name  # TorchServe's has none
    handler = BaseHandler()
    handler.initialize(context)
    assert handler.handle([[1.0]], context) == [[2.0]]
    assert list((tmp_path / "pytorch_profiler").glob("*.json"))

    envelope = KServev2Envelope(lambda rows, _: [rows[0]["data"]])
    tensor = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
    (answer,) = envelope.handle([{"body": {"id": "a", "inputs": [tensor]}}], context)
    assert (answer["model_name"], answer["outputs"][0]["data"]) == (None, [1])


def test_a_yaml_file_is_read(tmp_path):
    (tmp_path / "c.yaml").write_text("a: {b: 1}")
    assert get_yaml_config(str(tmp_path / "c.yaml")) == {"a": {"b": 1}}


def test_a_deprecated_function_warns_and_works():
    @deprecated("1.0", "new_one")
    def old_one(number):
        return number + 1

    with pytest.warns(PendingDeprecationWarning, match="old_one is deprecated in 1.0 and moved to new_one"):
        assert old_one(1) == 2


def test_a_timed_function_logs_its_duration(caplog):
    @timeit
    def work():
        return "done"

    with caplog.at_level(logging.INFO):
        assert work() == "done"
    assert "work took" in caplog.text
