"""Draws the plots of a run: `python draw_plots.py FOLDER < run.json`; prints the files it wrote.

Runs where matplotlib is, which is not the project's environment. A plot whose row was not run is left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl  # type: ignore[import-not-found,unused-ignore]  # lives in an environment of its own

mpl.use("Agg")
from matplotlib import pyplot as plt  # type: ignore[import-not-found,unused-ignore]

Samples = dict[str, dict[str, list[float | None]]]
_PERCENTS = ("1", "5", "10", "25", "50", "75", "90", "95", "99", "99.9")
_FACTORS = ("0.5", "1", "2", "3")


def median(values: list[float | None]) -> float:
    """The median of the rounds that have a figure."""
    return statistics.median(value for value in values if value is not None)


def throughput(samples: Samples, axes: Any) -> None:
    """Requests a second against clients."""
    for name, metrics in samples.items():
        clients = sorted(int(metric[4:]) for metric in metrics if metric.startswith("rps_"))
        axes.plot(clients, [median(metrics[f"rps_{count}"]) for count in clients], marker="o", label=name)
    axes.set(xscale="log", xlabel="clients", ylabel="requests a second", title="Tiny MLP: throughput")


def latency(samples: Samples, axes: Any) -> None:
    """Share of requests against latency, at 32 clients."""
    for name, metrics in samples.items():
        found = [p for p in _PERCENTS if f"p{p}_32_ms" in metrics]
        values = [median(metrics[f"p{p}_32_ms"]) for p in found]
        axes.plot(values, [float(p) for p in found], marker=".", label=name)
    axes.set(xscale="log", xlabel="ms", ylabel="% of requests", title="Tiny MLP: latency at 32 clients")


def goodput(samples: Samples, axes: Any) -> None:
    """Answers within the deadline against offered load, both in peaks."""
    for name, metrics in samples.items():
        peak = median(metrics["peak_rps"])
        found = [f for f in _FACTORS if f"goodput_{f}x" in metrics]
        values = [median(metrics[f"goodput_{f}x"]) / peak for f in found]
        axes.plot([float(f) for f in found], values, marker="o", label=name)
    axes.set(xlabel="offered load / peak", ylabel="goodput / peak", title="Goodput, deadlines of 250 ms")


def memory(samples: Samples, axes: Any) -> None:
    """Memory of the process tree against executors."""
    for name, metrics in samples.items():
        counts = sorted(int(metric[4:-4]) for metric in metrics if metric.startswith("pss_"))
        axes.plot(counts, [median(metrics[f"pss_{count}_mib"]) for count in counts], marker="o", label=name)
    axes.set(xlabel="executors", ylabel="MiB", title="Memory of a 400 MB model")


PLOTS: dict[str, tuple[str, Callable[[Samples, Any], None]]] = {
    "throughput": ("tiny_mlp", throughput),
    "latency": ("tiny_mlp", latency),
    "goodput": ("overload", goodput),
    "memory": ("memory", memory),
}


def main(folder: Path) -> None:
    """Draw all that can be drawn."""
    rows = json.load(sys.stdin)["rows"]
    for name, (key, plot) in PLOTS.items():
        if not rows.get(key, {}).get("samples"):
            continue
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        plot(rows[key]["samples"], axes)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        path = folder / f"{name}.svg"
        figure.savefig(path)
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
