"""`ipex_enable`: the layout of convolutions, and Intel's extension where it is installed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from torchere.handlers.loading import oneapi


@pytest.fixture
def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()).eval()


def has_channels_last(net: torch.nn.Module) -> bool:
    return next(net.parameters()).is_contiguous(memory_format=torch.channels_last)


def test_without_the_setting_a_model_stays_as_it_is(net: torch.nn.Module) -> None:
    assert oneapi.optimized(net) is net
    assert not has_channels_last(net)
    assert not oneapi.IPEX_AVAILABLE


def test_with_it_convolutions_have_the_layout_of_onednn_and_the_same_results(
    net: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(2, 3, 8, 8)
    before = net(rows)
    monkeypatch.setattr(oneapi, "IS_ASKED_FOR", True)
    after = oneapi.optimized(net)
    assert has_channels_last(after)
    torch.testing.assert_close(after(rows), before)


def test_an_installed_extension_optimizes_the_model(
    net: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def optimize(model: torch.nn.Module) -> torch.nn.Module:
        seen.append(model)
        return model

    extension = SimpleNamespace(optimize=optimize)
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", extension)
    monkeypatch.setattr(oneapi, "IS_ASKED_FOR", True)
    monkeypatch.setattr(oneapi, "IPEX_AVAILABLE", True)
    oneapi.optimized(net)
    assert seen == [net]
    assert has_channels_last(net)


def test_what_is_no_module_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oneapi, "IS_ASKED_FOR", True)
    session = object()
    assert oneapi.optimized(session) is session
