"""A rank's part of an archive's weights: what it reads, and how much memory that takes. Ranks are forked."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from buckets import Buckets, serve_buckets
from fakes import COUNTS_QUESTIONS_FOR_GPUS
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.convert.ranks import in_ranks
from torchere.archiver.models.load.s3 import Objects
from torchere.archiver.models.spread import join
from torchere.archiver.models.spread.weights import held_bytes
from torchere.archiver.split import Split
from torchere.handlers.archive_import import archive_at
from torchere.handlers.loading.parallel import import_libraries, load_part

CPU = torch.device("cpu")
MB = 1_000_000
WIDE = """
import torch

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(16))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]), persistent=False)
        self.counted = COUNTED

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale[0] + self.counted


def Layer():
    return torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of 134 MB, with its weights in safetensors and as torch.save writes them."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "wide.py").write_text(WIDE.replace("COUNTED", "0"))
    (folder / "computing.py").write_text(WIDE.replace("COUNTED", "float(self.layers[0][0].weight.sum()) * 0"))
    space: dict[str, Any] = {}
    exec(WIDE.replace("COUNTED", "0"), space)
    torch.manual_seed(1)
    state = space["Wide"]().state_dict()
    save_file(state, folder / "w.safetensors")
    torch.save(state, folder / "w.pth")
    return folder


def row() -> torch.Tensor:
    return torch.linspace(-1, 1, 512).reshape(1, -1)


def whole_answer(folder: Path) -> list[float]:
    def work(_rank: int) -> list[float]:
        with torch.inference_mode():
            weights = str(folder / "w.pth")
            split = Split(tensor=1)
            found: list[float] = load_part(archive_at(str(folder)), "wide.py", weights, split, CPU)(
                row()
            ).tolist()
            return found

    return in_ranks(1, work)[0]


class Peak:
    """The largest resident size of this process in the block, above that at its begin.

    Unlike PSS and USS it does not grow when a rank writes to a page that it shared with the others.
    """

    def __enter__(self) -> Peak:
        self._process, self._ended = psutil.Process(), threading.Event()
        self._before = self._resident()
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, self._resident() - self._before)

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


@pytest.mark.parametrize("weights", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("split", [Split(tensor=2), Split(pipeline=2), Split(tensor=2, pipeline=2)])
def test_a_rank_reads_its_own_part_and_never_holds_more(folder: Path, split: Split, weights: str) -> None:
    wanted = torch.tensor(whole_answer(folder))

    def work(_rank: int) -> tuple[int, float]:
        archive = archive_at(str(folder))
        with torch.inference_mode():
            join(split, CPU)  # what torch takes for its groups is not the model's
            with Peak() as peak:
                model = load_part(archive, "wide.py", str(folder / weights), split, CPU)
            found = model(row())
            return peak.bytes, (found - wanted).abs().max().item()

    size = (folder / weights).stat().st_size
    assert size > 100 * MB
    for peak_bytes, difference in in_ranks(split.ranks, work):
        assert difference <= 1e-4
        # A half or a quarter is its share; the rest is code that runs for the first time.
        assert peak_bytes <= (0.7 if split.ranks == 2 else 0.5) * size


def test_a_small_file_that_is_read_and_not_mapped_keeps_its_weights(tmp_path: Path) -> None:
    source = WIDE.replace("COUNTED", "0").replace("2048", "64")
    (tmp_path / "wide.py").write_text(source.replace("range(16)", "range(2)"))
    space: dict[str, Any] = {}
    exec((tmp_path / "wide.py").read_text(), space)
    torch.manual_seed(1)
    model = space["Wide"]()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    assert (tmp_path / "w.pth").stat().st_size < 2**20
    wanted = model(row()).detach()

    def work(_rank: int) -> float:
        with torch.inference_mode():
            weights = str(tmp_path / "w.pth")
            part = load_part(archive_at(str(tmp_path)), "wide.py", weights, Split(tensor=2), CPU)
            difference: float = (part(row()) - wanted).abs().max().item()
            return difference

    assert max(in_ranks(2, work)) <= 1e-4


def test_a_class_that_computes_with_its_weights_is_made_with_them(folder: Path) -> None:
    wanted = torch.tensor(whole_answer(folder))

    def work(_rank: int) -> float:
        with torch.inference_mode():
            weights = str(folder / "w.safetensors")
            model = load_part(archive_at(str(folder)), "computing.py", weights, Split(tensor=2), CPU)
            return (model(row()) - wanted).abs().max().item()

    assert max(in_ranks(2, work)) <= 1e-4


# Weights that stay in S3. Threads of this process stand in for it.
WHILE_OTHERS_RUN = pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, and forks
SPLITS = [Split(tensor=2), Split(pipeline=2), Split(tensor=2, pipeline=2)]


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buckets]:
    aws = tmp_path_factory.mktemp("aws")
    with pytest.MonkeyPatch.context() as patch, serve_buckets(patch, aws) as buckets:
        Objects("s3://models/none").close()  # imports botocore, which each forked rank would do
        yield buckets


@pytest.fixture(scope="module")
def answer(folder: Path) -> torch.Tensor:
    return torch.tensor(whole_answer(folder))


@pytest.fixture(scope="module")
def uploaded(buckets: Buckets, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Buckets:
    """The weights of `folder` in all forms."""
    state = torch.load(folder / "w.pth")
    buckets.objects["models/w.safetensors"] = (folder / "w.safetensors").read_bytes()
    shards = tmp_path_factory.mktemp("shards")
    names = list(state)
    weight_map = {name: f"model-{at * 3 // len(names)}.safetensors" for at, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: state[name] for name in names if weight_map[name] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    buckets.put(shards, "models/shards")
    for name, ranks, dimension in (("by-one", 1, 0), ("by-four", 4, 0), ("by-columns", 2, 1)):
        saved = tmp_path_factory.mktemp(name)
        save_by_ranks(state, saved, ranks, dimension)
        buckets.put(saved, f"models/{name}")
    return buckets


def save_by_ranks(state: dict[str, torch.Tensor], folder: Path, ranks: int, dimension: int) -> None:
    """Save a checkpoint as ranks do that have a part of each weight."""

    def work(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        parts = {
            name: distribute_tensor(tensor, mesh, [Shard(min(dimension, tensor.dim() - 1))])
            if tensor.dim()
            else tensor
            for name, tensor in state.items()
        }
        save({"model": parts}, checkpoint_id=folder)

    in_ranks(ranks, work)


def loaded_from_s3(folder: Path, url: str, split: Split, client: str, device: torch.device = CPU) -> Any:
    """Return this rank's part of the model in `folder`; the rank is a client of its own."""
    os.environ["AWS_ACCESS_KEY_ID"] = f"{client}-{dist.get_rank()}"
    with torch.inference_mode():
        remote = Split(split.tensor, split.pipeline, split.plan, url)
        return load_part(archive_at(str(folder)), "wide.py", None, remote, device)


BOTH_WAYS = SPLITS[2]  # reads by the code of each way, in twice as many ranks: two forms are enough


@WHILE_OTHERS_RUN
@pytest.mark.parametrize(
    ("split", "weights"),
    [
        *itertools.product(SPLITS[:2], ["w.safetensors", "shards", "by-one", "by-four", "by-columns"]),
        *((BOTH_WAYS, weights) for weights in ("w.safetensors", "by-four")),
    ],
)
def test_a_rank_downloads_its_own_part_once_and_nothing_else(
    uploaded: Buckets, folder: Path, answer: torch.Tensor, split: Split, weights: str
) -> None:
    client = f"{split.tensor}-{split.pipeline}-{weights}"

    def work(_rank: int) -> tuple[int, int, float]:
        join(split, CPU)
        Objects("s3://models/w.safetensors").size("")  # botocore takes 33 MB
        with Peak() as peak:
            model = loaded_from_s3(folder, f"s3://models/{weights}", split, client)
        with torch.inference_mode():
            return peak.bytes, held_bytes(model), (model(row()) - answer).abs().max().item()

    size = (folder / "w.safetensors").stat().st_size
    for rank, (peak_bytes, held, difference) in enumerate(in_ranks(split.ranks, work)):
        assert difference <= 1e-4
        assert held <= 1.01 * size / split.ranks
        ranges = uploaded.ranges(f"{client}-{rank}")
        assert held <= sum(each.bytes for each in ranges) <= 1.01 * held + 200_000  # headers and indexes
        assert uploaded.read_twice(f"{client}-{rank}") == 0
        assert max(each.bytes for each in ranges) <= 8 << 20
        assert len(ranges) < 300
        buffers = 32 * MB if weights == "by-columns" else 0  # of whole rows, which are put together
        assert peak_bytes <= (0.7 if split.ranks == 2 else 0.5) * size + buffers


MIXED = """
import torch

class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(31, 6)  # three ranks have 11, 11 and 9 of the words
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6))
            for _ in range(4)
        )
        self.norm = torch.nn.BatchNorm1d(6)
        self.out = torch.nn.Linear(6, 31, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))
"""
FEATURES = {"words": "colwise_rep", "blocks.*.0": "colwise", "blocks.*.2": "rowwise"}


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], torch.Tensor]:
    """An archive, its weights in BF16, and the answer to `ids`."""
    (tmp_path / "wide.py").write_text(MIXED.replace("self.out.weight = self.words.weight", "pass"))
    space: dict[str, Any] = {}
    exec((tmp_path / "wide.py").read_text(), space)
    torch.manual_seed(5)
    model = space["Mixed"]()
    model.norm.running_mean.add_(0.25)
    model = model.to(torch.bfloat16).eval()
    with torch.inference_mode():
        return tmp_path, model.state_dict(), model.float()(ids())


def ids() -> torch.Tensor:
    return torch.arange(10)


@WHILE_OTHERS_RUN
@pytest.mark.parametrize("form", ["safetensors", "checkpoint"])
@pytest.mark.parametrize(
    "split", [Split(tensor=3, plan=FEATURES), Split(tensor=2, pipeline=2, plan=FEATURES)]
)
def test_odd_sizes_buffers_and_other_dtypes_come_as_they_are(
    buckets: Buckets, mixed: Any, split: Split, form: str, tmp_path: Path
) -> None:
    folder, state, wanted = mixed
    prefix = f"models/mixed-{form}-{split.ranks}"
    url = f"s3://{prefix}"
    if form == "safetensors":
        save_file(state, tmp_path / "w.safetensors")
        buckets.objects[f"{prefix}.safetensors"] = (tmp_path / "w.safetensors").read_bytes()
        url += ".safetensors"
    else:
        (tmp_path / "dcp").mkdir()
        save_by_ranks(state, tmp_path / "dcp", 2, 0)
        buckets.put(tmp_path / "dcp", prefix)

    def work(_rank: int) -> float:
        model = loaded_from_s3(folder, url, split, prefix)
        assert model.norm.weight.dtype == torch.float32
        with torch.inference_mode():
            return (model(ids()) - wanted).abs().max().item()

    assert max(in_ranks(split.ranks, work)) <= 1e-5


@WHILE_OTHERS_RUN
def test_a_weight_that_layers_share_is_stored_once_and_read_once(
    buckets: Buckets, mixed: Any, tmp_path: Path
) -> None:
    folder, state, _ = mixed
    (folder / "wide.py").write_text(MIXED)
    del state["words.weight"]
    save_file(state, tmp_path / "w.safetensors")
    buckets.objects["models/tied.safetensors"] = (tmp_path / "w.safetensors").read_bytes()

    def work(_rank: int) -> bool:
        model = loaded_from_s3(folder, "s3://models/tied.safetensors", Split(pipeline=2), "tied")
        stored = state["out.weight"].float()
        return model.words.weight is model.out.weight and torch.equal(model.out.weight, stored)

    assert in_ranks(2, work) == [True, True]


def refusal(folder: Path, url: str, split: Split = SPLITS[0], client: str = "refused") -> str:
    with pytest.raises(ModelRefused) as caught:
        in_ranks(split.ranks, lambda _: loaded_from_s3(folder, url, split, client) and None)
    return str(caught.value)


@WHILE_OTHERS_RUN
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"norm.weight": None}, "the checkpoint has no norm.weight"),
        ({"more.weight": torch.zeros(3)}, "the model has no more.weight; these are of another one"),
        ({"norm.weight": torch.zeros(7)}, "norm.weight has the shape (7,), and the model's (6,)"),
    ],
)
def test_weights_of_another_model_are_refused(
    buckets: Buckets, mixed: Any, tmp_path: Path, change: dict[str, torch.Tensor | None], text: str
) -> None:
    folder, state, _ = mixed
    save_file(
        {name: tensor for name, tensor in (state | change).items() if tensor is not None}, tmp_path / "w"
    )
    buckets.objects["models/other.safetensors"] = (tmp_path / "w").read_bytes()
    found = refusal(folder, "s3://models/other.safetensors", Split(pipeline=2))
    assert found.startswith("s3://models/other.safetensors: ")
    assert text in found


@WHILE_OTHERS_RUN
def test_ranks_that_read_different_versions_are_refused(buckets: Buckets, mixed: Any, tmp_path: Path) -> None:
    folder, state, _ = mixed
    save_file(state, tmp_path / "w")
    buckets.objects["models/one.safetensors"] = (tmp_path / "w").read_bytes()
    save_file({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "w")
    other = (tmp_path / "w").read_bytes()
    buckets.of_client["versions-1", "models/one.safetensors"] = other
    found = refusal(folder, "s3://models/one.safetensors", Split(pipeline=2), "versions")
    assert "models/one.safetensors: it has changed while it was read: ranks have different versions" in found


@pytest.mark.parametrize(
    "source",
    [
        WIDE.replace("COUNTED", "float(self.layers[0][0].weight.sum())"),
        WIDE.replace("COUNTED", "0").replace(
            "    def forward", "    def load_state_dict(self, *_: object) -> None: ...\n\n    def forward"
        ),
    ],
)
def test_a_class_that_needs_its_weights_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "wide.py").write_text(source)
    split = Split(tensor=2, weights="s3://models/w.safetensors")
    with pytest.raises(
        ModelRefused, match=r"wide.py computes with its weights when it is made, or loads them"
    ):
        load_part(archive_at(str(tmp_path)), "wide.py", None, split, CPU)


def test_weights_in_the_archive_and_in_s3_are_refused(folder: Path) -> None:
    split = Split(tensor=2, weights="s3://models/w.safetensors")
    with pytest.raises(
        ModelRefused, match=r"the archive has the weights w\.pth, and parallel.weights names s3:"
    ):
        load_part(archive_at(str(folder)), "wide.py", str(folder / "w.pth"), split, CPU)


# What a process that forks must not have called: CUDA and its like are of no use in the children then.
IMPORTS = (
    COUNTS_QUESTIONS_FOR_GPUS
    + """
from torchere.handlers.loading.parallel import import_libraries

assert "transformers" not in sys.modules
assert import_libraries(sys.argv[1], {}, {"parallel": {"tensor": 2}}, may_ask_driver=False)
assert "transformers" in sys.modules
assert (asked, threading.active_count()) == ([], 1)
"""
)


def test_on_a_machine_with_gpus_no_library_asks_for_them_before_the_ranks_are_forked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "model.safetensors").touch()
    command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("model", "config"),
    [({}, {}), ({"modelFile": "net.py"}, {"parallel": {"tensor": 2}}), ({}, {"parallel": {"tensor": 0}})],
)
def test_only_a_folder_for_transformers_makes_ranks_import_it(
    tmp_path: Path, model: dict[str, Any], config: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not import_libraries(str(tmp_path), model, config, may_ask_driver=True)
