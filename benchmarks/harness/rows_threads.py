"""The row of two executor threads on one copy of the weights, beside two bare threads with no server."""

from __future__ import annotations

import numpy as np

from harness import servers
from harness.bare import bare_loop
from harness.figures import Goal
from harness.models import COMPILED_ROWS, WIDE, WIDE_LAYERS
from harness.processes import Probe
from harness.rows import Conditions, Figures, Measure, Row
from harness.rows_http import closed_loop

_ARCHIVES = {"TorchScript": "forward", ".pt2": "forward_pt2"}
_CLIENTS = 4


def _served(kind: str, threads: int) -> Measure:
    archive = _ARCHIVES[kind]
    probe = Probe(f"/predictions/{archive}", b"{}", b'"rows"')

    def measure(conditions: Conditions) -> Figures:
        server = servers.torchere(conditions.shop, archive, threads)
        figures = closed_loop(server, probe, conditions, (_CLIENTS,))
        return {"forward_per_s": figures[f"rps_{_CLIENTS}"], "p50_ms": figures[f"p50_{_CLIENTS}_ms"]}

    return measure


def _bare(kind: str, threads: int) -> Measure:
    def measure(conditions: Conditions) -> Figures:
        shop = conditions.shop
        make = shop.compiled_mlp if kind == ".pt2" else shop.mlp
        rows = shop.folder / "rows.npy"
        np.save(rows, np.full((COMPILED_ROWS, WIDE), 0.5, np.float32))
        options = ("--batches", "1", "--each")
        found = bare_loop(make(WIDE, WIDE_LAYERS), [rows], conditions.seconds, threads, *options)
        return {"forward_per_s": found["per_second"]}  # its row is all that the handler makes

    return measure


def _name(kind: str, threads: int, bare: bool = False) -> str:
    return f"{threads} {'bare ' * bare}thread{'s' * (threads > 1)}, {kind}"


def _goals(kind: str) -> tuple[Goal, ...]:
    one, both = _name(kind, 1), _name(kind, 2)
    bare_one, bare_both = _name(kind, 1, bare=True), _name(kind, 2, bare=True)
    metric = "forward_per_s"
    return (
        Goal(f"forwards a second, 2 threads to 1, {kind}", metric, 1.9, against=(one,), ours=both),
        Goal(
            f"the same with no server, {kind}: what the machine allows",
            metric,
            None,
            against=(bare_one,),
            ours=bare_both,
        ),
        Goal(
            f"2 threads of the server to 2 bare threads, {kind}",
            metric,
            None,
            against=(bare_both,),
            ours=both,
        ),
    )


def rows() -> list[Row]:
    """The row of this module."""
    contenders: dict[str, Measure] = {}
    for kind in _ARCHIVES:
        for threads in (2, 1):
            contenders[_name(kind, threads)] = _served(kind, threads)
            contenders[_name(kind, threads, bare=True)] = _bare(kind, threads)
    return [
        Row(
            "two_threads",
            "Two executor threads on one copy of the weights",
            f"MLP of {WIDE_LAYERS} layers {WIDE} x {WIDE} on {COMPILED_ROWS} rows that the handler makes "
            f"itself, so that the forward is what is timed; {_CLIENTS} clients; as TorchScript and compiled "
            "ahead of time; one intra-op thread each. wrk and the event loop take their share of the same "
            "cores. Bare threads run the same file in a loop with no server and no client, so their ratio is "
            "what the machine allows.",
            contenders,
            {"forward_per_s": "forwards/s", "p50_ms": "p50 ms"},
            tuple(goal for kind in _ARCHIVES for goal in _goals(kind)),
        )
    ]
