from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchere.handlers.loading.weights import WeightsKind, wants_aot_compile, weights_kind

AOT = {"pt2": {"export": {"aot_compile": True}}}


@pytest.mark.parametrize(
    ("model", "config", "kind"),
    [
        ({"serializedFile": "w.pt"}, {}, WeightsKind.TORCHSCRIPT),
        ({"serializedFile": "w.onnx"}, {}, WeightsKind.ONNX),
        ({"serializedFile": "w.pt2"}, {}, WeightsKind.AOT_PACKAGE),
        ({"serializedFile": "w.so"}, AOT, WeightsKind.AOT_SHARED_OBJECT),
        ({"serializedFile": "w.pth", "modelFile": "model.py"}, {}, WeightsKind.EAGER),
        ({"serializedFile": "w.pt", "modelFile": "model.py"}, {}, WeightsKind.EAGER),
        ({"modelFile": "model.py"}, {}, WeightsKind.EAGER),
    ],
)
def test_the_manifest_decides(
    tmp_path: Path, model: dict[str, str], config: dict[str, Any], kind: WeightsKind
) -> None:
    for name in model.values():
        (tmp_path / name).touch()
    assert weights_kind(model, str(tmp_path), config) is kind


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "names no file for them; make it with --serialized-file"),
        ({"serializedFile": "w.pth"}, r"has the suffix '\.pth'.*add it with --model-file"),
        ({"serializedFile": "w.bin"}, r"has the suffix '\.bin'; expected one of \.pt, "),
        ({"serializedFile": "w.so"}, "aot_compile: true"),
        ({"serializedFile": "gone.pt"}, r"names gone\.pt, and the archive holds w\.bin, w\.pth, w\.so"),
    ],
)
def test_what_cannot_be_loaded_is_explained(tmp_path: Path, model: dict[str, str], message: str) -> None:
    for name in ("w.pth", "w.bin", "w.so"):
        (tmp_path / name).touch()
    with pytest.raises(RuntimeError, match=f"No model weights could be loaded: .*{message}"):
        weights_kind(model, str(tmp_path), {})


def test_compiled_weights_are_announced_in_the_config() -> None:
    assert wants_aot_compile({"pt2": {"export": {"aot_compile": True}}})
    assert not wants_aot_compile({"pt2": {"export": True}})
    assert not wants_aot_compile({"pt2": "inductor"})
