"""Prometheus rules: they parse, do what their tests say, name metrics that exist, and are documented."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

# Words of PromQL that stand where a metric could.
WORDS = frozenset({"and", "or", "unless", "by", "on", "without", "ignoring", "group_left", "bool", "offset"})


# Versions 2 and 3 of Prometheus count the samples of a range differently, and print numbers differently.
both_promtools = pytest.mark.parametrize("program", ["promtool", "promtool3"])


def metrics_in(expression: str) -> set[str]:
    """The metric names of a PromQL expression, found without a parser."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", text)
    text = re.sub(r"\b(by|on|without|ignoring|group_left)\s*\([^)]*\)", " ", text)
    names = re.findall(r"(?<![\w$.])[a-zA-Z_:][\w:]*(?!\w*\s*\()", text)
    return {name for name in names if name not in WORDS}


@pytest.fixture(scope="module")
def rules_file(root: Path) -> Path:
    return root / "k8s/chart/rules/torchere.yaml"


def test_names_are_found_in_an_expression() -> None:
    expression = (
        'sum by (a, le) (rate(m_bucket{x="y{z}"}[5m])) / on (a) group_left () (job:n:rate5m > 0) unless '
        'label_replace(up{j="$job"}, "d", "$1", "s", "(.*)")'
    )

    assert metrics_in(expression) == {"m_bucket", "job:n:rate5m", "up"}


def test_rules_name_only_metrics_that_exist(
    rules: list[dict[str, Any]], sample_names: frozenset[str]
) -> None:
    known = sample_names | {rule["record"] for rule in rules if "record" in rule}

    used = {name for rule in rules for name in metrics_in(rule["expr"])}

    assert used - known == set()
    assert "torchere_queue_depth" in used


def test_every_alert_has_a_severity_and_says_what_it_is_about(rules: list[dict[str, Any]]) -> None:
    alerts = [rule for rule in rules if "alert" in rule]

    assert alerts
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning"), alert["alert"]
        assert set(alert["annotations"]) == {"summary", "description"}, alert["alert"]


def test_every_alert_is_in_the_document(rules: list[dict[str, Any]], root: Path) -> None:
    text = (root / "docs/operations.md").read_text()

    assert [rule["alert"] for rule in rules if "alert" in rule and f"`{rule['alert']}`" not in text] == []


def test_every_alert_is_seen_firing_in_a_test(rules: list[dict[str, Any]], root: Path) -> None:
    files = sorted((root / "deploy/prometheus/tests").glob("*.yaml"))
    cases = [case for file in files for test in yaml.safe_load(file.read_text())["tests"]
             for case in test.get("alert_rule_test", ())]  # fmt: skip

    fired = {case["alertname"] for case in cases if case["exp_alerts"]}

    assert {rule["alert"] for rule in rules if "alert" in rule} - fired == set()


@both_promtools
def test_promtool_finds_nothing_to_complain_about(
    program: str, tool: Callable[[str], str], rules_file: Path
) -> None:
    checked = subprocess.run(
        [tool(program), "check", "rules", "--lint=all", "--lint-fatal", str(rules_file)],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert checked.returncode == 0, checked.stdout + checked.stderr


@both_promtools
def test_alerts_fire_when_they_should_and_only_then(
    program: str, tool: Callable[[str], str], root: Path
) -> None:
    files = sorted((root / "deploy/prometheus/tests").glob("*.yaml"))

    tested = subprocess.run(
        [tool(program), "test", "rules", *map(str, files)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GOGC": "400", "GOMAXPROCS": "1"},  # a quarter of the processor time less
    )

    assert len(files) == 4
    assert tested.returncode == 0, tested.stdout + tested.stderr


@both_promtools
def test_the_configuration_of_the_compose_file_is_valid_and_scrapes_the_job_the_rules_ask_for(
    program: str, tool: Callable[[str], str], root: Path, rules: list[dict[str, Any]]
) -> None:
    file = root / "deploy/prometheus/prometheus.yml"

    checked = subprocess.run(
        [tool(program), "check", "config", str(file)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout
    jobs = {job["job_name"] for job in yaml.safe_load(file.read_text())["scrape_configs"]}
    asked = {job for rule in rules for job in re.findall(r'job="(\w+)"', rule["expr"])}
    assert jobs == asked == {"torchere"}
