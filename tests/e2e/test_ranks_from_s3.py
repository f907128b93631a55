"""A group of ranks whose weights stay in S3: what it downloads and answers, and why it does not load."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import Buckets, serve_buckets
from safetensors.torch import save

MODEL = """
import torch

class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*(self.block() for _ in range(4)))
        self.head = torch.nn.Linear(256, 4)

    def block(self):
        return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))

    def forward(self, x):
        return self.head(self.blocks(x))
"""
HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler

class RowsHandler(BaseHandler):
    def preprocess(self, data):
        return torch.tensor([row["body"] for row in data])
"""
ROW = [number / 256 for number in range(256)]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    space: dict[str, Any] = {}
    exec(MODEL, space)
    torch.manual_seed(8)
    made: torch.nn.Module = space["Layers"]()
    return made


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory, model: torch.nn.Module) -> Iterator[Buckets]:
    aws = tmp_path_factory.mktemp("aws")
    with pytest.MonkeyPatch.context() as patch, serve_buckets(patch, aws) as buckets:
        for key in ("weights/net.safetensors", "open/net.safetensors", "weights/closed.safetensors"):
            buckets.objects[key] = save(model.state_dict())
        buckets.objects["weights/short.safetensors"] = save(model.state_dict())[:-1]
        buckets.denied.add("weights/closed.safetensors")
        yield buckets


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that URLs of clients may name."""
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def server(buckets: Buckets, start_server: Any, shop: Path) -> Any:
    assert buckets.url  # its variables are set when the server starts
    properties = f"allowed_urls=file://{shop}/.*,s3://open/.*\n"
    return start_server("--disable-token-auth", "--enable-model-api", properties=properties)


def write_archive(folder: Path, name: str, weights: str, split: str = "tensor: 2") -> None:
    files = {"modelFile": "model.py", "handler": "handler.py", "configFile": "c.yaml"}
    described = {"modelName": name, "modelVersion": "1.0", **files}
    with zipfile.ZipFile(folder / f"{name}.mar", "w") as archive:
        archive.writestr("model.py", MODEL)
        archive.writestr("handler.py", HANDLER)
        archive.writestr("c.yaml", f"parallel: {{{split}, weights: {weights}}}\n")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": described}))


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_two_ranks_download_the_weights_once_and_answer_as_one_process(
    server: Any, store: Path, buckets: Buckets, model: torch.nn.Module, split: str
) -> None:
    write_archive(store, f"remote-{split}", "s3://weights/net.safetensors", f"{split}: 2")
    buckets.asked.clear()
    registered = server.register(f"remote-{split}.mar", initial_workers=1)
    assert registered.status == 200, registered.body
    content = buckets.objects["weights/net.safetensors"]
    header = 8 + int.from_bytes(content[:8], "little")
    parameters = dict(model.named_parameters())
    kept_whole = ("head.weight", "head.bias", *(f"blocks.{at}.2.bias" for at in range(4)))
    if split == "pipeline":
        kept_whole = ("head.weight", "head.bias")
    twice = sum(parameters[name].nbytes for name in kept_whole)
    assert sum(each.bytes for each in buckets.ranges()) == len(content) + header + twice
    body = json.dumps(ROW).encode()
    answer = server.call("POST", f"/predictions/remote-{split}", body, content_type="application/json")
    with torch.no_grad():
        wanted = model(torch.tensor([ROW]))[0].tolist()
    assert answer.json() == pytest.approx(wanted, abs=1e-4)
    assert "of weights from s3://weights/net.safetensors in" in server.log().split("rank 1: 2.")[-1]


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ("s3://weights/none.safetensors", "there is no such object; S3 answered 404"),
        ("s3://weights/closed.safetensors", "the credentials of the server do not open it; S3 answered 403"),
        ("s3://weights/short.safetensors", "bytes, and its header speaks of"),
        (
            "s3://weights/folder",
            "expected .metadata of torch.distributed.checkpoint or model.safetensors.index",
        ),
    ],
)
def test_weights_that_can_not_be_read_fail_the_load_with_url_and_reason(
    server: Any, store: Path, weights: str, text: str
) -> None:
    write_archive(store, "refused", weights)
    refused = server.register("refused.mar", initial_workers=1)
    assert refused.status == 500
    assert weights in refused.body.decode()
    assert text in refused.body.decode()


def test_an_archive_from_a_url_may_name_an_allowed_bucket_only(server: Any, store: Path, shop: Path) -> None:
    write_archive(shop, "stranger", "s3://weights/net.safetensors")
    refused = server.register(f"file://{shop}/stranger.mar", initial_workers=1)
    assert refused.status == 400
    assert "no client may name them: s3://weights/net.safetensors" in refused.body.decode()
    assert not (store / "stranger.mar").exists()
    write_archive(shop, "friend", "s3://open/net.safetensors")
    assert server.register(f"file://{shop}/friend.mar", initial_workers=1).status == 200
