"""The models and archives that are measured, made in a folder of the run's own."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

from harness.paths import ROOT
from torchere.archiver import ArchiveRequest, write_archive

FEATURES = 64  # of the tiny MLP: 4 layers of 64 x 64
WIDE = 1024  # of the MLP whose forward takes milliseconds: 8 layers of 1024 x 1024
LARGE = 2048  # of the 400 MB model: one square float32 layer has 16 MiB
LARGE_LAYERS = 24
_HANDLERS = ROOT / "benchmarks" / "handlers"
_RECORDED = ROOT / "tests" / "conformance" / "handlers" / "json_tensor.py"
MAX_BATCH = 32

# One text for torchere and TorchServe: the latter ignores the keys it does not know (isolation, dispatch).
_BATCHED = f"batchSize: {MAX_BATCH}\nmaxBatchDelay: 1\njobQueueSize: 1000\ndispatch: eager\n"
_SINGLE = "batchSize: 1\njobQueueSize: 1000\n"


@dataclass(frozen=True, slots=True)
class Workshop:
    """Makes what a row asks for, once, under `folder`; `store` holds the archives."""

    folder: Path

    @property
    def store(self) -> Path:
        """The model store."""
        store = self.folder / "store"
        store.mkdir(exist_ok=True)
        return store

    def mlp(self, width: int, layers: int) -> Path:
        """A TorchScript file: `layers` square linear layers with ReLU between them, seed 0."""
        path = self.folder / f"mlp_{layers}x{width}.pt"
        if not path.exists():
            _save_mlp(path, width, layers)
        return path

    def archive(self, name: str) -> str:
        """Pack one of `_ARCHIVES` if it is not in the store; returns its file name there."""
        if not (self.store / f"{name}.mar").exists():
            packing = _ARCHIVES[name]
            config = self.folder / f"{name}.yaml"
            config.write_text(packing.config, encoding="utf-8")
            write_archive(
                ArchiveRequest(
                    model_name=name,
                    version="1.0",
                    handler=packing.handler,
                    serialized_file=self.mlp(packing.width, packing.layers) if packing.layers else None,
                    export_path=self.store,
                    config_file=config,
                )
            )
        return f"{name}.mar"


@dataclass(frozen=True, slots=True)
class _Packing:
    handler: str
    width: int
    layers: int
    config: str


_ARCHIVES = {
    "tiny": _Packing("base_handler", FEATURES, 4, _BATCHED),
    "custom": _Packing(str(_RECORDED), FEATURES, 4, _SINGLE + "isolation: process\n"),
    "rows": _Packing(str(_RECORDED), FEATURES, 4, _BATCHED + "isolation: thread\n"),
    "pid": _Packing(str(_HANDLERS / "pid_tensor.py"), FEATURES, 4, _SINGLE + "isolation: process\n"),
    "forward": _Packing(str(_HANDLERS / "forward_only.py"), WIDE, 8, _SINGLE + "isolation: thread\n"),
    "large": _Packing("base_handler", LARGE, LARGE_LAYERS, _SINGLE),
    "timed": _Packing(str(_HANDLERS / "timed_work.py"), 0, 0, "batchSize: 1\nisolation: process\n"),
}


def _save_mlp(path: Path, width: int, layers: int) -> None:
    import torch  # noqa: PLC0415  # seconds to import, so not before the arguments are known to be right

    torch.manual_seed(0)
    stack: list[torch.nn.Module] = []
    for _ in range(layers):
        stack += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch.jit works; what is archived today is made by it
        module = torch.jit.freeze(torch.jit.script(torch.nn.Sequential(*stack[:-1]).eval()))
        module.save(str(path))


def row(width: int) -> list[float]:
    """`width` floats of the usual look."""
    return [round((37 * number % 200) / 100 - 1, 4) for number in range(width)]


def plain_body(width: int = FEATURES) -> bytes:
    """`{"x": [floats]}`, as the custom handler, mosec and LitServe are asked."""
    return json.dumps({"x": row(width)}).encode()


def instances_body(width: int = FEATURES) -> bytes:
    """The same for the `json` envelope of the built-in handler."""
    return json.dumps({"instances": [row(width)]}).encode()


def v2_body(width: int = FEATURES) -> bytes:
    """The same in the Open Inference Protocol."""
    tensor = {"name": "x", "shape": [1, width], "datatype": "FP32", "data": row(width)}
    return json.dumps({"inputs": [tensor]}).encode()
