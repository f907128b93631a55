"""The row of image classification: EfficientNet-Lite0, from the bytes of a picture to its labels."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from harness import servers
from harness.bare import bare_loop
from harness.errors import Failed, Unavailable
from harness.figures import Goal
from harness.models import Workshop
from harness.processes import Probe
from harness.real_models import SIDE, lite0_archive, lite0_file
from harness.rows import Conditions, Figures, Measure, Row
from harness.rows_models import LONGER, TRY_S, Plan, cores, longer, rates_of
from harness.tries import fastest, tries_of
from torchere.archiver import open_archive

_BATCHES = (8, 16)  # of the server: what bare loops with one thread each are the fastest with
_SHARE = 0.95  # of a bare loop
_SENT = 256  # pixels of a side of the picture that is sent
_DECODING, _FORWARD = "bare loop, JPEG", "bare loop, tensors"
_OPTIMIZED = ", optimised"


def _picture() -> bytes:
    """A square photograph as JPEG."""
    try:
        from PIL import Image  # noqa: PLC0415  # needed by this row only, as is the next
        from skimage.data import data_dir  # noqa: PLC0415
    except ImportError as err:
        raise Unavailable(f"{err}; the photograph comes with pip install -e '.[demo]'") from err
    buffer = io.BytesIO()
    Image.open(Path(data_dir, "chelsea.png")).resize((_SENT, _SENT)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _torchere(conditions: Conditions) -> Figures:
    plan = _plan(conditions.shop)
    return {**_rates(plan, longer(conditions)), "batch": float(plan.batch), "loops": float(plan.executors)}


@cache
def _plan(shop: Workshop) -> Plan:
    """What the server was fastest with, tried once a run."""
    plans = [Plan(batch, cores()) for batch in _BATCHES]
    return fastest(tries_of(plans, lambda plan: _rates(plan, Conditions(shop, TRY_S))["per_second"]))


def _rates(plan: Plan, conditions: Conditions) -> Figures:
    archive = lite0_archive(conditions.shop)
    config = open_archive(conditions.shop.store / f"{archive}.mar").read_text("model-config.yaml")
    if "optimize_for_inference: true" not in config:
        raise Failed("the demo's archive was packed without optimize_for_inference; build it again")
    probe = Probe(f"/predictions/{archive}", _picture(), b"tabby", "image/jpeg")
    settings = {"marName": f"{archive}.mar", "batchSize": plan.batch, "maxBatchDelay": 5}
    models = json.dumps({archive: {"1.0": settings}})
    server = servers.torchere(conditions.shop, archive, plan.executors, f"models={models}\n")
    return rates_of(server, probe, plan, conditions)


def _bare(make: Callable[[Conditions], Path], *options: str) -> Measure:
    def measure(conditions: Conditions) -> Figures:
        file = lite0_file(conditions.shop)
        return bare_loop(file, [make(conditions)], longer(conditions).seconds, cores(), *options)

    return measure


def _jpeg(conditions: Conditions) -> Path:
    picture = conditions.shop.folder / "picture.jpg"
    picture.write_bytes(_picture())
    return picture


def _tensor(conditions: Conditions) -> Path:
    tensor = conditions.shop.folder / "picture.npy"
    np.save(tensor, np.full((1, 3, SIDE, SIDE), 0.5, np.float32))
    return tensor


def _goal(text: str, share: float | None, against: str) -> Goal:
    return Goal(f"pictures a second, to a bare loop {text}", "per_second", share, against=(against,))


def rows() -> list[Row]:
    """The rows of this module."""
    return [
        Row(
            "image",
            "Image classification, EfficientNet-Lite0",
            f"The demo's fp32 archive (built-in image_classifier, {cores()} threads): a JPEG of {_SENT} x "
            f"{_SENT} pixels in, five labels out. The server has the batch size of "
            f"{' and '.join(map(str, _BATCHES))} that it was faster with in tries of {TRY_S:g} s before "
            "the first round, and twice as many clients as pictures fit into the executors. One bare loop "
            "decodes, cuts and normalises the same JPEG for every run, as the handler does; the other runs "
            "forward only, on tensors that are there already. Each takes the best batch size of 1, 2, 4, 8, "
            "16 and 32, and the better of one loop on all cores and one loop a core, with the server's "
            "settings of the allocator. The archive says `torchscript: optimize_for_inference`, which the "
            "packer measured to gain: the server optimises the file while it loads it. The bare loops run it "
            "as it is, and optimised in the same way. All run "
            f"{LONGER} times as long as other phases, for what is on its way at the end does not count.",
            {
                "torchere": _torchere,
                _DECODING: _bare(_jpeg),
                _FORWARD: _bare(_tensor),
                _DECODING + _OPTIMIZED: _bare(_jpeg, "--optimize"),
                _FORWARD + _OPTIMIZED: _bare(_tensor, "--optimize"),
            },
            {"per_second": "pictures/s", "p50_ms": "p50 ms", "batch": "batch", "loops": "loops"},
            (
                _goal("that decodes them, too", _SHARE, _DECODING),
                _goal("over the model alone", _SHARE, _FORWARD),
                _goal("that decodes them, too, and has the model optimised", _SHARE, _DECODING + _OPTIMIZED),
                _goal("over the optimised model alone", None, _FORWARD + _OPTIMIZED),
            ),
        )
    ]
