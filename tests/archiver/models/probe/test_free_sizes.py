"""Sizes that a model takes only some of: found, told, and kept by the server."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchere.archiver import open_archive
from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.inputs.sizes import TOKENS, FreeSize, parse_free_size, parse_range, sizes_of
from torchere.archiver.models.probe.derive import signature_of
from torchere.archiver.models.probe.free_sizes import with_other_sizes
from torchere.archiver.request import BuildOptions
from torchere.archiver.signature import Limit, Signature, TensorSpec, parse

Pack = Callable[..., Path]
Serve = Callable[..., list[Any]]
WAVE = (torch.rand(1, 64),)


class Shuffled(nn.Module):
    """A network of two halvings and two doublings with skips, which takes multiples of 4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = nn.functional.avg_pool1d(x[:, None], 4)[:, 0]
        return x + half.repeat_interleave(4, 1)


def positions(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(200.0)[: x.shape[1]]


def windowed(x: torch.Tensor) -> torch.Tensor:
    return x.unfold(1, 10, 1).mean(-1)


def hops(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[0], -1, 16).mean(-1)


MODELS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str]] = {
    "multiples": (Shuffled(), "x.1=1:", "x.1=4*k"),
    "multiples in a range": (Shuffled(), "x.1=10:999", "x.1=12:999:4"),
    "hops": (hops, "x:1=1:512", "x.1=16:512:16"),
    "at most": (positions, "x.1=1:512", "x.1=1:200"),
    "at least": (windowed, "x.1=1:512", "x.1=10:512"),
}


def free(text: str) -> FreeSize:
    return parse_free_size(text, ["x"])


@pytest.mark.parametrize("name", MODELS)
def test_a_range_that_a_model_takes_a_part_of_is_refused_with_that_part(name: str) -> None:
    run, asked, advice = MODELS[name]
    with pytest.raises(ModelRefused) as caught:
        signature_of(run, WAVE, ["x"], [free(asked)], probe_batch=False)
    option = str(caught.value).partition("it was found to run with --dynamic ")[2]
    assert option == advice
    found = signature_of(run, WAVE, ["x"], [free(option)], probe_batch=False)
    assert found.inputs[0].shape == (1, -1)
    assert found.outputs[0].shape[1] == -1


def test_a_model_of_one_size_says_to_leave_the_option_out() -> None:
    advice = r"found to run with 64 only: leave --dynamic x\.1 out, or, if an exported program .* fixed"
    with pytest.raises(ModelRefused, match=advice):
        signature_of(lambda x: x.reshape(-1, 64), WAVE, ["x"], [free("x.1=1:99")], probe_batch=False)


@pytest.mark.parametrize(
    ("rows", "advice"),
    [(3, "3 only: leave --dynamic x.0 out"), (2, "--dynamic x.0=1:2")],  # 1 is broadcast
)
def test_sizes_of_two_inputs_that_must_be_equal_say_to_name_them_together(rows: int, advice: str) -> None:
    example, sizes = (torch.rand(rows, 2), torch.rand(rows, 2)), [FreeSize("x_0", ((0, 0),), 1, 64)]
    with pytest.raises(ModelRefused, match=re.escape(f"to run with {advice}, or name all inputs of this")):
        signature_of(lambda x, y: x + y, example, ["x", "y"], sizes, probe_batch=False)


@pytest.mark.parametrize(("most", "found"), [(16, "1:16"), (5, "1:5"), (None, "5")])
def test_a_size_of_two_dimensions_is_refused_without_an_option_that_can_not_name_it(
    most: int | None, found: str
) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > most if most else x.shape[1] != 5:
            raise RuntimeError("no such size")
        return x + x.transpose(1, 2)

    sides = [FreeSize("sides", ((0, 1), (0, 2)), 1, 64)]
    with pytest.raises(ModelRefused) as caught:
        signature_of(run, (torch.rand(1, 5, 5),), ["x"], sides, probe_batch=False)
    said = str(caught.value).partition("it was found to run with ")[2]
    assert said.startswith(f"{found} only: if an exported program lets this size vary, export it")


def test_a_text_model_of_one_length_says_to_give_an_example() -> None:
    lengths = FreeSize(TOKENS, ((0, 1),), 1, 99)
    with pytest.raises(ModelRefused, match=r"found to run with 64 only: give --example, which fixes"):
        signature_of(lambda x: x.reshape(-1, 64), WAVE, ["x"], [lengths], probe_batch=False)


def test_outputs_that_vary_for_far_sizes_only_are_free() -> None:
    found = signature_of(
        lambda x: x[:, :: max(x.shape[1] // 100, 1)].new_zeros(1, math.ceil(x.shape[1] / 300)),
        WAVE,
        ["x"],
        [free("x.1=1:")],
        probe_batch=False,
    )
    assert found.outputs[0].shape == (1, -1)


def test_a_size_that_takes_more_memory_than_there_is_is_told_and_not_tried() -> None:
    said: list[str] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 500:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return x

    found = signature_of(run, WAVE, ["x"], [free("x.1=1:512")], probe_batch=False, say=said.append)
    assert found.inputs[0].limits == (Limit(1, 1, 512),)
    assert said == ["x.1 was not tried with 512, which takes more memory than there is"]


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("1:64", (1, 64, 1)),
        ("64:", (64, 2**31, 1)),
        ("32*k", (32, 2**31, 32)),
        ("64:1024:32", (64, 1024, 32)),
    ],
)
def test_ranges_have_steps_and_may_be_open(text: str, bounds: tuple[int, int, int]) -> None:
    assert parse_range(text, "it") == bounds
    assert FreeSize("it", ((0, 1),), *bounds).text == text


@pytest.mark.parametrize("text", ["64:1", "0:3", "33:63:32", "k*32", "32*", "5", ":5", "0*k", "1:9:0"])
def test_ranges_without_a_size_are_refused(text: str) -> None:
    with pytest.raises(ModelRefused, match=r"as 1:64, or 64: .* or 32\*k .* or 64:1024:32"):
        parse_range(text, "it")


def test_the_size_of_the_example_is_one_of_the_range() -> None:
    with pytest.raises(ModelRefused, match=r"in the example is 64; expected one of 48\*k"):
        sizes_of(BuildOptions(dynamic_sizes=("x.1=48*k",)), ["x"], WAVE)


def test_limits_and_what_is_no_batch_survive_the_file() -> None:
    spec = TensorSpec("x", "FP32", (-1, -1), (Limit(0, 1, 64), Limit(1, 32, None, 32)))
    whole = Signature((spec,), (TensorSpec("y", "FP32", (-1,)),), one_by_one=True)
    assert parse(whole.to_json()) == whole
    assert '"version": 2' in whole.to_json()
    assert '"version": 1' in Signature((spec,), (spec,)).to_json()


NET = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(1, 2, 8, stride=8)
        self.up = torch.nn.ConvTranspose2d(2, 1, 8, stride=8)

    def forward(self, x):
        return x + self.up(self.down(x))
"""


@pytest.mark.parametrize("model_format", ["torchscript", "export"])
def test_a_server_refuses_sizes_outside_of_the_declared_ones(
    pack: Pack, serve: Serve, tmp_path: Path, model_format: str
) -> None:
    (tmp_path / "net.py").write_text(NET)
    torch.save(torch.rand(2, 1, 16, 24), tmp_path / "x.pt")
    archive = pack(
        model_file=tmp_path / "net.py",
        model_format=model_format,
        example=tmp_path / "x.pt",
        dynamic_batch="1:4",
        dynamic_sizes=("x.2=8*k", "x.3=8:64:8"),
    )

    def answer(*sizes: int) -> Any:
        (found,) = serve(archive, [{"body": torch.zeros(sizes).tolist()}])
        return found

    assert len(answer(4, 1, 8, 64)) == 4
    for sizes, said in [
        ((5, 1, 8, 8), "expected dimension 0 to be 1 to 4"),
        ((1, 1, 12, 8), "expected dimension 2 to be a multiple of 8, at least 8"),
        ((1, 1, 8, 72), "expected dimension 3 to be a multiple of 8, 8 to 64"),
    ]:
        found = answer(*sizes)
        assert said in str(found), (found, type(found))


def test_requests_that_are_too_many_together_run_in_parts(pack: Pack, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text(
        "import torch\n\n\nclass Counts(torch.nn.Module):\n"
        "    def forward(self, x):\n        assert len(x) <= 4\n        return x * 2\n"
    )
    torch.save(torch.rand(2, 3), tmp_path / "x.pt")
    archive = pack(model_file=tmp_path / "counts.py", example=tmp_path / "x.pt", dynamic_batch="1:4")
    assert serve(archive, [{"body": [[float(i)] * 3] * 3} for i in range(3)]) == [
        [[2.0 * i] * 3] * 3 for i in range(3)
    ]
    assert serve(archive, [{"body": [float(i)] * 3} for i in range(6)]) == [[2.0 * i] * 3 for i in range(6)]


class Neighbours(nn.Module):
    """Adds to a square of each graph what lies on its other side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.transpose(1, 2)


def test_a_size_of_two_dimensions_of_an_input_changes_in_both(
    pack: Pack, serve: Serve, tmp_path: Path
) -> None:
    sides = torch.export.Dim("sides", min=1, max=64)
    sizes = {0: torch.export.Dim("batch", min=1, max=8), 1: sides, 2: sides}
    program = torch.export.export(Neighbours(), (torch.rand(2, 5, 5),), dynamic_shapes=(sizes,))
    torch.export.save(program, tmp_path / "net.pt2")
    archive = pack(serialized_file=tmp_path / "net.pt2")
    (found,) = parse(open_archive(archive).read_text("signature.json")).inputs
    assert found.shape == (-1, -1, -1)
    assert serve(archive, [{"body": [[[1.0, 2.0], [3.0, 4.0]]]}]) == [[[[2.0, 5.0], [5.0, 8.0]]]]


@pytest.mark.parametrize("model_format", ["keep", "export"])
def test_sizes_of_a_program_that_no_option_names_stay_free(
    pack: Pack, tmp_path: Path, model_format: str
) -> None:
    free = {0: torch.export.Dim("batch", min=1, max=8), 1: torch.export.Dim("length", min=1, max=16)}
    program = torch.export.export(nn.ReLU(), (torch.rand(2, 5),), dynamic_shapes=(free,))
    torch.export.save(program, tmp_path / "net.pt2")
    archive = pack(serialized_file=tmp_path / "net.pt2", model_format=model_format, dynamic_batch="1:4")
    (found,) = parse(open_archive(archive).read_text("signature.json")).inputs
    assert (found.shape, set(found.limits)) == ((-1, -1), {Limit(0, most=4), Limit(1, most=16)})


class Sums(nn.Module):
    """Adds the sums of the rows of two inputs."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) + y.sum(1, keepdim=True)


@pytest.mark.parametrize("model_format", ["keep", "export"])
@pytest.mark.parametrize(("given", "most"), [(None, 8), ("1:4", 4)])
@pytest.mark.parametrize("twice", [False, True])
def test_sizes_of_a_program_that_depend_on_each_other_are_those_of_the_example(
    pack: Pack, tmp_path: Path, model_format: str, given: str | None, most: int, *, twice: bool
) -> None:
    batch, length = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("length", min=2, max=16)
    other, size = (2 * length, 6) if twice else (length + 1, 4)
    shapes = ({0: batch, 1: length}, {0: batch, 1: other})
    program = torch.export.export(Sums(), (torch.rand(2, 3), torch.rand(2, size)), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "net.pt2")
    archive = pack(serialized_file=tmp_path / "net.pt2", model_format=model_format, dynamic_batch=given)
    found = parse(open_archive(archive).read_text("signature.json")).inputs
    assert [(one.shape, one.limits) for one in found] == [
        ((-1, 3), (Limit(0, most=most),)),
        ((-1, size), (Limit(0, most=most),)),
    ]


def test_points_that_are_no_batch_are_served_one_request_at_a_time(
    pack: Pack, serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "cloud.py").write_text(
        "import torch\n\n\nclass Cloud(torch.nn.Module):\n"
        "    def forward(self, points):\n        return points - points.mean(0)\n"
    )
    torch.save(torch.rand(5, 3), tmp_path / "x.pt")
    archive = pack(
        model_file=tmp_path / "cloud.py",
        model_format="torchscript",
        example=tmp_path / "x.pt",
        dynamic_sizes=("points.0=1:100",),
    )
    clouds = [torch.rand(count, 3) for count in (2, 7)]
    found = serve(archive, [{"body": cloud.tolist()} for cloud in clouds])
    for cloud, answer in zip(clouds, found, strict=True):
        torch.testing.assert_close(torch.tensor(answer), cloud - cloud.mean(0))


@pytest.mark.parametrize(
    ("model_format", "given", "most"),
    [("export", (), 100), ("export", ("points.0=1:",), None), ("torchscript", (), 100)],
)
def test_points_of_an_archive_stay_free_and_no_batch(
    pack: Pack, tmp_path: Path, model_format: str, given: tuple[str, ...], most: int | None
) -> None:
    class Cloud(torch.nn.Module):
        def forward(self, points: torch.Tensor) -> torch.Tensor:
            return points - points.mean(0)

    torch.jit.script(Cloud()).save(str(tmp_path / "cloud.pt"))
    points, output = TensorSpec("points", "FP32", (-1, 3), (Limit(0, most=100),)), ("output", "FP32", (-1, 3))
    signature = Signature((points,), (TensorSpec(*output),), one_by_one=True)
    (tmp_path / "signature.json").write_text(signature.to_json())
    archive = pack(
        serialized_file=tmp_path / "cloud.pt",
        model_format=model_format,
        example_signature=tmp_path / "signature.json",
        dynamic_sizes=given,
    )
    made = parse(open_archive(archive).read_text("signature.json"))
    limits = (Limit(0, most=most),) if most else ()
    assert made == replace(signature, inputs=(replace(points, limits=limits),))


def test_sizes_below_what_the_example_counts_to_are_tried_with_zeros() -> None:
    """Edges of an example name nodes that a smaller graph lacks."""

    def neighbours(nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])

    example = (torch.rand(6, 3), torch.tensor([[0, 5, 2, 3], [1, 2, 5, 4]]))
    sizes = [parse_free_size(text, ["nodes", "edges"]) for text in ("nodes.0=1:50", "edges.1=1:80")]
    made = signature_of(neighbours, example, ["nodes", "edges"], sizes, probe_batch=False)
    assert [spec.shape for spec in (*made.inputs, *made.outputs)] == [(-1, 3), (2, -1), (-1, 3)]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_numbers_are_tried_in_other_sizes(dtype: torch.dtype) -> None:
    example = (torch.tensor([[3, 0, 2, 1], [1, 2, 3, 0]]).to(dtype),)
    sizes = [parse_free_size("x.1=2:8", ["x"])]
    made = signature_of(lambda x: x.to(torch.float32), example, ["x"], sizes, probe_batch=False)
    assert [spec.shape for spec in (*made.inputs, *made.outputs)] == [(2, -1), (2, -1)]


def test_a_compiled_model_that_ends_its_process_on_a_wrong_number_is_not_given_one() -> None:
    def neighbours(nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        if edges.max() >= len(nodes):
            os.abort()
        return torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])

    example = (torch.rand(6, 3), torch.tensor([[0, 5, 2, 3], [1, 2, 5, 4]]))
    sizes = [parse_free_size(text, ["nodes", "edges"]) for text in ("nodes.0=1:50", "edges.1=1:80")]
    made = signature_of(neighbours, example, ["nodes", "edges"], sizes, probe_batch=False)
    assert [spec.shape for spec in made.outputs] == [(-1, 3)]


def test_where_sizes_may_vary_models_are_timed_in_a_second_one() -> None:
    sizes = [FreeSize("batch", ((0, 0),), 1, 8), FreeSize("width", ((0, 1),), 1, 64)]
    alike, differing = [(torch.zeros(2, 9),)] * 2, [(torch.zeros(2, 9),), (torch.zeros(2, 5),)]

    found = with_other_sizes(alike, sizes, nn.Identity())

    assert [tuple(one[0].shape) for one in found] == [(2, 9), (2, 9), (2, 11)]
    assert with_other_sizes(differing, sizes, nn.Identity()) == differing
    assert with_other_sizes(alike, sizes[:1], nn.Identity()) == alike


class Edges(nn.Module):
    """Takes rows of nodes, and edges between them."""

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return nodes[:, edges].sum(1)


def test_a_second_size_has_indices_that_are_valid_for_it_or_is_left_out() -> None:
    at_most = [FreeSize("nodes", ((0, 1),), 2, 9)]
    sample = (torch.rand(1, 9), torch.tensor([0, 4, 8]))

    _, (nodes, edges) = with_other_sizes([sample], at_most, Edges())

    assert (nodes.shape, edges.tolist()) == ((1, 8), [0, 4, 7])
    nines = (torch.rand(1, 9), torch.tensor([9.0]))  # no index: the model fails on it
    assert with_other_sizes([nines], at_most, Edges()) == [nines]
