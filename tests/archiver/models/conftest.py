"""Small models in every form a user may have one, made once; packing and serving them in this process."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from torchere.archiver import open_archive
from torchere.archiver.commands import pack_model
from torchere.archiver.models.convert.torchscript import forget_stale_operators
from torchere.archiver.models.measure import cost
from torchere.archiver.request import ArchiveRequest, BuildOptions
from torchere.archiver.writer import Progress
from torchere.handlers.archive_import import forget_archive
from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.metrics import MetricsCache
from torchere.handlers.tensor_handler import TensorHandler

NET = """\
import torch
from torch.distributed import checkpoint


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(8, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.two = torch.nn.Linear(16, 3)

    def forward(self, features):
        hidden = self.norm(self.one(features)).relu()
        return {"scores": self.two(hidden).softmax(-1), "hidden": hidden}


def net():
    return Net()
"""
BOUNDS = "1:64"
ONNX = (  # y = relu(x) for FP32 x of [n, 8]
    b'\x08\x08\x12\x07by hand::\n\x0c\n\x01x\x12\x01y"\x04Relu'
    b"Z\x14\n\x01x\x12\x0f\n\r\x08\x01\x12\t\n\x03\x12\x01n\n\x02\x08\x08"
    b"b\x14\n\x01y\x12\x0f\n\r\x08\x01\x12\t\n\x03\x12\x01n\n\x02\x08\x08B\x04\n\x00\x10\x11"
)


@dataclass(frozen=True)
class Forms:
    """One model in every form; `folder` holds the files."""

    folder: Path
    module: torch.nn.Module
    rows: torch.Tensor  # FP32 [2, 8]

    def file(self, name: str) -> Path:
        return self.folder / name

    def answer(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            found: dict[str, torch.Tensor] = self.module(rows)
        return found


@pytest.fixture(scope="session")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forms]:
    """The model, and its files under names that do not tell what they are."""
    folder = tmp_path_factory.mktemp("forms")
    (folder / "net_module.py").write_text(NET)
    sys.path.insert(0, str(folder))
    import net_module  # type: ignore[import-not-found]

    forget_stale_operators()
    torch.manual_seed(0)
    module = net_module.Net()
    module(torch.rand(32, 8))  # gives the normalisation statistics of its own
    module.eval()
    made = Forms(folder, module, torch.rand(2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _write(made)
    yield made
    sys.path.remove(str(folder))
    sys.modules.pop("net_module", None)


def _write(made: Forms) -> None:
    module, file = made.module, made.file
    state = module.state_dict()
    np.save(file("example.npy"), made.rows.numpy())
    torch.save(state, file("state.weights"))
    torch.save(
        {"pytorch-lightning_version": "2.5", "state_dict": {f"model.{k}": v for k, v in state.items()}},
        file("lightning.weights"),
    )
    torch.save(module, file("whole.weights"))
    write_safetensors(file("numbers.weights"), state)
    save({"model": state, "step": 7}, checkpoint_id=file("sharded"))
    torch.jit.script(module).save(str(file("script.model")))
    free = ({0: torch.export.Dim("batch", min=1, max=64)},)
    file("relu.onnx").write_bytes(ONNX)
    torch.export.save(torch.export.export(module, (made.rows,), dynamic_shapes=free), file("exported.pt2"))
    file("exported.pt2").rename(file("program.model"))


def write_safetensors(path: Path, state: dict[str, torch.Tensor]) -> None:
    """The format by its description, so that what is read was not written by the reader."""
    names = {torch.float32: "F32", torch.int64: "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    numbers = b""
    for key, tensor in state.items():
        data = tensor.numpy().tobytes()
        header[key] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(numbers), len(numbers) + len(data)],
        }
        numbers += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


class Fours(torch.nn.Module):
    """Computes with four rows at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x.view(-1, 4, 8))
        return found.view(-1, 8)


@pytest.fixture
def fours() -> type[torch.nn.Module]:
    """The class of a model whose batch is a multiple of four."""
    return Fours


@pytest.fixture
def measured_memory() -> None:
    """The memory of models is measured where they are packed."""


@pytest.fixture(autouse=True)
def memory_is_not_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack without measuring the memory, but for `measured_memory`: its process imports torch each time."""
    if "measured_memory" not in request.fixturenames:
        monkeypatch.setattr("torchere.archiver.models.build.with_memory", lambda report, *_: report)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time models in 40 rounds at most: 400 take up to 3 s of processor time where a model is packed."""
    monkeypatch.setattr(cost, "_MOST", 40)


@pytest.fixture(autouse=True)
def no_stale_operators() -> None:
    """Let tests call torch's compiler, which fails by chance after the imports of others."""
    forget_stale_operators()


Pack = Callable[..., Path]


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Packs a model by these options and gives the archive's path."""

    def make(handler: str = "tensor", **options: Any) -> Path:
        request = ArchiveRequest(
            model_name="net", version="1.0", handler=handler, export_path=tmp_path, force=True
        )
        given = BuildOptions(**{"verify": False, **options})
        return pack_model(request, given, Progress(None), lambda _text: None)

    return make


Serve = Callable[..., list[Any]]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Unpacks an archive, loads it by the `tensor` handler, and gives the answers to a batch of rows."""
    made: list[Path] = []

    def answers(archive: Path, rows: list[dict[str, Any]]) -> list[Any]:
        opened = open_archive(archive)
        folder = opened.extract(tmp_path / f"unpacked-{len(made)}")
        made.append(folder)
        context = Context(
            model_name=folder.name,
            model_dir=str(folder),
            manifest=json.loads(opened.manifest.dump()),
            gpu=None,
            batch_size=len(rows),
            mms_version="0.12.0",
            metrics=MetricsCache("net"),
        )
        handler = TensorHandler()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handler.initialize(context)
        context.begin_batch(
            [RequestProcessor({}, str(index)) for index in range(len(rows))], lambda index, chunk: None
        )
        found: list[Any] = handler.handle(rows, context)
        return found

    yield answers
    for folder in made:
        forget_archive(str(folder))
