from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.handlers.archive_import import ArchiveModules, forget_archive, open_archive
from torchere.handlers.loading.eager import load_eager
from torchere.handlers.loading.torchscript import load_torchscript
from torchere.handlers.loading.weights import (
    SharedModels,
    WeightsKind,
    file_to_map,
    shared_file,
    wants_aot_compile,
    weights_kind,
)

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


def test_many_threads_at_once_load_a_model_once() -> None:
    shared = SharedModels()
    together = threading.Barrier(8)
    loads = []

    def load() -> object:
        loads.append(threading.get_ident())
        return object()

    def ask(_: int) -> object:
        together.wait()
        return shared.get_or_load("net", load)

    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(ask, range(8)))
    assert len(loads) == 1
    assert all(model is models[0] for model in models)


def test_another_key_is_another_model() -> None:
    shared = SharedModels()
    assert shared.get_or_load(("net", "cpu"), object) is not shared.get_or_load(("net", "cuda"), object)


def test_a_model_that_may_not_be_shared_is_loaded_for_each_caller() -> None:
    shared = SharedModels()
    one = shared.get_or_load("net", object, lambda _: False)
    assert shared.get_or_load("net", object, lambda _: False) is not one


def test_none_counts_as_loaded() -> None:
    shared = SharedModels()
    loads: list[int] = []
    for _ in range(2):
        shared.get_or_load("net", lambda: loads.append(1))
    assert loads == [1]


def test_a_failed_load_is_tried_again_by_the_next_caller() -> None:
    shared = SharedModels()

    def fail() -> str:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        shared.get_or_load("net", fail)
    assert shared.get_or_load("net", lambda: "loaded") == "loaded"


def test_a_slow_load_does_not_hold_up_other_models() -> None:
    shared = SharedModels()
    started, finish = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        finish.wait(timeout=30)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(shared.get_or_load, "slow", slow)
        started.wait(timeout=30)
        assert shared.get_or_load("fast", lambda: "fast") == "fast"
        finish.set()
        assert pending.result(timeout=30) == "slow"


MODEL = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(600, 600)
"""


@pytest.fixture
def archive(write_archive: Callable[..., Path]) -> Iterator[ArchiveModules]:
    directory = str(write_archive({"model.py": MODEL}))
    yield open_archive("shares", "1.0", directory)
    forget_archive(directory)


def share(path: Path) -> Path:
    """Put a file with the same bytes where the server puts what versions share."""
    shared = Path(shared_file(str(path)))
    shared.parent.mkdir()
    shared.write_bytes(path.read_bytes())
    changed_ns = path.stat().st_mtime_ns
    os.utime(shared, ns=(changed_ns, changed_ns))
    return shared


def mapped_file(tensor: torch.Tensor) -> str:
    """The file whose page a tensor begins in; "" when it is on the heap."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *facts = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in span.split("-"))
        if low <= tensor.data_ptr() < high:
            return facts[4] if len(facts) > 4 else ""
    raise AssertionError("the tensor is nowhere")


@pytest.fixture
def weights(archive: ArchiveModules) -> Path:
    path = Path(archive.model_dir, "w.pth")
    torch.save(torch.nn.Linear(600, 600).state_dict(), path)
    return path


def test_weights_that_nobody_shares_are_their_own_file(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"weights")
    assert file_to_map(str(tmp_path / "w.pt")) == str(tmp_path / "w.pt")


def test_a_state_dict_is_mapped_from_the_shared_file(archive: ArchiveModules, weights: Path) -> None:
    shared = share(weights)
    model = load_eager(archive, "model.py", str(weights))
    assert mapped_file(model.get_parameter("weight")) == str(shared)


def test_torchscript_is_mapped_from_the_shared_file(tmp_path: Path) -> None:
    path = tmp_path / "model" / "w.pt"
    path.parent.mkdir()
    torch.jit.save(torch.jit.script(torch.nn.Linear(600, 600).eval()), path)
    shared = share(path)
    module = load_torchscript(str(path), "cpu")
    assert mapped_file(module.weight) == str(shared)


@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_weights_that_the_handler_has_changed_are_its_own(
    archive: ArchiveModules, weights: Path, how: str
) -> None:
    share(weights)
    changed = torch.nn.Linear(600, 600).state_dict()
    place = weights if how == "written to" else weights.with_name("new")
    torch.save(changed, place)
    os.replace(place, weights)
    model = load_eager(archive, "model.py", str(weights))
    assert torch.equal(model.get_parameter("weight"), changed["weight"])
    assert mapped_file(model.get_parameter("weight")) == str(weights)
