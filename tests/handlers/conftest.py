"""Archives as directories, contexts around them, tiny models and a photograph, all made on the spot."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchere.handlers.archive_import import forget_archive
from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.metrics import MetricsCache

CONFORMANCE_HANDLERS = Path(__file__).parents[1] / "conformance" / "handlers"

MakeContext = Callable[..., Context]


class Doubler(torch.nn.Module):
    """Doubles its input: a model whose answers are plain to see."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class TinyClassifier(torch.nn.Module):
    """Scores 7 classes for [batch, 3, height, width]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(3, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


@pytest.fixture
def write_archive(tmp_path: Path) -> Callable[..., Path]:
    """Writes files (text is dedented) into a new directory, as an unpacked archive."""

    def write(files: dict[str, str | bytes]) -> Path:
        directory = tmp_path / f"archive-{uuid.uuid4().hex[:8]}"
        directory.mkdir()
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else textwrap.dedent(content).encode())
        return directory

    return write


@pytest.fixture
def make_context() -> Iterator[MakeContext]:
    """Makes contexts; the modules their archives imported are forgotten after the test."""
    made: list[Path] = []

    def make(
        model_dir: Path,
        *,
        model: dict[str, Any] | None = None,
        name: str = "m",
        version: str = "1.0",
        config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Context:
        made.append(model_dir)
        manifest = {"model": {"modelName": name, "modelVersion": version, **(model or {})}}
        kwargs.setdefault("metrics", MetricsCache(name))
        return Context(
            model_name=name,
            model_dir=str(model_dir),
            manifest=manifest,
            gpu=None,
            batch_size=1,
            mms_version="0.12.0",
            model_yaml_config=config,
            **kwargs,
        )

    yield make
    for directory in made:
        forget_archive(str(directory))


def begin(context: Context, count: int = 1, **headers: str) -> list[tuple[int, bytes]]:
    """Start a batch of `count` requests; returns the list that partial answers will be put in."""
    partials: list[tuple[int, bytes]] = []
    requests = [RequestProcessor(headers, f"request-{index}") for index in range(count)]
    context.begin_batch(requests, lambda index, chunk: partials.append((index, chunk)))
    return partials


@pytest.fixture(name="begin")
def begin_fixture() -> Callable[..., list[tuple[int, bytes]]]:
    return begin


@pytest.fixture
def conformance_handlers() -> Path:
    return CONFORMANCE_HANDLERS


def script(module: torch.nn.Module) -> bytes:
    """The module as a TorchScript file."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module.eval()), buffer)
    return buffer.getvalue()


@pytest.fixture
def scripted_doubler(tmp_path: Path) -> Path:
    """An archive with a TorchScript model that doubles its input."""
    directory = tmp_path / "doubler"
    directory.mkdir()
    (directory / "doubler.pt").write_bytes(script(Doubler()))
    return directory


# The compiler's options are those of the archiver: each other set would compile torch's headers once more.
PROBE_SCRIPT = """
import sys, torch
from torchere.archiver.models.convert import aotinductor

class Probe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, x, count, *, scale):
        y = x
        for _ in range(4):
            y = torch.relu(y @ self.weight)
        return {"y": y * scale, "pair": (count + 1, x.sum(dim=1))}

batch = torch.export.Dim("batch", min=1, max=100000)
program = torch.export.export(
    Probe().eval(), (torch.randn(2, 256), torch.tensor([3])), {"scale": torch.tensor(2.0)},
    dynamic_shapes={"x": {0: batch}, "count": None, "scale": None},
)
torch.export.save(program, sys.argv[1] + "/probe.exported.pt2")
options = aotinductor._settings(None, freezing=False)
torch._inductor.aoti_compile_and_package(
    program, package_path=sys.argv[1] + "/probe.pt2", inductor_configs=options
)
"""


@pytest.fixture(scope="session")
def probe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `probe.pt2`, compiled, and `probe.exported.pt2`, the same as an exported program.

    `forward(x [batch, 256], count [1] int64, *, scale [])` gives `{"y": [batch, 256], "pair": (count + 1, the
    sums of the rows)}`. Compiled in another process, because torch's compiler warns of its own code.
    """
    if shutil.which("g++") is None:
        pytest.skip("compiling a model ahead of time needs g++")
    directory = tmp_path_factory.mktemp("probe")
    subprocess.run([sys.executable, "-c", PROBE_SCRIPT, str(directory)], check=True, capture_output=True)
    return directory


@pytest.fixture
def probe_archive(probe_dir: Path, tmp_path: Path) -> Path:
    """A copy of it, to add to."""
    return Path(shutil.copytree(probe_dir, tmp_path / "probe"))


@pytest.fixture
def classifier_archive(tmp_path: Path) -> Path:
    """An archive with a TorchScript image classifier of 7 named classes."""
    directory = tmp_path / "classifier"
    directory.mkdir()
    (directory / "classifier.pt").write_bytes(script(TinyClassifier()))
    names = {str(index): f"class-{index}" for index in range(7)}
    (directory / "index_to_name.json").write_text(json.dumps(names))
    return directory


@pytest.fixture(scope="session")
def photo() -> Image.Image:
    """A picture with colour gradients and edges, 320 x 213."""
    across, down = np.meshgrid(np.arange(320), np.arange(213))
    pixels = np.stack(
        [across * 255 // 320, down * 255 // 213, (across // 16 + down // 16) % 2 * 200], axis=-1
    )
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="session")
def jpeg(photo: Image.Image) -> bytes:
    """The photograph as a JPEG file."""
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", quality=92)
    return buffer.getvalue()
