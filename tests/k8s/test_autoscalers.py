"""The chart's autoscalers: which gauge they read, of which pods, and how fast they follow it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchere.serving.telemetry.metrics import Metrics

Object = dict[str, Any]


def named(objects: list[Object], kind: str) -> Object:
    """The one object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


@pytest.mark.parametrize("values", ["autoscaled", "keda"])
def test_an_autoscaler_owns_the_number_of_replicas(values: str, render: Callable[..., list[Object]]) -> None:
    assert "replicas" not in named(render(values), "Deployment")["spec"]


def test_autoscalers_look_at_gauges_that_the_server_has(render: Callable[..., list[Object]]) -> None:
    exposition = Metrics(hostname="h").exposition()

    metric = named(render("autoscaled"), "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"][
        "name"
    ]
    queries = [
        trigger["metadata"]["query"] for trigger in named(render("keda"), "ScaledObject")["spec"]["triggers"]
    ]

    assert f"# TYPE {metric} gauge" in exposition
    assert metric == "torchere_saturation"
    assert "torchere_saturation{" in queries[0] and "# TYPE torchere_saturation gauge" in exposition
    assert "torchere_request_duration_seconds_bucket{" in queries[1]
    assert 'service="rel-torchere-metrics"' in queries[0]


@pytest.mark.parametrize("program", ["promtool", "promtool3"])
def test_both_autoscalers_see_the_busiest_model_of_each_pod_that_an_executor_serves(
    program: str, render: Callable[..., list[Object]], tool: Callable[[str], str], root: Path, tmp_path: Path
) -> None:
    keda = named(render("keda"), "ScaledObject")["spec"]["triggers"][0]["metadata"]
    hpa = named(render("autoscaled"), "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]
    block = (root / "docs/kubernetes.md").read_text().split("For prometheus-adapter:")[1].split("```")[1]
    (adapter,) = yaml.safe_load(block.removeprefix("yaml"))["rules"]

    series: list[tuple[str, dict[str, float]]] = [
        ('torchere_saturation{POD, model="net", version="1.0"}', {"serving": 0.5, "loading": 1.0}),
        ('torchere_saturation{POD, model="busy", version="1.0"}', {"serving": 0.6, "loading": 0.2}),
        ('torchere_executors{POD, model="net", version="1.0", state="ready"}', {"serving": 2, "loading": 0}),
        ('torchere_executors{POD, model="busy", version="1.0", state="ready"}', {"serving": 1, "loading": 1}),
    ]
    labels = 'namespace="torchserve", service="rel-torchere-metrics", instance="NAME:8082", pod="NAME"'
    recorded = [
        {"series": name.replace("POD", labels.replace("NAME", pod)), "values": str(value)}
        for name, by_pod in series
        for pod, value in by_pod.items()
    ]
    words = {"<<.GroupBy>>": "pod", "<<.Series>>": hpa["metric"]["name"],
             "<<.LabelMatchers>>": 'namespace="torchserve",pod=~"serving|loading"'}  # fmt: skip
    query = adapter["metricsQuery"]
    for word, text in words.items():
        query = query.replace(word, text)
    of_pods = [{"labels": f'{{pod="{pod}"}}', "value": value} for pod, value in
               {"serving": 0.6, "loading": 0.2}.items()]  # fmt: skip
    cases = [
        {"expr": query, "eval_time": "0m", "exp_samples": of_pods},
        {"expr": keda["query"], "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": 0.8}]},
    ]
    file = {"tests": [{"input_series": recorded, "promql_expr_test": cases}]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file))

    tested = subprocess.run(
        [tool(program), "test", "rules", tmp_path / "tests.yaml"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert adapter["seriesQuery"].startswith(hpa["metric"]["name"] + "{")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("program", ["promtool", "promtool3"])
def test_the_latency_of_keda_has_no_result_without_traffic(
    program: str, render: Callable[..., list[Object]], tool: Callable[[str], str], tmp_path: Path
) -> None:
    trigger = named(render("keda"), "ScaledObject")["spec"]["triggers"][1]["metadata"]
    labels = 'namespace="torchserve", service="rel-torchere-metrics", instance="a:8082"'
    series = [
        {
            "series": f'torchere_request_duration_seconds_bucket{{{labels}, le="{le}"}}',
            "values": "0+60x5 300x9",
        }
        for le in ("1", "2", "+Inf")
    ]
    cases = [
        {"expr": trigger["query"], "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": 0.95}]},
        {"expr": trigger["query"], "eval_time": "12m", "exp_samples": []},
    ]
    file = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": cases}]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(file))

    tested = subprocess.run(
        [tool(program), "test", "rules", tmp_path / "tests.yaml"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert trigger["ignoreNullValues"] == "true"  # so no result is no error


def test_both_autoscalers_have_the_settings_that_the_simulated_day_recommends(
    render: Callable[..., list[Object]], root: Path
) -> None:
    defaults = yaml.safe_load((root / "k8s/chart/values.yaml").read_text())
    hpa = named(render("autoscaled"), "HorizontalPodAutoscaler")["spec"]["behavior"]
    keda = named(render("keda"), "ScaledObject")["spec"]["advanced"]["horizontalPodAutoscalerConfig"]

    assert defaults["keda"]["saturationThreshold"] == "0.7"
    assert defaults["autoscaling"]["averageValue"] == "700m"
    assert hpa == keda["behavior"]
    up, down = hpa["scaleUp"], hpa["scaleDown"]
    assert (up["stabilizationWindowSeconds"], down["stabilizationWindowSeconds"]) == (0, 300)
    policies = {each["type"]: (each["value"], each["periodSeconds"]) for each in up["policies"]}
    assert policies == {"Pods": (4, 15), "Percent": (100, 15)}
