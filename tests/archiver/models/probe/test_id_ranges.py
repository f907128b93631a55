"""Inputs that are row numbers of a table."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchere.archiver.models.probe.id_ranges import with_id_ranges
from torchere.archiver.signature import Signature, TensorSpec, Values

EXAMPLE = (torch.tensor([[1, 2]]), torch.tensor([[0, 1]]))


def bare() -> Signature:
    inputs = (TensorSpec("ids", "INT64", (-1, -1)), TensorSpec("kinds", "INT64", (-1, -1)))
    return Signature(inputs, (TensorSpec("y", "FP32", (-1,)),))


def ranges(run: Callable[..., Any]) -> list[Values | None]:
    return [spec.values for spec in with_id_ranges(bare(), run, EXAMPLE).inputs]


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.more = torch.nn.Embedding(50, 4), torch.nn.Embedding(40, 4)
        self.kinds = torch.nn.EmbeddingBag(3, 4)

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        return (self.words(ids) + self.more(ids)).sum(1) + self.kinds(kinds)


def test_an_input_holds_the_rows_of_the_smallest_table_that_it_is_looked_up_in() -> None:
    assert ranges(Words()) == [Values(0, 39), Values(0, 2)]


@pytest.mark.filterwarnings("ignore")  # torch.jit.script is deprecated
def test_the_tables_of_torchscript_are_found() -> None:
    assert ranges(torch.jit.script(Words())) == [Values(0, 39), Values(0, 2)]


def test_row_numbers_that_the_model_computes_have_no_range() -> None:
    table = torch.rand(9, 4)
    assert ranges(lambda ids, kinds: torch.nn.functional.embedding(ids % 9 + 0 * kinds, table)) == [
        None,
        None,
    ]


def test_a_model_that_fails_while_it_is_watched_has_no_ranges() -> None:
    def run(ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not now")

    assert ranges(run) == [None, None]


def ranges_of_ids(forward: Callable[..., Any], example: torch.Tensor) -> Values | None:
    spec = TensorSpec("ids", "INT64", (-1, -1))
    signature = Signature((spec,), (TensorSpec("y", "FP32", (-1, 4)),))
    return with_id_ranges(signature, forward, (example,)).inputs[0].values


TABLE, LONG = torch.rand(9, 4), torch.rand(50, 4)


def lookup(ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(ids, TABLE)


def within(ids: torch.Tensor) -> torch.Tensor:
    return lookup(ids.clamp_(0, 8))


def hashed(ids: torch.Tensor) -> torch.Tensor:
    return lookup(ids) if ids.max() < 1000 else lookup(ids % 9)


def longer(ids: torch.Tensor) -> torch.Tensor:
    return lookup(ids) if int(ids.max()) < 9 else torch.nn.functional.embedding(ids, LONG)


def from_the_end(ids: torch.Tensor) -> torch.Tensor:
    return lookup(torch.where(ids < 0, ids + 9, ids, out=ids))


def of_the_first(ids: torch.Tensor) -> torch.Tensor:
    return lookup(ids[:, 0])


def of_the_first_in_each_place(ids: torch.Tensor) -> torch.Tensor:
    return lookup(ids[:, :1].expand(-1, 2))


@pytest.mark.parametrize(
    "forward", [within, hashed, longer, from_the_end, of_the_first, of_the_first_in_each_place]
)
@pytest.mark.parametrize("example", [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1], [3]])])
def test_a_model_that_takes_numbers_outside_of_the_table_has_no_range(
    forward: Callable[..., Any], example: torch.Tensor
) -> None:
    assert ranges_of_ids(lookup, example) == Values(0, 8)
    assert ranges_of_ids(forward, example) is None


def test_a_model_that_ends_its_process_on_a_number_outside_has_a_range() -> None:
    def crashing(ids: torch.Tensor) -> torch.Tensor:
        if int(ids.max()) > 8:
            os._exit(3)
        return lookup(ids)

    assert ranges_of_ids(crashing, torch.tensor([[1, 2]])) == Values(0, 8)
