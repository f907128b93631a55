"""Draws `docs/throughput.svg`, the plot of the README, from the table of `docs/benchmarks.md`.

    python benchmarks/throughput.py

`run.py --write-docs` does the same, so the plot shows the run that the document shows.
"""

from __future__ import annotations

import re
from html import escape

from harness.paths import DOCUMENT, PLOT

TITLE = "Requests a second of a tiny MLP as JSON over REST, 32 clients"
SECTION, COLUMN = "## Tiny MLP", "req/s, 32"
LABELS = {
    "torchere": "torchere",
    "mosec, orjson": "mosec, orjson for its JSON",
    "triton": "Triton, Python backend",
    "mosec": "mosec",
    "torchserve": "TorchServe, batches set up",
    "torchserve, batch size 1": "TorchServe as it comes",
    "litserve": "LitServe",
}
_LEFT, _BAR, _GAP, _TOP, _WIDTH, _RIGHT = 210, 22, 10, 44, 400, 90  # pixels


def rates(document: str) -> dict[str, float]:
    """Return the requests a second of the contenders of `LABELS`, the fastest first.

    Raises:
        ValueError: the document has no such table, or lacks a contender.
    """
    section = document.partition(SECTION)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line]
    if not rows or COLUMN not in rows[0]:
        raise ValueError(f"found no table with the column {COLUMN!r} below {SECTION!r}")
    at = rows[0].index(COLUMN)
    cells = {row[0]: row[at] for row in rows if row[0] in LABELS}
    if missing := LABELS.keys() - cells.keys():
        raise ValueError(f"the table lacks {', '.join(sorted(missing))}")
    found = {name: float(cell.split()[0].replace(",", "")) for name, cell in cells.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def machine(document: str) -> str:
    """Return the processor, the cores and the commit that the document names."""
    match = re.search(r"^Measured \S+ on (.+?, \d+ cores).*\(commit (\w+)\)", document, re.MULTILINE)
    if match is None:
        raise ValueError("found no line 'Measured ... on ... cores ... (commit ...)'")
    return f"{match[1]}, commit {match[2]}"


def drawn(document: str) -> str:
    """Return the plot as SVG: a bar for each contender."""
    found = rates(document)
    most = max(found.values())
    height = _TOP + len(found) * (_BAR + _GAP) + 24
    width = _LEFT + _WIDTH + _RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="24" font-size="15">{TITLE}</text>',
    ]
    for number, (name, rate) in enumerate(found.items()):
        top, length = _TOP + number * (_BAR + _GAP), rate / most * _WIDTH
        colour = "#c2410c" if name == "torchere" else "#94a3b8"
        lines += [
            f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{escape(LABELS[name])}</text>',
            f'<rect x="{_LEFT}" y="{top}" width="{length:.1f}" height="{_BAR}" fill="{colour}"/>',
            f'<text x="{_LEFT + length + 6:.1f}" y="{top + 16}">{rate:,.0f}</text>',
        ]
    lines += [
        f'<text x="10" y="{height - 10}" font-size="11" fill="#475569">{escape(machine(document))}; '
        "server and client on the same cores</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PLOT.write_text(drawn(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(PLOT)
