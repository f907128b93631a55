"""The row of a real model: EfficientNet-Lite0 of the demo, from the bytes of a picture to its label."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness import servers
from harness.errors import Failed, Unavailable
from harness.figures import Goal
from harness.models import Workshop
from harness.paths import ROOT, SCRIPTS
from harness.processes import Probe
from harness.rows import Conditions, Figures, Row
from harness.rows_http import closed_loop
from torchere.archiver import open_archive

_EXAMPLE = ROOT / "examples" / "image_classifier"
_ARCHIVE = ROOT / ".demo" / "store" / "efficientnet_lite0-1.0.mar"
_CLIENTS = 8
_SIDE = 256  # pixels of the picture that is sent


def _archive(shop: Workshop) -> Path:
    """The demo's fp32 archive in the store of the run."""
    if not _ARCHIVE.exists():
        if not (_EXAMPLE / "models.py").exists():
            raise Unavailable(f"{_EXAMPLE} is not there")
        build = [sys.executable, "-m", "examples.image_classifier.models"]
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode or not _ARCHIVE.exists():
            raise Unavailable(f"the demo's archive could not be built: {done.stderr.strip()[-300:]}")
    return Path(shutil.copy(_ARCHIVE, shop.store / "lite0.mar"))


def _picture() -> bytes:
    """A square photograph as JPEG."""
    try:
        from PIL import Image  # noqa: PLC0415  # needed by this row only, as is the next
        from skimage.data import data_dir  # noqa: PLC0415
    except ImportError as err:
        raise Unavailable(f"{err}; the photograph comes with pip install -e '.[demo]'") from err
    buffer = io.BytesIO()
    Image.open(Path(data_dir, "chelsea.png")).resize((_SIDE, _SIDE)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _torchere(conditions: Conditions) -> Figures:
    _archive(conditions.shop)
    probe = Probe("/predictions/lite0", _picture(), b"tabby", "image/jpeg")
    server = servers.torchere(conditions.shop, "lite0", 2)
    figures = closed_loop(server, probe, conditions, (_CLIENTS,))
    return {"pictures_per_s": figures[f"rps_{_CLIENTS}"], "p50_ms": figures[f"p50_{_CLIENTS}_ms"]}


def _bare(conditions: Conditions) -> Figures:
    file = _archive(conditions.shop)
    unpacked = conditions.shop.folder / "lite0"
    if not unpacked.exists():
        open_archive(file).extract(unpacked)
    model = next(unpacked.glob("*.pt"))
    cores = str(len(os.sched_getaffinity(0)))
    command = [sys.executable, str(SCRIPTS / "bare_loop.py"), str(model), str(conditions.seconds), cores]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"the bare loop failed: {done.stderr.strip()[-300:]}")
    by_batch = {int(batch): rate for batch, rate in json.loads(done.stdout).items()}
    return {"pictures_per_s": max(by_batch.values()), "batch": max(by_batch, key=lambda b: by_batch[b])}


def rows() -> list[Row]:
    """The rows of this module."""
    return [
        Row(
            "image",
            "Image classification, EfficientNet-Lite0",
            f"The demo's fp32 archive (built-in image_classifier, 2 threads): a JPEG of {_SIDE} x {_SIDE} "
            f"pixels in, five labels out, {_CLIENTS} clients. The bare loop runs forward only, on tensors "
            "that are there already, with every batch size up to 16 and the better of one loop on all "
            "cores and one loop a core.",
            {"torchere": _torchere, "bare loop": _bare},
            {"pictures_per_s": "pictures/s", "p50_ms": "p50 ms", "batch": "best batch"},
            (
                Goal(
                    "pictures a second, to a bare loop over the model",
                    "pictures_per_s",
                    0.95,
                    against=("bare loop",),
                ),
            ),
        )
    ]
