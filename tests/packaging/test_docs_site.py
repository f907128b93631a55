"""`make docs`: the site builds without a warning, has the pages of the code, and asks no other host."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchere.serving.config.keys import KEYS
from torchere.serving.telemetry.catalogue import FAMILIES


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: `make docs` fetches it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": ""},  # as by `make docs`
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_reference_has_every_setting_and_metric(site: Path) -> None:
    settings = (site / "settings/index.html").read_text()
    assert [name for name in KEYS if f"<code>{name}</code>" not in settings] == []
    metrics = (site / "metrics/index.html").read_text()
    assert [name for name in FAMILIES if f"<code>{name}</code>" not in metrics] == []


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("disable_token_authorization", "false"),
        ("enable_model_api", "false"),
        ("enable_metrics_api", "true"),
        ("grpc_inference_port", "7070"),
    ],
)
def test_a_default_is_as_the_file_spells_it(site: Path, key: str, default: str) -> None:
    page = (site / "settings/index.html").read_text()
    row = page[page.index(f"<code>{key}</code>") :].partition("</tr>")[0]
    assert f"<code>{default}</code>" in row
    assert "without effect" not in row


def test_the_site_has_no_code_of_its_hooks(site: Path) -> None:
    assert [path.name for path in site.rglob("*") if path.suffix in (".py", ".pyc")] == []


def test_the_index_of_choices_names_every_record() -> None:
    folder = Path(__file__).resolve().parents[2] / "docs/decisions"
    index = (folder / "README.md").read_text()
    assert [record.name for record in folder.glob("0*.md") if f"]({record.name}): " not in index] == []


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe)[^>]*src="?(?:https?:)?//|<link[^>]*stylesheet[^>]*href="?(?:https?:)?//'
    )
    assert [page.name for page in site.rglob("*.html") if loads.search(page.read_text())] == []
