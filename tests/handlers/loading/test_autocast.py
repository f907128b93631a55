"""A model under autocast computes in half precision, and answers in float32."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchere.handlers.loading.autocast import autocasting

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


def test_what_torch_does_not_compute_is_refused() -> None:
    session = object()  # onnxruntime's can't be called, either
    assert autocasting(session, {}, CPU) is session
    with pytest.raises(ValueError, match=r"torch does not compute this model: found a object"):
        autocasting(session, {"autocast": "bfloat16"}, CPU)


class Casts(TorchDispatchMode):
    """Notes the shapes of what the calling thread casts."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_executors_cast_their_weights_for_themselves() -> None:
    """As two in threads that share a model do: on a GPU, neither waits for what the other has begun."""
    linear = torch.nn.Linear(512, 512)
    inside, seen = threading.Event(), threading.Event()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = linear(x)
        inside.set()
        assert seen.wait(30)
        return y

    def first() -> None:
        with torch.no_grad():
            autocasting(forward, {"autocast": "bfloat16"}, CPU)(torch.ones(1, 512))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    with torch.no_grad(), Casts() as casts:
        autocasting(linear, {"autocast": "bfloat16"}, CPU)(torch.ones(1, 512))
    seen.set()
    thread.join()
    assert (512, 512) in casts.shapes
