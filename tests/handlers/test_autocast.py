"""A model under autocast computes in half precision, and answers in float32."""

from __future__ import annotations

import pytest
import torch

from torchere.handlers.autocast import autocasting

CPU = torch.device("cpu")


class Telling(torch.nn.Module):
    """Says in what type its products were computed."""

    kind = "telling"

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        products = self.linear(x)
        return {"y": [products], "bits": products.dtype.itemsize * 8, "ids": torch.tensor([1])}


def test_products_are_halves_and_answers_are_not() -> None:
    model = autocasting(Telling(), {"autocast": "bfloat16"}, CPU)
    answer = model(torch.ones(1, 4))
    assert answer["bits"] == 16
    assert (answer["y"][0].dtype, answer["ids"].dtype) == (torch.float32, torch.int64)
    assert model.kind == "telling"


def test_torchscript_is_cast_too() -> None:
    linear = torch.nn.Linear(512, 512)
    rows = torch.rand(1, 512)
    scripted = autocasting(torch.jit.script(linear), {"autocast": "bfloat16"}, CPU)
    with torch.inference_mode():
        assert 0 < (scripted(rows) - linear(rows)).abs().max() < 0.1


def test_nothing_is_cast_unasked() -> None:
    model = Telling()
    assert autocasting(model, {}, CPU) is model


def test_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"autocast .* is 'int8', expected bfloat16 or float16"):
        autocasting(Telling(), {"autocast": "int8"}, CPU)
