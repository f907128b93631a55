"""What a step that fails is called, and which of its words it keeps."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models import steps
from torchere.archiver.models.inputs.run import run_on
from torchere.archiver.models.steps import counted, refusing, step


class Squared(torch.nn.Module):
    """Takes seven times seven numbers only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(7, 7)


def test_a_torchscript_that_fails_is_refused_with_its_cause() -> None:
    scripted = torch.jit.script(Squared())
    cause = r"^running failed: .*shape '\[7, 7\]' is invalid for input of size 3"
    with pytest.raises(ModelRefused, match=cause), refusing("running"):
        scripted(torch.zeros(3))


def test_what_torchscript_begins_with_is_not_said_twice() -> None:
    with pytest.raises(ModelRefused, match=r"^running failed: RuntimeError: size$"), refusing("running"):
        raise RuntimeError("It failed in the TorchScript interpreter.\nRuntimeError: size")


def test_of_other_failures_the_first_line_counts() -> None:
    with pytest.raises(ModelRefused, match=r"^running failed: ValueError: one$"), refusing("running"):
        raise ValueError("\n one\ntwo")


@pytest.mark.parametrize(
    ("text", "told"),
    [("the cause:\none\ntwo", "the cause: one; advice"), ("the cause:", "the cause; advice")],
)
def test_a_first_line_that_announces_the_next_brings_it_along(text: str, told: str) -> None:
    with pytest.raises(ModelRefused, match=f"ValueError: {told}$"), refusing("running", "advice"):
        raise ValueError(text)


def test_of_sizes_that_an_export_has_fixed_it_is_said_which() -> None:
    class Flat(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(14)

    shapes = ({1: torch.export.Dim("length", min=2, max=9)},)
    cause = r"^exporting failed: UserError: Constraints violated \(length\): .*length.*constant \(7\)"
    with pytest.raises(ModelRefused, match=cause), refusing("exporting"):
        torch.export.export(Flat(), (torch.randn(2, 7),), dynamic_shapes=shapes)


def test_a_complex_result_is_refused_with_a_way_out() -> None:
    with pytest.raises(ModelRefused, match=r"complex64.*expected real numbers: .*torch\.view_as_real"):
        run_on(torch.fft.fft, (torch.randn(2, 4),))


def test_a_long_loop_tells_how_much_is_done_and_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    said: list[str] = []

    assert list(counted("abcdef", 6, "samples", said.append)) == list("abcdef")

    # Not after the last one, and not within ten seconds.
    assert said == ["samples: 3 of 6, about 12 s left"]


def test_a_step_that_tells_nothing_of_itself_is_told_to_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_STILL_S", 0.001)
    told = threading.Event()

    def say(line: str) -> None:
        if line.startswith("compiling: running for "):
            told.set()

    with step(say, "compiling"):
        assert told.wait(30)


def test_warnings_of_libraries_are_not_shown_in_a_step_and_failures_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library, inner = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    before = library.level
    with step(lambda line: None, "reading"):
        library.warning("no kernel for another machine")
        inner.warning("deprecated")
        library.error("no kernel for this machine")
        logging.getLogger("torchere.handlers").warning("no labels")
    assert [record.getMessage() for record in caplog.records] == ["no kernel for this machine", "no labels"]
    assert library.level == before
