"""What a scrape of a running server looks like to Prometheus, and to the reader of the documents."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchere.serving.telemetry.catalogue import FAMILIES


def test_a_live_scrape_under_load_parses_and_only_torchserves_own_names_break_the_conventions(
    tool: Callable[[str], str], live_server: Any
) -> None:
    promtool = tool("promtool")
    with ThreadPoolExecutor(4) as clients:
        load = [clients.submit(live_server.predict) for _ in range(40)]
        text = live_server.scrape()
        assert [answer.result() for answer in load] == [b"ok"] * 40

    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=text,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    # 0: nothing to say, 3: remarks on names; 1 would be text that can't be parsed
    assert checked.returncode in (0, 3), checked.stderr
    remarks = checked.stderr.splitlines()
    assert [remark for remark in remarks if remark.startswith("torchere_")] == []
    legacy = re.compile(r"(Requests[245]XX|ts_\w+|[A-Z]\w+) ")  # kept for the dashboards built on them
    assert [remark for remark in remarks if not legacy.match(remark)] == []


def test_every_metric_is_in_the_reference(root: Path, live_server: Any) -> None:
    families = re.findall(r"^# TYPE (\S+) ", live_server.scrape(), re.MULTILINE)

    text = (root / "docs/operations.md").read_text()

    assert len(families) > 20
    assert [name for name in families if f"`{name}`" not in text] == []


def test_a_live_scrape_and_the_reference_have_the_labels_of_the_table_in_the_code(
    root: Path, live_server: Any
) -> None:
    of_histogram = re.compile("_(bucket|count|sum)$")
    scraped = {
        of_histogram.sub("", name): tuple(label for label in re.findall(r'(\w+)="', labels) if label != "le")
        for name, labels in re.findall(r"^(torchere_\w+)(?:\{(.*)\})? ", live_server.scrape(), re.MULTILINE)
    }
    table = re.findall(
        r"^\| (`torchere_.*?`) \| \w+ \| (.*?) ?\|", (root / "docs/operations.md").read_text(), re.M
    )
    documented = {
        name: tuple(filter(None, labels.split(", ")))
        for names, labels in table
        for name in re.findall(r"\w+", names)
    }

    assert len(scraped) > 30
    assert {name: FAMILIES[name].labels for name in scraped} == scraped
    assert {name: row.labels for name, row in FAMILIES.items()} == documented
