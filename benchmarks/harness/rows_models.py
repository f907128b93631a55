"""Rows of real models, tensors in and out: what of bare loops over the same file the server keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness import real_models, servers
from harness.bare import bare_loop
from harness.figures import Goal
from harness.models import Workshop
from harness.processes import Endpoint, Probe
from harness.rows import Conditions, Figures, Row
from harness.rows_http import closed_loop
from harness.tries import fastest, tries_of
from torchere.archiver.signature import Signature
from torchere.archiver.torchscript_options import TorchScriptOptions

_SHARE = 0.95  # of the bare loop
# Phases are that much longer: a batch takes a tenth of a second and more, on slow machines half of one, and
# what is on its way when wrk stops counts for nothing; in 2 s that was a tenth of all rows, or more.
LONGER = 12
_COLUMNS = {
    "per_second": "rows/s",
    "p50_ms": "p50 ms",
    "batch": "batch",
    "loops": "loops",
    "optimised": "optimised",
}
_OPTIMISED = "bare loop, optimised"
_BATCHES = (1, 2, 4, 8, 16, 32)  # what the bare loop tries, too
TRY_S = 6.0  # of the server with each


@dataclass(frozen=True, slots=True)
class RealModel:
    """A model, and what it is asked."""

    name: str
    file: Callable[[Workshop], Path]
    signature: Signature
    rows: Callable[[], Sequence[np.ndarray[Any, Any]]]


class Plan(NamedTuple):
    """How a subject is served: what its user would find by trying."""

    batch: int
    executors: int

    @property
    def clients(self) -> int:
        """How many keep all executors busy: a full batch waits when one of them comes free."""
        return 2 * self.batch * self.executors

    @property
    def config(self) -> str:
        """Its model-config.yaml; a batch is full when it goes, so the delay does not count."""
        return f"batchSize: {self.batch}\nmaxBatchDelay: 5\njobQueueSize: 1000\n"


def cores() -> int:
    """How many executors, and loops, there are."""
    return len(os.sched_getaffinity(0))


def _lite0_rows() -> Sequence[np.ndarray[Any, Any]]:
    return [np.full((1, 3, real_models.SIDE, real_models.SIDE), 0.5, np.float32)]


def _minilm_rows() -> Sequence[np.ndarray[Any, Any]]:
    return [tensor.numpy() for tensor in real_models.minilm_inputs_of(1)]


LITE0 = RealModel("lite0t", real_models.lite0_file, real_models.LITE0, _lite0_rows)
MINILM = RealModel("minilm", real_models.minilm_file, real_models.MINILM, _minilm_rows)


@cache
def options_of(subject: RealModel, shop: Workshop) -> TorchScriptOptions:
    """How the archive says that the file is to be loaded: as `torchere archive` measures fastest."""
    import torch  # noqa: PLC0415  # seconds to import

    from torchere.archiver.models.convert.optimize_gain import measured_gain  # noqa: PLC0415  # as above

    sample = tuple(torch.from_numpy(row) for row in subject.rows())
    gain = measured_gain(subject.file(shop), [sample], batched=True)
    return TorchScriptOptions(optimize_for_inference=gain is not None and gain.is_worthwhile)


@cache
def plan_of(subject: RealModel, shop: Workshop) -> Plan:
    """What the server was fastest with, tried once a run; as many executors as the best bare loop has."""
    loops = int(_bare_loop(subject, shop, 0)["loops"])
    plans = [Plan(batch, loops) for batch in _BATCHES]
    tried = Conditions(shop, TRY_S)
    return fastest(tries_of(plans, lambda plan: _rates(subject, plan, tried)["per_second"]))


def _bare_loop(subject: RealModel, shop: Workshop, seconds: float, *options: str) -> Figures:
    inputs = []
    for spec, array in zip(subject.signature.inputs, subject.rows(), strict=True):
        inputs.append(shop.folder / f"{subject.name}_{spec.name}.npy")
        np.save(inputs[-1], array)
    return bare_loop(subject.file(shop), inputs, seconds, cores(), *options)


def binary_request(
    signature: Signature, rows: Sequence[np.ndarray[Any, Any]]
) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an Open Inference request with raw tensors, which asks for such an answer."""
    raws = [array.tobytes() for array in rows]
    inputs = [
        {
            "name": spec.name,
            "shape": list(array.shape),
            "datatype": spec.datatype,
            "parameters": {"binary_data_size": len(raw)},
        }
        for spec, array, raw in zip(signature.inputs, rows, raws, strict=True)
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return b"".join([head, *raws]), {"Inference-Header-Content-Length": str(len(head))}


def packed(subject: RealModel, plan: Plan, shop: Workshop) -> Probe:
    """Pack its archive, and say what it is asked."""
    load = options_of(subject, shop)
    real_models.tensor_archive(
        shop, subject.name, subject.file(shop), subject.signature, plan.config, load=load
    )
    body, headers = binary_request(subject.signature, subject.rows())
    path = f"/v2/models/{subject.name}/infer"
    wanted = f'"name":"{subject.signature.outputs[0].name}"'.encode()
    return Probe(path, body, wanted, "application/octet-stream", headers)


def _rates(subject: RealModel, plan: Plan, conditions: Conditions) -> Figures:
    probe = packed(subject, plan, conditions.shop)
    server = servers.torchere(conditions.shop, subject.name, plan.executors)
    return rates_of(server, probe, plan, conditions)


def rates_of(
    server: AbstractContextManager[Endpoint], probe: Probe, plan: Plan, conditions: Conditions
) -> Figures:
    """Return the figures of these rows, of a server under the load of the plan."""
    clients = plan.clients
    figures = closed_loop(server, probe, conditions, (clients,))
    keys = {"per_second": f"rps_{clients}", "p50_ms": f"p50_{clients}_ms", "cpu_us": f"cpu_{clients}_us"}
    return {name: figures[key] for name, key in keys.items()}


def _served(subject: RealModel) -> Callable[[Conditions], Figures]:
    def measure(conditions: Conditions) -> Figures:
        plan = plan_of(subject, conditions.shop)
        figures = _rates(subject, plan, longer(conditions))
        optimised = float(options_of(subject, conditions.shop).optimize_for_inference)
        return {**figures, "batch": plan.batch, "loops": plan.executors, "optimised": optimised}

    return measure


def _bare(subject: RealModel, *options: str) -> Callable[[Conditions], Figures]:
    def measure(conditions: Conditions) -> Figures:
        figures = _bare_loop(subject, conditions.shop, longer(conditions).seconds, *options)
        return {**figures, "optimised": float("--optimize" in options)}

    return measure


def longer(conditions: Conditions) -> Conditions:
    """Conditions of a row whose batches take long."""
    return replace(conditions, seconds=LONGER * conditions.seconds)


def _goal(text: str, against: str) -> Goal:
    return Goal(f"rows a second, to {text}", "per_second", _SHARE, against=(against,))


def _row(key: str, title: str, what: str, subject: RealModel) -> Row:
    return Row(
        key,
        title,
        f"{what} as raw tensors of the Open Inference Protocol over REST, by wrk. The bare loops run the "
        f"same TorchScript file on the same tensors with {cores()} threads in all, as one loop or as one for "
        "each thread, whichever is faster, with the best batch size of 1, 2, 4, 8, 16 and 32, and with the "
        "server's settings of the allocator: one has the file as it is, the other optimises it as the server "
        "does where the archive says `torchscript: optimize_for_inference`. That it says (1 in the table) "
        "where the packer measures it to gain. The server, with the built-in handler tensor, has the batch "
        f"size that it was fastest with in tries of {TRY_S:g} s before the first round, as many executor "
        "threads as there were loops, and twice as many clients as rows fit into them. "
        f"Both run {LONGER} times as long as other phases, for what is on its way at the end does not count.",
        {
            "torchere": _served(subject),
            "bare loop": _bare(subject),
            _OPTIMISED: _bare(subject, "--optimize"),
        },
        _COLUMNS,
        (
            _goal("a bare loop over the model", "bare loop"),
            _goal("a bare loop over the model optimised", _OPTIMISED),
        ),
    )


def rows() -> list[Row]:
    """The rows of this module."""
    lite0 = "One picture of 3 x 224 x 224 float32 in, 1000 scores out,"
    minilm = (
        f"Ids and mask of {real_models.TOKENS} tokens, int64, in, an embedding of {real_models.WIDTH} out,"
    )
    return [
        _row("lite0_tensors", "EfficientNet-Lite0, tensors in and out", lite0, LITE0),
        _row("minilm_tensors", "all-MiniLM-L6-v2, tensors in and out", minilm, MINILM),
    ]
