"""Archives as TorchServe's users write them, and one real server for all of them."""

import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from PIL import Image

from torchere.serving.frontend.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest

HANDLERS = Path(__file__).parent


class Line(torch.nn.Module):
    """y = 2x + 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x + 1


class Colours(torch.nn.Module):
    """A class for each colour: its mean."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3))


class Masks(torch.nn.Module):
    """Class 1 everywhere, by far."""

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        first = images[:, :1] * 0
        return {"out": torch.cat([first, first + 50.0], dim=1)}


class Boxes(torch.nn.Module):
    """One sure and one unsure detection in each picture."""

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        found: list[dict[str, torch.Tensor]] = []
        for _ in range(images.shape[0]):
            boxes = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 1.0, 1.0]])
            found.append(
                {"boxes": boxes, "labels": torch.tensor([1, 0]), "scores": torch.tensor([0.75, 0.25])}
            )
        return found


class Topics(torch.nn.Module):
    """Words 0 and 1 speak for the first topic, all others for the second."""

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        first = (words < 2).sum() * 10.0
        return torch.stack([first, words.numel() * 10.0 - first])[None]


def scripted(model: torch.nn.Module) -> bytes:
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.jit.save(torch.jit.script(model), buffer)
    return buffer.getvalue()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def digit_weights() -> bytes:
    """A state dict for the class in the archive, as its training script would write it."""
    spec = importlib.util.spec_from_file_location("mnist_training", HANDLERS / "digits" / "mnist.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weights = module.Net().state_dict()
    weights["fc.bias"][7] = 1000.0
    return saved(weights)


LABELS = '{"0": "red", "1": "green", "2": "blue"}'
VOCABULARY = saved({"it": 0, "is": 1, "ball": 2, "goal": 3, "it is": 4, "is ball": 5, "ball goal": 6})
TOPICS = {"topics.pt": scripted(Topics()), "source_vocab.pt": VOCABULARY}
TOPIC_LABELS = {"index_to_name.json": '{"0": "grammar", "1": "sport"}'}
YAML = {"configFile": "model-config.yaml"}

# Folder (None: no files of its own), generated files, members of the manifest.
ARCHIVES: dict[str, tuple[str | None, dict[str, Any], dict[str, str]]] = {
    "class_form": ("class_form", {}, {"handler": "handler.py"}),
    "function_form": ("function_form", {}, {"handler": "service.py:answer"}),
    "json_tensor": (
        "json_tensor",
        {"line.pt": scripted(Line())},
        {"handler": "json_handler.py", "serializedFile": "line.pt", **YAML},
    ),
    "digits": (
        "digits",
        {"mnist_cnn.pt": digit_weights()},
        {"handler": "mnist_handler.py", "modelFile": "mnist.py", "serializedFile": "mnist_cnn.pt"},
    ),
    "colours": (
        None,
        {"colours.pt": scripted(Colours()), "index_to_name.json": LABELS},
        {"handler": "image_classifier", "serializedFile": "colours.pt"},
    ),
    "line": (None, {"line.pt": scripted(Line())}, {"handler": "base_handler", "serializedFile": "line.pt"}),
    "segments": (
        None,
        {"masks.pt": scripted(Masks())},
        {"handler": "image_segmenter", "serializedFile": "masks.pt"},
    ),
    "boxes": (
        None,
        {"boxes.pt": scripted(Boxes()), "index_to_name.json": LABELS},
        {"handler": "object_detector", "serializedFile": "boxes.pt"},
    ),
    "texts": (
        None,
        {**TOPICS, **TOPIC_LABELS},
        {"handler": "text_classifier", "serializedFile": "topics.pt"},
    ),
    "topics": (
        "topics",
        {**TOPICS, **TOPIC_LABELS},
        {"handler": "topic_handler.py", "serializedFile": "topics.pt"},
    ),
    "streaming": ("streaming", {}, {"handler": "stream_handler.py"}),
    "micro_batching": ("micro_batching", {}, {"handler": "micro_handler.py", **YAML}),
    "custom_metrics": ("custom_metrics", {}, {"handler": "metrics_handler"}),
    "explaining": (
        "explaining",
        {"line.pt": scripted(Line())},
        {"handler": "explain_handler.py", "serializedFile": "line.pt"},
    ),
    "extras": ("extras", {}, {"handler": "main_handler.py"}),
    "refusing": ("refusing", {}, {"handler": "refusing_handler.py"}),
    "per_item": ("per_item", {}, {"handler": "per_item_handler.py", **YAML}),
    "asynchronous": ("asynchronous", {}, {"handler": "async_handler.py"}),
    "shadowing": ("shadowing", {}, {"handler": "shadow_handler.py:handle"}),
    "twin_a": ("twin_a", {}, {"handler": "handler.py"}),
    "twin_b": ("twin_b", {}, {"handler": "handler.py"}),
    "base64_images": ("base64_images", {}, {"handler": "b64_handler.py"}),
}


@pytest.fixture(scope="session")
def archives() -> dict[str, Any]:
    """What `ARCHIVES` holds."""
    return ARCHIVES


@pytest.fixture(scope="session")
def picture() -> Any:
    """`picture(colour, size)`: the bytes of a PNG of one colour."""

    def paint(colour: str, size: tuple[int, int] = (256, 256)) -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", size, colour).save(buffer, "PNG")
        return buffer.getvalue()

    return paint


@pytest.fixture(scope="module")
def pack_one(pack: Any) -> Any:
    """`pack_one(name)`: puts one of `ARCHIVES` into the store."""

    def packer(name: str) -> None:
        folder, generated, model = ARCHIVES[name]
        files = _files_of(HANDLERS / folder) if folder else {}
        pack(name, {**files, **generated}, **model)

    return packer


class Client:
    """What users send to a server."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def call(self, model: str, body: bytes, **headers: str) -> Any:
        """One prediction; the reply whatever it is."""
        return self.server.call("POST", f"/predictions/{model}", body, **headers)

    def post(self, model: str, body: bytes | str, verb: str = "predictions", **headers: str) -> Any:
        """One request; returns the JSON of its answer, which must be a success."""
        body = body.encode() if isinstance(body, str) else body
        reply = self.server.call("POST", f"/{verb}/{model}", body, **headers)
        assert reply.status == 200, reply.body
        return reply.json()

    def send_json(self, model: str, value: object, verb: str = "predictions") -> Any:
        """The same with JSON as its body."""
        return self.post(model, json.dumps(value), verb, content_type="application/json")

    def grpc(self, method: str, model: str, **fields: bytes) -> list[bytes]:
        """The parts of the answer over gRPC."""
        path = f"/org.pytorch.serve.grpc.inference.InferenceAPIsService/{method}"
        message = PredictionsRequest(model_name=model, input=fields)
        with grpc.insecure_channel(self.server.grpc["inference"]) as channel:
            call = channel.unary_stream(
                path, PredictionsRequest.SerializeToString, PredictionResponse.FromString
            )
            return [part.prediction for part in call(message, timeout=60)]

    def exposed(self, start: str) -> list[str]:
        """The lines of the metrics that begin like this, without the label of the host."""
        text = self.server.call("GET", "/metrics", api="metrics").body.decode()
        plain = re.sub(r'Hostname="[^"]*",', "", text)
        return [line for line in plain.splitlines() if line.startswith(start)]


@pytest.fixture(scope="module")
def client(pack_one: Any, start_server: Any) -> Client:
    """A client of a server that has all archives."""
    for name in ARCHIVES:
        pack_one(name)
    metrics = HANDLERS / "custom_metrics" / "metrics.yaml"
    server = start_server("--disable-token-auth", "--models", "all", properties=f"metrics_config={metrics}\n")
    for name in ARCHIVES:
        server.follow(f"{name}:1.0 is ready")
    return Client(server)


@pytest.fixture
def client_of() -> Any:
    """`client_of(server)`."""
    return Client


def _files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
