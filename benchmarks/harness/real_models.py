"""Real models for the rows that compare with a bare loop: EfficientNet-Lite0 and MiniLM, files and archives.

EfficientNet-Lite0 is the fp32 archive of the demo; MiniLM's weights come from a package, in an environment of
their own (see `environments.py`).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import Unavailable
from harness.models import Workshop
from harness.paths import ROOT
from torchere.archiver import ArchiveRequest, open_archive, write_archive
from torchere.archiver.models.convert.files import config_with
from torchere.archiver.signature import ANY, SIGNATURE_NAME, Signature, TensorSpec
from torchere.archiver.torchscript_options import TorchScriptOptions

if TYPE_CHECKING:
    import torch

CLASSES, SIDE = 1000, 224  # of EfficientNet-Lite0
TOKENS, WIDTH = 32, 384  # of a text for MiniLM; of its embedding
_DEMO = ROOT / ".demo" / "store" / "efficientnet_lite0-1.0.mar"
_EXAMPLE = ROOT / "examples" / "image_classifier"
_TEXT = "The server keeps a request in its queue until an executor is free, and answers it in the same order."

LITE0 = Signature(
    (TensorSpec("input", "FP32", (ANY, 3, SIDE, SIDE)),), (TensorSpec("scores", "FP32", (ANY, CLASSES)),)
)
MINILM = Signature(
    (TensorSpec("ids", "INT64", (ANY, TOKENS)), TensorSpec("mask", "INT64", (ANY, TOKENS))),
    (TensorSpec("embedding", "FP32", (ANY, WIDTH)),),
)


def lite0_archive(shop: Workshop) -> str:
    """The demo's own archive, which takes pictures; returns its name in the store."""
    if not _DEMO.exists():
        if not (_EXAMPLE / "models.py").exists():
            raise Unavailable(f"{_EXAMPLE} is not there")
        build = [sys.executable, "-m", "examples.image_classifier.models"]
        done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode or not _DEMO.exists():
            raise Unavailable(f"the demo's archive could not be built: {done.stderr.strip()[-300:]}")
    shutil.copy(_DEMO, shop.store / "lite0.mar")
    return "lite0"


def lite0_file(shop: Workshop) -> Path:
    """The TorchScript file in it."""
    lite0_archive(shop)
    unpacked = shop.folder / "lite0"
    if not unpacked.exists():
        open_archive(shop.store / "lite0.mar").extract(unpacked)
    return next(unpacked.glob("*.pt"))


def minilm_file(shop: Workshop) -> Path:
    """MiniLM with pooling as TorchScript, for any number of texts."""
    path = shop.folder / "minilm.pt"
    if path.exists():
        return path
    import torch  # noqa: PLC0415  # seconds to import
    from quantised.minilm import pretrained  # noqa: PLC0415  # as above

    model, _ = pretrained()
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # torch.jit works, and the other archives hold it
        traced = torch.jit.trace(model, minilm_inputs_of(2))
        torch.jit.freeze(traced).save(str(path))
    return path


def minilm_inputs_of(texts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of `texts` times the same sentence, int64 [texts, TOKENS]."""
    from quantised.minilm import pretrained, tokens  # noqa: PLC0415  # imports torch

    _, words = pretrained()
    ids, mask = tokens(_TEXT, words, TOKENS)
    return ids.repeat(texts, 1), mask.repeat(texts, 1)


def tensor_archive(
    shop: Workshop, name: str, file: Path, signature: Signature, config: str, *, load: TorchScriptOptions
) -> str:
    """Pack a file for the handler `tensor`, in place of what was; returns the archive's name in the store.

    Its model-config.yaml is `config`, and says how the file is to be loaded.
    """
    folder = shop.folder / f"{name}_tensors"
    folder.mkdir(exist_ok=True)
    (folder / SIGNATURE_NAME).write_text(signature.to_json(), encoding="utf-8")
    config_file = folder / "model-config.yaml"
    config_file.write_text(config, encoding="utf-8")
    (shop.store / f"{name}.mar").unlink(missing_ok=True)
    write_archive(
        ArchiveRequest(
            model_name=name,
            version="1.0",
            handler="tensor",
            serialized_file=file,
            extra_files=(folder / SIGNATURE_NAME,),
            export_path=shop.store,
            config_file=config_with(config_file, load, folder),
        )
    )
    return name
