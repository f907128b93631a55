"""Models that crash, exit or hang on sizes that their author did not try."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.torchscript import to_torchscript
from torchere.archiver.models.inputs.sizes import FreeSize
from torchere.archiver.models.load.torchscript import load_script
from torchere.archiver.models.probe import isolation
from torchere.archiver.models.probe.derive import signature_of
from torchere.archiver.models.probe.isolation import ModelEndedProcess
from torchere.archiver.models.quantize.candidates import quiet

ROWS = (torch.rand(1, 5, 8),)


def segfault() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.write(2, b"free(): invalid pointer\n")
    os.abort()


def terminate() -> None:
    lines = ["terminate called after throwing", "  what():  index out of bounds", "frame #1: abort"]
    os.write(2, "\n".join(lines).encode())
    os.abort()


def failing(at: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a model of rows that calls `at` for any other batch than 1."""

    def run(rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] != 1:
            at()
        return rows * 2

    return run


def batch(low: int = 1, high: int = 8) -> FreeSize:
    return FreeSize("batch", ((0, 0),), low, high)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (segfault, "SIGSEGV"),
        (abort, r"SIGABRT: free\(\): invalid pointer"),
        (terminate, r"SIGABRT: index out of bounds\)"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: sys.exit(4), "exit code 4"),
    ],
)
def test_a_model_that_ends_its_process_for_other_batches_is_not_batched(
    at: Callable[[], Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    found = signature_of(failing(at), ROWS, ["rows"], [], probe_batch=True, say=lines.append)
    assert not found.batched
    (line,) = lines
    assert line.startswith(
        "not batched, requests go through the model one by one: the model ended the process"
    )
    assert line.endswith("when it was run on FP32[3, 5, 8]")
    assert said.replace("\\", "") in line
    written = capfd.readouterr().err.splitlines()
    # gRPC says so at a fork, where tests before this one have used it.
    assert [line for line in written if "fork_posix.cc" not in line] == []
    with pytest.raises(ModelEndedProcess, match=said):
        signature_of(failing(at), ROWS, ["rows"], [batch()], probe_batch=True)


def test_a_model_that_ends_its_process_on_the_example_is_refused() -> None:
    def run(rows: torch.Tensor) -> torch.Tensor:
        segfault()
        return rows

    with pytest.raises(ModelEndedProcess, match=r"\(SIGSEGV\) when it was run on FP32\[1, 5, 8\]"):
        signature_of(run, ROWS, ["rows"], [], probe_batch=True)


def test_a_model_that_does_not_return_for_other_batches_is_not_batched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "_LEAST_S", 0.3)
    monkeypatch.setattr(isolation, "_TIMES", 0)
    lines: list[str] = []
    hanging = failing(threading.Event().wait)
    assert not signature_of(hanging, ROWS, ["rows"], [], probe_batch=True, say=lines.append).batched
    assert "did not return within 0 s on FP32[3, 5, 8]" in lines[0]


def test_a_model_that_asks_for_nearly_all_memory_for_other_batches_is_not_batched() -> None:
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line]
    most = int(int(line.split()[1]) * 1024 * 0.97)
    lines: list[str] = []
    asking = failing(lambda: torch.empty(most, dtype=torch.uint8))  # pages are taken when they are written to
    assert not signature_of(asking, ROWS, ["rows"], [], probe_batch=True, say=lines.append).batched
    assert "can't allocate memory" in lines[0]


def test_a_model_that_needs_a_thread_of_this_process_is_tried_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_FIRST_S", 0.3)
    here = os.getpid()

    def run(rows: torch.Tensor) -> torch.Tensor:
        if os.getpid() != here:
            threading.Event().wait()
        return rows * 2

    assert signature_of(run, ROWS, ["rows"], [], probe_batch=True).batched


def test_what_a_model_writes_to_standard_error_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def run(rows: torch.Tensor) -> torch.Tensor:
        os.write(2, b"careful\n")
        return rows

    assert signature_of(run, ROWS, ["rows"], [], probe_batch=False).inputs[0].shape == (1, 5, 8)
    assert "careful" in capfd.readouterr().err


def test_trials_compute_with_as_many_threads_as_this_process_after_it_computed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.rand(700, 700) @ torch.rand(700, 700)

        def run(rows: torch.Tensor) -> torch.Tensor:
            torch.rand(700, 700) @ torch.rand(700, 700)
            os.write(2, f"{torch.get_num_threads()} threads\n".encode())
            return rows

        signature_of(run, ROWS, ["rows"], [], probe_batch=False)
    finally:
        torch.set_num_threads(before)
    assert "2 threads" in capfd.readouterr().err


class Stateful(nn.Module):
    """A recurrent layer whose initial state is a constant for one row."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(8, 16, **options)
        self.register_buffer("state", torch.zeros(1, 1, 16))
        self.pair = kind is nn.LSTM

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        state: Any = (self.state, self.state) if self.pair else self.state
        found: torch.Tensor = self.layer(rows, state)[0]
        return found


KINDS = {
    "LSTM": (nn.LSTM, {}),
    "GRU": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "ReLU": (nn.RNN, {"nonlinearity": "relu"}),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_recurrent_layer_refuses_a_state_of_another_batch(
    tmp_path: Path, kind: str, batch_first: bool
) -> None:
    layer, options = KINDS[kind]
    model = Stateful(layer, batch_first=batch_first, **options).eval()
    rows = torch.rand(1, 5, 8) if batch_first else torch.rand(5, 1, 8)
    wanted = model(rows)
    lines: list[str] = []
    made = to_torchscript(model, (rows,))
    found = signature_of(made, (rows,), ["rows"], [], probe_batch=batch_first, say=lines.append)
    assert not found.batched
    if batch_first:
        assert "initial state of a recurrent layer has a batch of 1, and its input one of 3" in lines[0]
        assert "x.new_zeros(layers, batch, width)" in lines[0]
    others = torch.rand(4, 5, 8) if batch_first else torch.rand(5, 4, 8)
    plain = tmp_path / "plain.pt"
    with quiet():
        torch.jit.save(torch.jit.trace(model, (rows,), check_trace=False), plain)
    for script in (made, load_script(str(plain), check=True)):
        assert torch.equal(script(rows), wanted)
        with pytest.raises(torch.jit.Error, match="and its input one of 4"):
            script(others)


def test_a_state_that_is_made_from_the_input_takes_batches() -> None:
    """What the refusal of a constant state recommends."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(8, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x, x.new_zeros(1, x.shape[0], 16))[0]
            return found

    made = to_torchscript(Net().eval(), ROWS)
    assert signature_of(made, ROWS, ["x"], [], probe_batch=True).batched


def test_a_state_that_clients_send_has_the_batch_of_the_input() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(8, 16, batch_first=True)

        def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x, state)[0]
            return found

    made = to_torchscript(Net().eval(), (ROWS[0], torch.zeros(1, 1, 16)))
    with pytest.raises(torch.jit.Error, match="has a batch of 1, and its input one of 4"):
        made(torch.rand(4, 5, 8), torch.zeros(1, 1, 16))


def test_a_size_that_was_asked_for_and_does_not_work_says_what_to_leave_out() -> None:
    made = to_torchscript(Stateful(nn.LSTM, batch_first=True).eval(), ROWS)
    with pytest.raises(ModelRefused, match="leave --dynamic-batch out"):
        signature_of(made, ROWS, ["rows"], [batch()], probe_batch=True)
