from __future__ import annotations

import json
import socket
import threading
import uuid

from torchere.handlers.metrics import Dimension, MetricsCache, MetricTypes
from torchere.handlers.ts_compat.legacy import Metric, MetricEncoder, MetricsStore, emit_metrics


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


def test_a_store_of_ones_own_can_be_emitted() -> None:
    cache = MetricsCache("m")
    cache.begin_batch({0: "a"})
    store = MetricsStore({0: "a"}, "m")
    store.add_counter("N", 1)
    emit_metrics(store.store)
    assert [sample.name for sample in cache.drain()] == ["N"]


def test_a_store_made_by_hand_belongs_to_no_request() -> None:
    store = MetricsStore(uuid.uuid4(), "m")
    store.add_counter("Cats", 1)
    store.add_time("Walk", 2.5, 0)
    assert [(sample.name, sample.request_ids) for sample in store.store] == [("Cats", ()), ("Walk", ())]
