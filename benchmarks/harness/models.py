"""The models and archives that are measured, made in a folder of the run's own."""

from __future__ import annotations

import json
import struct
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.paths import ROOT
from harness.trees import CHECKOUT, Tree
from torchere.archiver import ArchiveRequest, write_archive
from torchere.archiver.signature import ANY, SIGNATURE_NAME, Signature, TensorSpec

if TYPE_CHECKING:
    import torch

FEATURES = 64  # of the tiny MLP: 4 layers of 64 x 64
ENVELOPE = "service_envelope=json\n"  # of config.properties, for what `instances_body` makes
WIDE, WIDE_LAYERS = 1024, 8  # of the MLP whose forward takes milliseconds: 8 layers of 1024 x 1024
COMPILED_ROWS = 32  # what forward_only.py makes for each request
LARGE = 2048  # of the 400 MB model: one square float32 layer has 16 MiB
LARGE_LAYERS = 24
TENSOR = 2**18  # of the identity: float32 elements of one row, 1 MiB
_HANDLERS = ROOT / "benchmarks" / "handlers"
_RECORDED = ROOT / "tests" / "conformance" / "handlers" / "json_tensor.py"
MAX_BATCH = 32

# One text for torchere and TorchServe: the latter ignores the keys it does not know (isolation, dispatch).
_BATCHED = f"batchSize: {MAX_BATCH}\nmaxBatchDelay: 1\njobQueueSize: 1000\ndispatch: eager\n"
_SINGLE = "batchSize: 1\njobQueueSize: 1000\n"


@dataclass(frozen=True, slots=True)
class Workshop:
    """Makes what a row asks for, once, under `folder`; `store` holds the archives.

    `tree` serves them. Shops of one folder are equal, so that two trees share what is made and tried once.
    """

    folder: Path
    tree: Tree = field(default=CHECKOUT, compare=False)

    @property
    def store(self) -> Path:
        """The model store."""
        store = self.folder / "store"
        store.mkdir(exist_ok=True)
        return store

    def mlp(self, width: int, layers: int, seed: int = 0) -> Path:
        """A TorchScript file: `layers` square linear layers with ReLU between them."""
        path = self.folder / f"mlp_{layers}x{width}_{seed}.pt"
        if not path.exists():
            _save_mlp(path, width, layers, seed)
        return path

    def compiled_mlp(self, width: int, layers: int) -> Path:
        """The same as a `.pt2` package for this machine, for batches of `COMPILED_ROWS`; needs g++."""
        path = self.folder / f"mlp_{layers}x{width}.pt2"
        if not path.exists():
            _compile_mlp(path, width, layers)
        return path

    def exported_mlp(self, width: int, layers: int) -> Path:
        """The same as an exported program, for batches of one."""
        path = self.folder / f"exported_{layers}x{width}.pt2"
        if not path.exists():
            _export_mlp(path, width, layers)
        return path

    def archive(self, name: str) -> str:
        """Pack one of `_ARCHIVES` if it is not in the store; returns its file name there."""
        if not (self.store / f"{name}.mar").exists():
            packing = _ARCHIVES[name]
            make = self.compiled_mlp if packing.compiled else self.mlp
            file = make(packing.width, packing.layers) if packing.width else None
            signed = packing.width if packing.signed else 0
            self.pack(name, file, packing.config, handler=packing.handler, signed=signed)
        return f"{name}.mar"

    def pack(self, name: str, file: Path | None, config: str, *, handler: str = "", signed: int = 0) -> str:
        """Pack a model file with the text of its model-config.yaml; returns the archive's name in the store.

        `signed` is the width in its signature, 0 for none. The built-in handler is that for JSON without a
        signature, and that for tensors with one.
        """
        settings = self.folder / f"{name}.yaml"
        settings.write_text(config, encoding="utf-8")
        write_archive(
            ArchiveRequest(
                model_name=name,
                version="1.0",
                handler=handler or ("tensor" if signed else "base_handler"),
                serialized_file=file,
                extra_files=(self._signature(signed),) if signed else (),
                export_path=self.store,
                config_file=settings,
            )
        )
        return f"{name}.mar"

    def _signature(self, width: int) -> Path:
        """`signature.json` of a model with one input and one output of `width`."""
        folder = self.folder / f"signature_{width}"
        folder.mkdir(exist_ok=True)
        path = folder / SIGNATURE_NAME
        taken, given = (TensorSpec(name, "FP32", (ANY, width)) for name in "xy")
        path.write_text(Signature((taken,), (given,)).to_json(), encoding="utf-8")
        return path


@dataclass(frozen=True, slots=True)
class _Packing:
    handler: str
    width: int
    layers: int
    config: str
    compiled: bool = False
    signed: bool = False  # has a signature


_ARCHIVES = {
    "tiny": _Packing("base_handler", FEATURES, 4, _BATCHED),
    "single": _Packing("base_handler", FEATURES, 4, _SINGLE),
    "custom": _Packing(str(_RECORDED), FEATURES, 4, _SINGLE + "isolation: process\n"),
    "rows": _Packing(str(_RECORDED), FEATURES, 4, _BATCHED + "isolation: thread\n"),
    "pid": _Packing(str(_HANDLERS / "pid_tensor.py"), FEATURES, 4, _SINGLE + "isolation: process\n"),
    "forward": _Packing(str(_HANDLERS / "forward_only.py"), WIDE, 8, _SINGLE + "isolation: thread\n"),
    "forward_pt2": _Packing(
        str(_HANDLERS / "forward_only.py"), WIDE, 8, _SINGLE + "isolation: thread\n", compiled=True
    ),
    "large": _Packing("base_handler", LARGE, LARGE_LAYERS, _SINGLE),
    "identity": _Packing("tensor", TENSOR, 0, _BATCHED, signed=True),
    "tiny_tensor": _Packing("tensor", FEATURES, 4, _BATCHED, signed=True),
    "parts": _Packing(str(_HANDLERS / "parts.py"), 0, 0, _SINGLE + "isolation: process\n"),
    "timed": _Packing(str(_HANDLERS / "timed_work.py"), 0, 0, "batchSize: 1\nisolation: process\n"),
}


def _save_mlp(path: Path, width: int, layers: int, seed: int) -> None:
    import torch  # noqa: PLC0415  # seconds to import, so not before the arguments are known to be right

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch.jit works; what is archived today is made by it
        module = torch.jit.freeze(torch.jit.script(_mlp_module(width, layers, seed)))
        module.save(str(path))


def _compile_mlp(path: Path, width: int, layers: int) -> None:
    import torch  # noqa: PLC0415  # as above
    import torch._inductor  # noqa: PLC0415  # as above

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the compiler writes the number into its loops
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch's compiler, about itself
            program = torch.export.export(_mlp_module(width, layers), (torch.zeros(COMPILED_ROWS, width),))
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    finally:
        torch.set_num_threads(threads)


def _export_mlp(path: Path, width: int, layers: int) -> None:
    import torch  # noqa: PLC0415  # as above

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's compiler, about itself
        torch.export.save(torch.export.export(_mlp_module(width, layers), (torch.zeros(1, width),)), path)


def _mlp_module(width: int, layers: int, seed: int = 0) -> torch.nn.Module:
    import torch  # noqa: PLC0415  # as above

    torch.manual_seed(seed)
    stack: list[torch.nn.Module] = []
    for _ in range(layers):
        stack += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*stack[:-1]).eval()


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


def v2_binary(width: int) -> tuple[bytes, dict[str, str]]:
    """The same as raw bytes, which the answer is asked for as, too; body and headers."""
    tensor = {"name": "x", "shape": [1, width], "datatype": "FP32"}
    head = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": 4 * width}}],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    return text + raw_row(width), {"Inference-Header-Content-Length": str(len(text))}


def raw_row(width: int) -> bytes:
    """`row` as little-endian float32."""
    return struct.pack(f"<{width}f", *row(width))
