"""The rows of inference_data.json: built-in handlers and transformers, on small models made here.

Upstream's 24 models are downloads. These are of the same kinds, with random weights, and what they have to
answer is computed here, without any handler.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from PIL import Image
from suite.checks import OCTETS, Check
from suite.deployment import OPEN, Deployment
from suite.models import write
from torch import nn

FILE = "inference_data.json"
_CLASSES = ("tabby", "lynx", "cougar", "tiger", "quilt", "bus")
NAMES = {str(index): [f"n{index:04}", name] for index, name in enumerate(_CLASSES)}
MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
TEXT = "Bloomberg has decided to publish a new report on the global economic situation"
TOPICS = {"0": "World", "1": "Sports", "2": "Business", "3": "Sci/Tec"}
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(TEXT.lower().split()))]
Files: TypeAlias = Mapping[str, str | bytes]
CLOSE = 1e-3  # of probabilities; libraries resize pictures in slightly different ways


class Picture(nn.Sequential):
    """Classifies by the colours of the four quarters."""

    def __init__(self) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 6))


class Topic(nn.Module):
    """Classifies by the mean of the words and pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(64, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, text: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return one score for each topic."""
        return self.last(self.embedding(text, offsets))


class Boxes(nn.Module):
    """Finds a box in each quarter, as sure as that quarter is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Return boxes, labels and scores of each image."""
        height, width = images.shape[2] // 2, images.shape[3] // 2
        corners = [(x, y, x + width, y + height) for y in (0, height) for x in (0, width)]
        return [
            {
                "boxes": torch.tensor(corners, dtype=torch.float32),
                "labels": torch.arange(1, 5),
                "scores": nn.functional.adaptive_avg_pool2d(image.mean(0)[None], 2).flatten() * self.scale,
                "masks": torch.zeros(4, 1, height, width),
            }
            for image in images
        ]


class Segments(nn.Module):
    """Tells classes of pixels by their colour."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(3, 3, 1)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the scores of each pixel."""
        return {"out": self.last(images)}


BERT = """
import json
import torch
from ts.torch_handler.base_handler import BaseHandler
from transformers import AutoTokenizer, BertForQuestionAnswering, BertForSequenceClassification
from transformers import BertForTokenClassification

KINDS = {"qa": BertForQuestionAnswering, "tokens": BertForTokenClassification}

class Bert(BaseHandler):
    def initialize(self, context):
        folder = context.system_properties["model_dir"]
        self.kind = open(f"{folder}/kind.txt").read()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = KINDS.get(self.kind, BertForSequenceClassification).from_pretrained(folder).eval()
        self.initialized = True

    def preprocess(self, data):
        (row,) = data
        text = row.get("data") or row.get("body")
        text = text if isinstance(text, (str, dict)) else bytes(text).decode()
        return self.tokenizer(text, return_tensors="pt")

    def inference(self, inputs):
        with torch.no_grad():
            return inputs["input_ids"][0], self.model(**inputs)

    def postprocess(self, found):
        ids, output = found
        if self.kind == "qa":
            start, end = int(output.start_logits.argmax()), int(output.end_logits.argmax())
            return [[start, end]]
        if self.kind == "text":
            return [["Accepted", "Not Accepted"][int(output.logits.argmax())]]
        words = self.tokenizer.convert_ids_to_tokens(ids)
        return [[[word, int(label)] for word, label in zip(words, output.logits[0].argmax(1))]]
"""


def picture() -> bytes:
    """Return a PNG whose colours change smoothly, brighter to the right and below."""
    red = torch.linspace(0, 255, 320).expand(280, 320)
    green = torch.linspace(20, 230, 280)[:, None].expand(280, 320)
    pixels = torch.stack([red, green, (red + green) / 2], 2).round().to(torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def tensor_of(image: Image.Image) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.reshape(1, image.height, image.width, 3).permute(0, 3, 1, 2) / 255


def prepared() -> torch.Tensor:
    """Return the picture as ImageNet's models get it: the shorter side 256, the middle 224, normalised."""
    size = (int(256 * 320 / 280), 256)
    image = Image.open(io.BytesIO(picture())).resize(size, Image.Resampling.BILINEAR)
    left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
    pixels = tensor_of(image.crop((left, top, left + 224, top + 224)))
    return (pixels - MEAN[:, None, None]) / SPREAD[:, None, None]


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind().eval()


def words() -> dict[str, int]:
    """Return the number of each word and pair of `TEXT`."""
    single = TEXT.lower().split()
    pairs = [f"{one} {other}" for one, other in pairwise(single)]
    return {word: number for number, word in enumerate(dict.fromkeys([*single, *pairs]))}


def start_handlers(at: Deployment) -> None:
    store = at.folder / "store"
    classes, topics = json.dumps(NAMES), json.dumps(TOPICS)
    build_model(store, "picture", "image_classifier", Picture, {"index_to_name.json": classes})
    vocabulary: Files = {"index_to_name.json": topics, "source_vocab.pt": saved(words())}
    build_model(store, "topic", "text_classifier", Topic, vocabulary)
    build_model(store, "boxes", "object_detector", Boxes, {"index_to_name.json": classes})
    build_model(store, "segments", "image_segmenter", Segments, {})
    for kind in BERTS:
        files: Files = {"bert.py": BERT, "kind.txt": kind, **bert_files(kind, at.folder / kind)}
        names = {"modelName": f"bert_{kind}", "handler": "bert.py", "modelVersion": "1.0"}
        write(store / f"bert_{kind}.mar", names, files)
    # TorchServe ignores the second line. Here it has three workers share an import of four seconds.
    shared = "transformers.models.bert.modeling_bert,transformers.models.auto.tokenization_auto"
    at.start(*OPEN, properties=f"default_response_timeout=120\npreload_modules={shared}\n")


def build_model(store: Path, name: str, handler: str, kind: Callable[[], nn.Module], files: Files) -> None:
    """Write the archives NAME (eager), NAME_batch, and NAME_scripted if TorchScript knows such a model."""
    module = seeded(kind)
    model = {"handler": handler, "serializedFile": "weights.pt", "modelVersion": "1.0"}
    eager = {**model, "modelFile": "net.py"}
    source = f"import torch\nfrom torch import nn\n\n{inspect.getsource(kind)}"
    files = {"weights.pt": saved(module.state_dict()), "net.py": source, **files}
    write(store / f"{name}.mar", {**eager, "modelName": name}, files)
    batch = {**eager, "modelName": f"{name}_batch", "configFile": "c.yaml"}
    config = "batchSize: 4\nmaxBatchDelay: 100\nminWorkers: 1\nmaxWorkers: 1\n"
    write(store / f"{name}_batch.mar", batch, {**files, "c.yaml": config})
    if kind is not Boxes:  # a list of dictionaries
        scripted = io.BytesIO()
        torch.jit.save(torch.jit.script(module), scripted)
        names = {**model, "modelName": f"{name}_scripted"}
        write(store / f"{name}_scripted.mar", names, {**files, "weights.pt": scripted.getvalue()})


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def bert(kind: str) -> tuple[Any, Any]:
    """Return a small model of random weights, and its tokenizer."""
    transformers: Any = importlib.import_module("transformers")  # slow, and only these checks need it
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(VOCABULARY), num_labels=2, **settings)
    name = {"qa": "QuestionAnswering", "tokens": "TokenClassification", "text": "SequenceClassification"}[
        kind
    ]
    model = seeded(partial(getattr(transformers, f"BertFor{name}"), config))
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
    return model, transformers.BertTokenizer(vocab=vocabulary)


def bert_files(kind: str, folder: Path) -> Mapping[str, bytes]:
    model, tokenizer = bert(kind)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def ask(at: Deployment, model: str, body: bytes) -> Any:
    reply = at.register(f"{model}.mar", model)
    assert reply.status == 200, reply.text
    reply = at.ask("POST", f"/predictions/{model}", body, headers=OCTETS)
    at.manage("DELETE", f"/models/{model}")
    assert reply.status == 200, reply.text
    return reply.json if reply.text[:1] in "[{" else reply.text


def probabilities(found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    assert list(found) == list(wanted), (found, wanted)
    assert all(abs(found[name] - wanted[name]) < CLOSE for name in wanted), (found, wanted)


def classified(model: str, at: Deployment) -> None:
    with torch.no_grad():
        values, classes = seeded(Picture)(prepared()).softmax(1).topk(5)
    wanted = {
        NAMES[str(each)][1]: value
        for each, value in zip(classes[0].tolist(), values[0].tolist(), strict=True)
    }
    probabilities(ask(at, model, picture()), wanted)


def topics(model: str, at: Deployment) -> None:
    with torch.no_grad():
        values = seeded(Topic)(torch.tensor(list(words().values())), torch.tensor([0])).softmax(1)[0].tolist()
    probabilities(ask(at, model, TEXT.encode()), dict(zip(TOPICS.values(), values, strict=True)))


def detected(model: str, at: Deployment) -> None:
    with torch.no_grad():
        (wanted,) = seeded(Boxes)(tensor_of(Image.open(io.BytesIO(picture()))))
    sure = [place for place, score in enumerate(wanted["scores"].tolist()) if score >= 0.5]
    found = ask(at, model, picture())
    assert [each.pop("score") for each in found] == [wanted["scores"].tolist()[place] for place in sure]
    names = {place: NAMES[str(wanted["labels"].tolist()[place])][1] for place in sure}
    assert found == [{names[place]: wanted["boxes"].tolist()[place]} for place in sure]


def segmented(model: str, at: Deployment) -> None:
    with torch.no_grad():
        best = seeded(Segments)(prepared())["out"].softmax(1).max(1)
    found = torch.tensor(ask(at, model, picture()))
    assert found.shape == (224, 224, 2)
    assert (found[..., 0] == best.indices[0]).float().mean() > 0.99
    assert (found[..., 1] - best.values[0]).abs().max() < 0.02


def transformed(kind: str, at: Deployment) -> None:
    model, tokenizer = bert(kind)
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    wanted: Any
    if kind == "qa":
        wanted = [int(output.start_logits.argmax()), int(output.end_logits.argmax())]
    elif kind == "text":
        wanted = ["Accepted", "Not Accepted"][int(output.logits.argmax())]
    else:
        labels = output.logits[0].argmax(1).tolist()
        words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
        wanted = [list(pair) for pair in zip(words, labels, strict=True)]
    found = ask(at, f"bert_{kind}", TEXT.encode())
    assert found == wanted, found


BERTS = ("qa", "tokens", "text")
CHECKS = (
    *(
        Check(FILE, f"{model}{form}", partial(run, f"{model}{form}"))
        for model, run, forms in (
            ("picture", classified, ("", "_scripted", "_batch")),
            ("topic", topics, ("", "_scripted")),
            ("boxes", detected, ("",)),
            ("segments", segmented, ("", "_scripted")),
        )
        for form in forms
    ),
    *(Check(FILE, f"transformers, {kind}", partial(transformed, kind)) for kind in BERTS),
)
