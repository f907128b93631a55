"""The section `torchscript` of model-config.yaml."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from torchere.archiver.torchscript_options import TorchScriptOptions


@pytest.mark.parametrize(
    "config",
    [{}, {"torchscript": None}, {"torchscript": "fast"}, {"torchscript": {"optimize_for_inference": None}}],
)
def test_without_a_section_nothing_is_asked_for(config: dict[str, Any]) -> None:
    assert TorchScriptOptions.read(config) == TorchScriptOptions()
    assert TorchScriptOptions().lines() == []


@pytest.mark.parametrize(
    "options",
    [
        TorchScriptOptions("onednn"),
        TorchScriptOptions(optimize_for_inference=True),
        TorchScriptOptions("x86", optimize_for_inference=True),
    ],
)
def test_what_is_written_is_read(options: TorchScriptOptions) -> None:
    assert TorchScriptOptions.read({"torchscript": yaml.safe_load("\n".join(options.lines()))}) == options


def test_what_is_computed_in_half_precision_is_not_optimised() -> None:
    config = {"torchscript": {"optimize_for_inference": True}, "autocast": "bfloat16"}
    assert TorchScriptOptions.read(config) == TorchScriptOptions()


@pytest.mark.parametrize("value", ["yes", 1, []])
def test_a_value_that_is_no_boolean_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"optimize_for_inference in model-config.yaml is .*true or false"):
        TorchScriptOptions.read({"torchscript": {"optimize_for_inference": value}})
