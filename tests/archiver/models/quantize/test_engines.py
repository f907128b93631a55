"""Which engine is chosen, as a table of measurements; and how weights are packed for one."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver.models.inputs.run import LoadedModel
from torchere.archiver.models.load.torchscript import load_script, supported, using
from torchere.archiver.models.measure.cost import processor_ms
from torchere.archiver.models.quantize import candidates
from torchere.archiver.models.quantize.candidates import Measured, NoUsableEngine, choose
from torchere.archiver.models.quantize.methods import quantise
from torchere.archiver.signature import Limit, Signature, TensorSpec
from torchere.handlers.loading.torchscript import load_torchscript


@pytest.mark.parametrize(
    ("measured", "engine"),
    [
        ([Measured("x86", 9.0, 0.1), Measured("onednn", 3.0, 0.1)], "onednn"),
        # Fast, but its arithmetic overflows on this processor.
        ([Measured("x86", 9.0, 0.05), Measured("onednn", 3.0, 0.2)], "x86"),
        ([Measured("x86", 9.0, 0.1), Measured("onednn", 0.0, float("inf"), failure="can't run it")], "x86"),
        # All drift far: the fastest of the best comes back, for verification to refuse.
        ([Measured("x86", 9.0, 0.5), Measured("onednn", 3.0, 0.51), Measured("qnnpack", 1.0, 1.9)], "onednn"),
    ],
)
def test_the_fastest_engine_that_agrees_is_chosen(measured: list[Measured], engine: str) -> None:
    assert choose(measured).engine == engine


def test_of_engines_that_are_as_fast_torchs_default_is_chosen() -> None:
    default = torch.backends.quantized.engine
    other = Measured("other", 3.0, 0.1)
    assert choose([other, Measured(default, 3.1, 0.1)]).engine == default
    assert choose([other, Measured(default, 3.3, 0.1)]).engine == "other"
    assert choose([other, Measured(default, 3.1, 0.9)]).engine == "other"


def test_that_no_engine_runs_is_said_with_the_reason_of_each() -> None:
    broken = [Measured("x86", 0.0, float("inf"), failure="can't run it (no such operator)")]

    with pytest.raises(NoUsableEngine, match=r"x86 can't run it \(no such operator\)"):
        choose(broken)
    with pytest.raises(NoUsableEngine, match="has no engine for int8"):
        choose([])


def test_the_process_keeps_its_engine_after_another_was_used() -> None:
    before = torch.backends.quantized.engine
    other = next(name for name in supported() if name != before)

    with using(other):
        assert torch.backends.quantized.engine == other

    assert torch.backends.quantized.engine == before


def test_serving_waits_until_packing_has_put_the_engine_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.backends.quantized.engine
    other = next(name for name in supported() if name != before)
    path = str(tmp_path / "net.pt")
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)
    seen = []
    real_load = torch.jit.load

    def spy(*args: object, **kwargs: object) -> object:
        seen.append(torch.backends.quantized.engine)
        return real_load(*args, **kwargs)

    monkeypatch.setattr(torch.jit, "load", spy)
    server = threading.Thread(target=load_torchscript, args=(path, "cpu"))
    with using(other):
        server.start()
        server.join(0.2)  # longer than the load takes
    server.join()

    assert seen == [before]


def test_a_file_that_is_no_torchscript_is_an_error_and_the_engine_is_put_back() -> None:
    before = torch.backends.quantized.engine

    with pytest.raises(RuntimeError):
        load_script(io.BytesIO(b"not a model"), check=False, engine=supported()[0])

    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize("method", ["int8-dynamic", "int8-static"])
def test_engines_run_only_batches_that_the_signature_allows(
    method: str, fours: type[torch.nn.Module]
) -> None:
    torch.manual_seed(0)
    samples = [(torch.rand(4, 8),) for _ in range(9)]
    rows = (TensorSpec("x", "FP32", (-1, 8), (Limit(0, multiple=4),)),)
    model = LoadedModel(fours().eval(), samples[0], Signature(rows, ()), Path("net.py"))
    made = quantise(model, method, samples, max_drift=1e-6)  # so that layers are ranked, too
    assert not any(one.failure for one in made.measured)


def test_engines_are_timed_in_each_size_that_requests_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[int, ...]] = []

    def noted(models: Any, call: Any, budget_s: float) -> list[float]:
        timed.append(tuple(call[0].shape))
        return processor_ms(models, call, 0.0)

    monkeypatch.setattr(candidates, "processor_ms", noted)
    rows = (TensorSpec("x", "FP32", (-1, -1, 8)),)
    model = LoadedModel(
        torch.nn.Linear(8, 4).eval(), (torch.rand(2, 5, 8),), Signature(rows, rows), Path("net.py")
    )
    given = [(torch.rand(2, 5, 8),)]
    quantise(model, "int8-dynamic", given, timed=[*given, (torch.rand(2, 7, 8),)])
    assert timed == [(1, 5, 8), (1, 7, 8)]
