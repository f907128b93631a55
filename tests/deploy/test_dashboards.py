"""Grafana dashboards: well formed, on metrics that exist, in PromQL that parses, with data in every panel."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "k8s/chart/dashboards"
DASHBOARDS = sorted(FOLDER.glob("*.json"))


def queries(file: Path) -> list[tuple[str, str]]:
    """Panel title and expression, with Grafana's variables replaced by what they stand for."""
    values = {"__rate_interval": "5s", "job": ".*", "namespace": ".*", "instance": ".*"}
    values["model"] = "echo" if file.stem == "torchere-model" else ".*"
    found = []
    for panel in json.loads(file.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = re.sub(r"\$([a-z_]\w*)", lambda match: values[match.group(1)], target["expr"])
            found.append((panel["title"], text))
    return found


def metrics_in(expression: str) -> set[str]:
    """The metric names: an identifier with a selector behind it."""
    return set(re.findall(r"([a-zA-Z_:][\w:]*)\{", expression))


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_panels_have_their_own_place_and_number_and_say_where_the_data_is_from(file: Path) -> None:
    dashboard = json.loads(file.read_text())
    panels = dashboard["panels"]

    assert dashboard["uid"] == file.stem
    assert len({panel["id"] for panel in panels}) == len(panels) > 5
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
        assert one["x"] + one["w"] <= 24
    for panel in panels:
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_queries_name_only_metrics_that_exist(file: Path, sample_names: frozenset[str]) -> None:
    used = {name for _, expression in queries(file) for name in metrics_in(expression)}
    variables = [each.get("definition", "") for each in json.loads(file.read_text())["templating"]["list"]]
    used |= {name for text in variables for name in re.findall(r"label_values\((\w+)", text)}

    assert used - sample_names == set()
    assert "torchere_request_duration_seconds_bucket" in used


def test_the_dashboards_together_show_every_family_of_ours(sample_names: frozenset[str]) -> None:
    used = {name for file in DASHBOARDS for _, text in queries(file) for name in metrics_in(text)}

    ours = {
        re.sub(r"_(bucket|count|sum)$", "", name) for name in sample_names if name.startswith("torchere_")
    }

    assert ours - {re.sub(r"_(bucket|count|sum)$", "", name) for name in used} == set()


def test_every_query_parses() -> None:
    everything = [text for file in DASHBOARDS for _, text in queries(file)]

    assert len(everything) > 40
    for text in everything:
        promql_parser.parse(text)


@pytest.fixture(scope="module")
def ask(
    tool: Callable[[str], str],
    live_server: Any,
    start_prometheus: Callable[..., AbstractContextManager[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Asks a Prometheus that scrapes the running server every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    with start_prometheus(tool("prometheus"), folder, live_server) as prometheus:

        def eventually(expression: str, *, with_failures: bool = False) -> list[Any]:
            """The first result that is not empty, or nothing after 15 seconds."""
            limit_s = time.monotonic() + 15
            while time.monotonic() < limit_s:
                live_server.predict()
                if with_failures:
                    live_server.fail()
                if result := prometheus.query(expression):
                    return list(result)
            return []

        yield eventually


def test_a_real_prometheus_has_data_for_every_panel(
    ask: Callable[[str], list[Any]], of_some_machines: re.Pattern[str]
) -> None:
    assert ask('rate(torchere_batch_size_count{model="echo"}[5s]) > 0')

    everything = [(title, text) for file in DASHBOARDS for title, text in queries(file)]
    wanted = [(title, text) for title, text in everything if not of_some_machines.search(text)]

    assert len(wanted) > 60
    assert [f"{title}: {text}" for title, text in wanted if not ask(text)] == []


def test_the_stages_that_prometheus_sees_add_up_to_the_whole(ask: Callable[[str], list[Any]]) -> None:
    apart = ask(
        "sum(torchere_stage_duration_seconds_sum) / sum(torchere_request_duration_seconds_sum)"
        " and sum(torchere_request_duration_seconds_count) > 0"
    )

    assert float(apart[0]["value"][1]) == pytest.approx(1.0, abs=1e-6)


def test_a_real_prometheus_has_data_for_every_recorded_rule_and_what_alerts_look_at(
    ask: Callable[..., list[Any]], rules: list[dict[str, Any]], of_some_machines: re.Pattern[str]
) -> None:
    short = [re.sub(r"\[\w+\]", "[5s]", rule["expr"]) for rule in rules if "record" in rule]
    looked_at = {
        f'{name}{{job="torchere"}}'
        for rule in rules
        for name in re.findall(r"([a-zA-Z_]\w*)\{", rule["expr"])
        if not of_some_machines.search(name)
    }

    assert len(short) >= 5
    assert len(looked_at) > 10
    wanted = [*short, *sorted(looked_at)]
    assert [text for text in wanted if not ask(text, with_failures=True)] == []


def test_a_real_prometheus_finds_torchserves_names(ask: Callable[[str], list[Any]]) -> None:
    (series,) = ask("Requests2XX")
    assert series["metric"]["Level"] == "Host"
