"""Models that are packed as they are: numbers beyond the table of an embedding are answered with 400."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.signature import Values, parse

Pack = Callable[..., Path]
Serve = Callable[..., list[Any]]
NET = """
import torch


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(7, 3)

    def forward(self, ids):
        return self.words(ids).sum(1)
"""
EXAMPLE = torch.tensor([[1, 2, 3], [4, 5, 6]])
TAKEN = {"ONNX": Values(-7, 6)}


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(7, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids).sum(1)


def as_class(model: Words, folder: Path) -> dict[str, Any]:
    (folder / "words.py").write_text(NET)
    torch.save(model.state_dict(), folder / "words.pth")
    return {"serialized_file": folder / "words.pth", "model_file": folder / "words.py"}


def as_script(model: Words, folder: Path) -> dict[str, Any]:
    torch.jit.script(model).save(folder / "words.pt")
    return {"serialized_file": folder / "words.pt"}


def as_frozen_trace(model: Words, folder: Path) -> dict[str, Any]:
    torch.jit.freeze(torch.jit.trace(model, EXAMPLE)).save(folder / "words.pt")
    return {"serialized_file": folder / "words.pt"}


def as_program(model: Words, folder: Path) -> dict[str, Any]:
    free = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(torch.export.export(model, (EXAMPLE,), dynamic_shapes=free), folder / "words.pt2")
    return {"serialized_file": folder / "words.pt2"}


def as_onnx(model: Words, folder: Path) -> dict[str, Any]:
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed, reason="has no release for Python 3.10")
    axes = {"ids": {0: "n"}, "y": {0: "n"}}
    names = {"input_names": ["ids"], "output_names": ["y"], "dynamic_axes": axes}
    torch.onnx.export(model, (EXAMPLE,), folder / "words.onnx", dynamo=False, **names)  # type: ignore[arg-type]
    return {"serialized_file": folder / "words.onnx"}


FORMS = {
    "class": as_class,
    "TorchScript": as_script,
    "trace": as_frozen_trace,
    "program": as_program,
    "ONNX": as_onnx,
}


@pytest.mark.filterwarnings("ignore")  # of torch's tracer and exporter
@pytest.mark.parametrize("form", FORMS)
def test_a_number_beyond_the_table_of_a_kept_model_is_the_clients_mistake(
    pack: Pack, serve: Serve, tmp_path: Path, form: str
) -> None:
    model = Words().eval()
    torch.save(EXAMPLE, tmp_path / "example.pt")
    archive = pack(**FORMS[form](model, tmp_path), example=tmp_path / "example.pt")
    (ids,) = parse(open_archive(archive).read_text("signature.json")).inputs
    taken = TAKEN.get(form, Values(0, 6))
    assert ids.values == taken
    good, high, low = serve(
        archive, [{"body": np.array([taken.least, 5, found])} for found in (6, 7, taken.least - 1)]
    )
    with torch.no_grad():
        wanted = model(torch.tensor([[taken.least % 7, 5, 6]]))
    torch.testing.assert_close(torch.tensor([good]), wanted)
    assert [answer["code"] for answer in (high, low)] == [400, 400]
    assert high["message"] == f"ids: found the number 7, expected {taken}"
