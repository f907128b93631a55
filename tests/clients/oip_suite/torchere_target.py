"""torchere with the models of the suite, packed here."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from oip_suite.models import TORCH, WIDTH
from oip_suite.target import Target, free_ports, running
from torchere.archiver import ArchiveRequest, write_archive

HANDLERS = Path(__file__).parent / "handlers"
# A stream sends the next request of a sequence before the last one is answered; TorchServe's default is 1.
_SEQUENCES = """isolation: process
sequenceBatching: true
sequenceMaxIdleMSec: 60000
maxNumSequence: 8
maxSequenceJobQueueSize: 16
"""
DIFFERS = frozenset({"first version is the default"})


class Identity(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Plus(torch.nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


class Two(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Colours(torch.nn.Module):
    """Scores as many classes as there are colours by how much of each is in the picture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=[2, 3])


class Words(torch.nn.Module):
    """Scores 2 classes by the number of tokens."""

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        count = torch.tensor(float(len(tokens) * len(offsets)))
        return torch.stack([count, count - 1.0])[None]


@contextmanager
def serving(folder: Path) -> Iterator[Target]:
    """The server, started as users start it, in `folder`."""
    store = folder / "store"
    store.mkdir()
    loaded = _pack_all(folder, store)
    ports = free_ports(4)
    (folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{ports[0]}\n"
        f"management_address=http://127.0.0.1:{ports[1]}\n"
        f"grpc_inference_port={ports[2]}\n"
        f"grpc_management_port={ports[3]}\n"
        "enable_metrics_api=false\n"
        "default_workers_per_model=1\n"
        "enable_model_api=true\n"
        "ts_open_inference_protocol=true\n"
    )
    command = [
        *(sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--disable-token-auth"),
        *("--model-store", str(store), "--ts-config", "config.properties", "--models", *loaded),
    ]
    with running(command, folder, said="Model server started.", http=f"127.0.0.1:{ports[0]}"):
        http, management, grpc, _ = (f"127.0.0.1:{port}" for port in ports)
        yield Target("torchere", http, grpc, management, DIFFERS)


def _pack_all(folder: Path, store: Path) -> list[str]:
    packer = _Packer(folder, store)
    for datatype in TORCH:
        packer.model(f"identity_{datatype}", Identity(), ["x"], ["y"], datatype)
    packer.model("identity_process", Identity(), ["x"], ["y"], config="isolation: process\n")
    packer.model("two", Two(), ["a", "b"], ["sum", "difference"])
    for version in (1, 2):
        packer.model("versioned", Plus(version), ["x"], ["y"], width=1, version=str(version))
    for isolation in ("thread", "process"):
        packer.handler(f"echo_{isolation}", "echo.py", f"isolation: {isolation}\n")
    packer.handler("failing", "failing.py", "isolation: thread\n")
    packer.handler("streaming", "streaming.py", "isolation: thread\n")
    packer.handler("summing", "summing.py", _SEQUENCES)
    packer.built_in("picture", "image_classifier", Colours(), ["red", "green", "blue"])
    packer.built_in("words", "text_classifier", Words(), ["praise", "blame"], {"good": 0})
    loaded = list(packer.packed)
    packer.model("spare", Identity(), ["x"], ["y"])
    return loaded


class _Packer:
    """Writes archives into a store; `packed` has the arguments of `--models`."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.packed: list[str] = []
        self._folder = folder
        self._store = store

    def model(
        self,
        name: str,
        module: torch.nn.Module,
        inputs: Sequence[str],
        outputs: Sequence[str],
        datatype: str = "FP32",
        *,
        width: int = WIDTH,
        version: str = "1",
        config: str = "",
    ) -> None:
        """A TorchScript model with a signature and no handler of its own."""
        place = self._folder / f"{name}_{version}"
        place.mkdir()
        tensors = {
            side: [{"name": one, "datatype": datatype, "shape": [-1, width]} for one in names]
            for side, names in (("inputs", inputs), ("outputs", outputs))
        }
        (place / "signature.json").write_text(json.dumps({"version": 1, **tensors}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.script(module).save(str(place / "model.pt"))
        with_model = ArchiveRequest(
            model_name=name,
            version=version,
            handler="tensor",
            serialized_file=place / "model.pt",
            extra_files=(place / "signature.json",),
        )
        self._write(with_model, config, place)

    def built_in(
        self,
        name: str,
        handler: str,
        module: torch.nn.Module,
        labels: Sequence[str],
        vocabulary: dict[str, int] | None = None,
    ) -> None:
        """A TorchScript model under a handler of torchere's, with no signature."""
        place = self._folder / name
        place.mkdir()
        extra = [place / "index_to_name.json"]
        extra[0].write_text(json.dumps({str(index): label for index, label in enumerate(labels)}))
        if vocabulary is not None:
            extra.append(place / "source_vocab.pt")
            torch.save(vocabulary, extra[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.script(module).save(str(place / "model.pt"))
        request = ArchiveRequest(
            model_name=name,
            version="1",
            handler=handler,
            serialized_file=place / "model.pt",
            extra_files=tuple(extra),
        )
        self._write(request, "", place)

    def handler(self, name: str, file: str, config: str) -> None:
        """An archive of one Python file."""
        place = self._folder / name
        place.mkdir()
        self._write(ArchiveRequest(model_name=name, version="1", handler=str(HANDLERS / file)), config, place)

    def _write(self, request: ArchiveRequest, config: str, place: Path) -> None:
        settings = place / "model-config.yaml"
        settings.write_text(config or "{}\n")
        suffix = "" if request.version == "1" else f"_{request.version}"
        output = self._store / f"{request.model_name}{suffix}.mar"
        write_archive(replace(request, config_file=settings, export_path=self._store, output=output))
        self.packed.append(f"{request.model_name}={output.name}")
