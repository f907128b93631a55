"""The row of streamed answers."""

from __future__ import annotations

import json

from harness import servers
from harness.figures import Goal
from harness.processes import Probe
from harness.rows import Conditions, Figures, Measure, Row
from harness.rows_http import Start, closed_loop

_PARTS, _PART_BYTES = 32, 64
_CLIENTS = 16
_WORKERS = 2


def _served(start: Start) -> Measure:
    body = json.dumps({"parts": _PARTS, "bytes": _PART_BYTES}).encode()
    probe = Probe("/predictions/parts", body, b"x" * _PARTS * _PART_BYTES)

    def measure(conditions: Conditions) -> Figures:
        server = start(conditions.shop, "parts", _WORKERS)
        figures = closed_loop(server, probe, conditions, (1, _CLIENTS))
        return {**figures, "parts_per_s": figures[f"rps_{_CLIENTS}"] * _PARTS}

    return measure


def rows() -> list[Row]:
    """The row of this module."""
    return [
        Row(
            "streams",
            "Streamed answers",
            f"A handler without a model sends {_PARTS} parts of {_PART_BYTES} bytes a request, in 2 "
            f"processes, batch size 1; {_CLIENTS} clients by wrk, which reads each answer to its end.",
            {"torchere": _served(servers.torchere), "torchserve": _served(servers.torchserve)},
            {"parts_per_s": "parts/s", f"p50_{_CLIENTS}_ms": "p50 ms", "p50_1_ms": "p50 ms, 1 client"},
            (Goal("parts a second, to TorchServe", "parts_per_s", None, against=("torchserve",)),),
        )
    ]
