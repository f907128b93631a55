"""Trains a small network on a table, packs it without a handler, and asks it over every API.

python -m examples.tabular.demo
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from examples.harness.errors import expect
from examples.harness.packing import pack
from examples.harness.run import main, served
from examples.harness.server import Server
from examples.tabular.training import trained
from torchere.client.tensors import tensor

MODEL = "tumour"
_TOLERANCE = 1e-4
_LEAST_ACCURACY = 0.94

Floats = npt.NDArray[np.float32]


def run(work: Path) -> None:
    """Train, pack as TorchScript, serve, ask for the rows that were held out, compare."""
    made = trained()
    print(f"training {made.accuracy:.0%} of {len(made.benign)} held-out rows right")
    expect(made.accuracy >= _LEAST_ACCURACY, f"expected {_LEAST_ACCURACY:.0%} at least")
    torch.save(made.network.state_dict(), work / "tumour.pth")
    features: Floats = made.features.numpy()
    np.save(work / "example.npy", features[:2])
    pack(
        work / "store",
        MODEL,
        *("--model-file", Path(__file__).with_name("network.py")),
        *("--serialized-file", work / "tumour.pth", "--example", work / "example.npy"),
        *("--format", "torchscript", "--dynamic-batch", "1:256"),
    )
    with torch.inference_mode():
        plain: Floats = made.network(made.features).numpy()
    with served(work, MODEL) as server:
        for way, found in _answers(server, features).items():
            off = float(np.abs(found - plain).max())
            print(f"{way:<9}{len(found)} rows, {off:.0e} off the plain model")
            expect(
                found.shape == plain.shape and off <= _TOLERANCE, f"expected at most {_TOLERANCE} over {way}"
            )


def _answers(server: Server, features: Floats) -> dict[str, Floats]:
    """The scores of every row, asked for in four ways."""
    with server.client() as client, server.grpc() as connection:
        declared = client.model_metadata(MODEL)
        (taken,) = declared.inputs
        print(f"takes    {taken.name} {taken.datatype}{list(taken.shape)}, says the Open Inference Protocol")
        found = {
            "REST": client.predict(MODEL, features.tolist()).json(),
            "gRPC": connection.predict(MODEL, features.tobytes()).json(),
            "OIP REST": client.infer(MODEL, {taken.name: features}).outputs["output"],
            "OIP gRPC": connection.infer(MODEL, [tensor(taken.name, features)]).tensors[0].numpy(),
        }
    return {way: np.asarray(scores, np.float32) for way, scores in found.items()}


if __name__ == "__main__":
    sys.exit(main("tabular", run))
