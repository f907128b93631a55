"""Two registered versions with the same weights: in memory once, and neither can do the other any harm."""

import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

WIDTH = 1024  # one square float32 layer has 4 MiB
SIGNATURE = {
    "version": 1,
    "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, WIDTH]}],
    "outputs": [{"name": "output", "datatype": "FP32", "shape": [-1, WIDTH]}],
}
OWN = """
import os
import torch
from torchere.handlers import BaseHandler

class Own(BaseHandler):
    def handle(self, data, context):
        path = self.model_pt_path
        if data[0].get("body") == b"wreck":
            with open(path, "r+b") as file:
                file.truncate(0)
        sums = self.model(torch.ones(1, WIDTH)).sum().item()
        return [{"sum": sums, "size": os.path.getsize(path)}] * len(data)
""".replace("WIDTH", str(WIDTH))


@pytest.fixture(scope="module")
def weights() -> bytes:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(WIDTH, WIDTH, bias=False).eval()), buffer)
    return buffer.getvalue()


@pytest.fixture
def registered(open_server: Any) -> Iterator[Callable[[str], None]]:
    """Registers archives, each with one executor; takes them out again."""
    names: list[str] = []

    def register(archive: str) -> None:
        assert open_server.register(archive, initial_workers=1, synchronous="true").status == 200
        names.append(archive.removesuffix(".mar"))

    yield register
    for name in names:
        open_server.call("DELETE", f"/models/{name}", api="management")


def mappings(pid: int, but: Collection[int] = ()) -> list[tuple[int, int]]:
    """Inode, and PSS in bytes, of each mapping of a `w.pt` in a process and its descendants.

    Inodes of `but` do not count: what a version that is gone has mapped is freed when Python gets to it.
    """
    found: list[tuple[int, int]] = []
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        inode = 0
        for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                inode = int(words[4]) if "/w.pt" in line else 0
            elif inode and inode not in but and words[0] == "Pss:":
                found.append((inode, int(words[1]) * 1024))
    return found


def disk_type(folder: str) -> str:
    """The type of the file system that a folder is on."""
    mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    return next(mounts[str(place)] for place in (Path(folder), *Path(folder).parents) if str(place) in mounts)


def predict(server: Any, name: str, body: bytes) -> Any:
    reply = server.call("POST", f"/predictions/{name}", body, content_type="application/json")
    assert reply.status == 200, reply.body
    return reply.json()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_two_versions_under_a_built_in_handler_take_the_memory_of_one(
    open_server: Any, pack: Any, registered: Any, weights: bytes, isolation: str
) -> None:
    body = json.dumps({"instances": [[0.5] * WIDTH]}).encode()
    before = {inode for inode, _ in mappings(open_server.process.pid)}
    names = [f"built-in-{isolation}-{version}" for version in (1, 2)]
    files = {
        "w.pt": weights,
        "signature.json": json.dumps(SIGNATURE),
        "c.yaml": f"isolation: {isolation}\ndeviceType: cpu\n",
    }
    for name in names:
        registered(pack(name, files, handler="tensor", serializedFile="w.pt", configFile="c.yaml"))
    answers = [predict(open_server, name, body) for name in names]
    assert answers[0] == answers[1]
    held = mappings(open_server.process.pid, before)
    assert len(held) == 2
    assert len({inode for inode, _ in held}) == 1
    assert 0.9 * len(weights) < sum(pss for _, pss in held) < 1.1 * len(weights)
    open_server.call("DELETE", f"/models/{names[0]}", api="management")
    assert predict(open_server, names[1], body) == answers[0]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_handler_that_wrecks_its_weights_leaves_the_other_version_alone(
    open_server: Any, pack: Any, registered: Any, weights: bytes, isolation: str
) -> None:
    if disk_type(tempfile.gettempdir()) == "tmpfs":
        pytest.skip("versions with code of their own share nothing where a copy would be in memory")
    before = {inode for inode, _ in mappings(open_server.process.pid)}
    names = [f"own-{isolation}-{version}" for version in (1, 2)]
    files = {"own.py": OWN, "w.pt": weights, "c.yaml": f"isolation: {isolation}\ndeviceType: cpu\n"}
    for name in names:
        registered(pack(name, files, handler="own.py", serializedFile="w.pt", configFile="c.yaml"))
    expected = predict(open_server, names[1], b'"all is well"')
    assert predict(open_server, names[0], b'"all is well"') == expected
    assert expected["size"] == len(weights)
    held = mappings(open_server.process.pid, before)
    assert len(held) == 2
    assert len({inode for inode, _ in held}) == 1
    assert sum(pss for _, pss in held) < 1.1 * len(weights)
    wrecked = open_server.call("POST", f"/predictions/{names[0]}", b"wreck")
    assert wrecked.json()["size"] == 0
    assert predict(open_server, names[1], b'"all is well"') == expected
    open_server.call("PUT", f"/models/{names[1]}?min_worker=2&synchronous=true", api="management")
    more = mappings(open_server.process.pid, before)
    assert {inode for inode, _ in more} == {inode for inode, _ in held}
