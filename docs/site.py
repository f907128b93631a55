"""Hooks of mkdocs: the pages that are made from the code and the README, and links that lead out of docs/."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from torchere.serving.config.keys import KEYS, METRICS_API, Key
from torchere.serving.config.kinds import INVERTED_BOOLEAN
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.telemetry.catalogue import FAMILIES

_LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)]*)?\)")
_ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that no file of docs/ has."""
    readme = (_ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    for name, content in (("index.md", readme), ("settings.md", settings()), ("metrics.md", metrics())):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files outside docs/ into their paths: the site does not have them."""
    folder = posixpath.dirname(page.file.src_uri)
    prefix = "" if page.file.src_uri == "index.md" else "docs"

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if files.get_file_from_path(target) is not None:
            return link[0]
        path = posixpath.normpath(posixpath.join(prefix, target))
        if not (_ROOT / path).exists():
            return link[0]  # reported by mkdocs
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    return _LINK.sub(replaced, markdown)


def settings() -> str:
    """Return the page of all keys of `config.properties`, from the table that reads them."""
    rows = [
        "# Settings",
        "",
        "All keys of `config.properties`. Those of torchere, and when variables count: "
        "[operations.md](operations.md#settings).",
        "",
        "| key | value | default | environment variable | note |",
        "| --- | --- | --- | --- | --- |",
    ]
    defaults = ServerSettings()
    gates = {gate for key in KEYS.values() for gate in key.gates}
    for key in KEYS.values():
        note = key.advice or ("" if key.setting or key.name in gates else "without effect")
        default = "" if not key.setting or key.secret else _default(defaults, key)
        variable = f"`{key.variable}`" if key.variable else ""
        cells = (f"`{key.name}`", key.kind.expected, default, variable, note)
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _default(settings: Any, key: Key) -> str:
    value = True if key.setting == METRICS_API else settings  # that one is no field
    for name in key.setting.split(".") if value is settings else ():
        value = getattr(value, name, None)
    if isinstance(value, bool):
        value = str(value != (key.kind is INVERTED_BOOLEAN)).lower()  # as the file spells it
    return "" if value in (None, (), "") else f"`{value}`"


def metrics() -> str:
    """Return the page of torchere's own metric families, from their catalogue."""
    rows = [
        "# Metrics",
        "",
        "torchere's metrics; [operations.md](operations.md#metrics) has TorchServe's, too.",
        "",
    ]
    rows += ["| metric | type | labels | what |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{name}` | {row.kind} | {', '.join(row.labels)} | {row.text} |" for name, row in FAMILIES.items()
    ]
    return "\n".join(rows) + "\n"
