"""The table of operators of torch's compiler, before it compiles a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchere.archiver.models.convert.torchscript import forget_stale_operators, to_torchscript


class Scaled(nn.Module):
    """Reads a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factors = nn.Linear(4, 4), tuple(float(number) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * self.factors[2]
        return found


def table() -> dict[int, str]:
    builtins: Any = torch.jit._builtins
    found: dict[int, str] = builtins._get_builtin_table()
    return found


def test_an_operator_that_got_an_overload_has_only_its_present_id() -> None:
    library = torch.library.Library("torchere_tests", "DEF")
    library.define("same(Tensor x) -> Tensor")
    packet: Any = torch.ops.torchere_tests.same
    before = len(table())
    library.define("same.times(Tensor x, int times) -> Tensor")
    assert len(table()) == before + 1
    forget_stale_operators()
    ids = [one for one, name in table().items() if name == "torchere_tests::same"]
    assert ids == [id(packet._op)]
    assert "aten::add" in table().values()


def test_an_attribute_with_the_id_of_an_operator_that_is_gone_is_compiled() -> None:
    library = torch.library.Library("torchere_tests_of_ids", "DEF")
    library.define("same(Tensor x) -> Tensor")
    assert torch.ops.torchere_tests_of_ids.same
    module, x = Scaled().eval(), torch.rand(2, 4)
    table()[id(module.factors)] = "torchere_tests_of_ids::same"
    assert torch.allclose(to_torchscript(module, (x,), script=True)(x), module(x))
