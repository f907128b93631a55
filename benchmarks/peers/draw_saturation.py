"""Draws saturation and p99 of a run against time: `python draw_saturation.py FILE < figures.json`.

Runs where matplotlib is, which is not the project's environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]  # lives in an environment of its own

mpl.use("Agg")
from matplotlib import pyplot as plt  # type: ignore[import-not-found,unused-ignore]

mpl.rcParams["svg.hashsalt"] = "torchere"  # the same figures give the same file


def main(path: Path) -> None:
    """Draw both, one over the other."""
    figures = json.load(sys.stdin)
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    above.plot(*zip(*figures["gauge"], strict=True), label="torchere_saturation")
    above.plot(*zip(*figures["offered"], strict=True), label="offered load / peak", color="0.6")
    above.axhline(1, linestyle="--", color="tab:red", linewidth=1)
    above.set(ylabel="saturation", ylim=(0, None))
    below.plot(*zip(*figures["p99"], strict=True), label="p99 of each second", color="tab:orange")
    below.axhline(figures["target_ms"], linestyle="--", color="tab:red", linewidth=1)
    below.set(xlabel="seconds", ylabel="ms", ylim=(0, None))
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
