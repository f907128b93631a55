"""The size and shape of the product: modules, lines, layers, circles; and the modules that a request passes.

    python tests/guards/house.py            sizes and imports, in seconds
    python tests/guards/house.py --walks    also the walks, measured on a server and on a packing

Exit status 1 if a figure is above its limit in `LIMITS`. A walk counts the modules of the product whose code
runs: for requests in the server's process only, from the socket to the frame for the worker and to the end
of the answer; the second of two equal requests, so that caches are filled.
"""

from __future__ import annotations

import asyncio
import graphlib
import io
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from types import FrameType

import grimp
import requests

ROOT = Path(__file__).parents[2]
PACKAGES = ("torchere.serving", "torchere.handlers", "torchere.archiver", "torchere.client")
LIMITS = {"layers": 12, "modules in a circle": 0}
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.classes = torch.nn.Linear(288, 4)

    def forward(self, x):
        return self.classes(torch.relu(self.convolution(x)).flatten(1))
"""
SENDS = ("torchere.serving.workers.frames", "send")  # module and start of the name of the frame's sender


def sizes() -> dict[str, int]:
    """Modules of more than one line and their lines, without generated code."""
    rooms = [package.removeprefix("torchere.") for package in PACKAGES]
    listed = subprocess.run(
        ["git", "ls-files", "--", *rooms], cwd=ROOT, capture_output=True, text=True, check=True
    )
    counted = {
        name: len((ROOT / name).read_text(encoding="utf-8").splitlines())
        for name in listed.stdout.splitlines()
        if name.endswith(".py") and not name.endswith("_pb2.py")
    }
    counted = {name: lines for name, lines in counted.items() if lines > 1}
    return {"modules": len(counted), "lines": sum(counted.values())}


def room_of(module: str) -> str:
    """Return the room of a module: a child of `torchere.serving`, or another package."""
    parts = module.split(".")
    return ".".join(parts[:3]) if module.startswith("torchere.serving.") else ".".join(parts[:2])


def layers(graph: grimp.ImportGraph) -> list[str]:
    """Return the longest chain of rooms from the command line downwards; imports for types count, too."""
    below: dict[str, set[str]] = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if room_of(module) != room_of(imported):
                below.setdefault(room_of(module), set()).add(room_of(imported))

    @cache
    def chain(room: str) -> tuple[str, ...]:
        return (room, *max((chain(each) for each in sorted(below.get(room, ()))), key=len, default=()))

    return list(chain("torchere.serving.commands"))


def circle(graph: grimp.ImportGraph) -> list[str]:
    """Return the modules of one circle, which import each other in turn; empty if there is no circle."""
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        found: list[str] = error.args[1]
        return found[1:]  # it begins and ends with the same module
    return []


class Walk:
    """The modules of the product whose code ran, in the order of their first call."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.until_frame = 0  # modules before the first frame was sent to a worker; 0: none was sent

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """Take one event of `sys.setprofile`."""
        if event != "call":
            return
        name = frame.f_globals.get("__name__", "")
        if name.startswith(PACKAGES):
            self.modules.setdefault(name)
            if not self.until_frame and name == SENDS[0] and frame.f_code.co_name.startswith(SENDS[1]):
                self.until_frame = len(self.modules)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the calls of this thread, and of threads that start meanwhile."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def packed(folder: Path, walk: Walk | None = None, *options: str) -> None:
    """Pack a small convolutional network for the handler `tensor`, as `net.mar` in the folder."""
    import torch

    from torchere.serving.commands.cli import main

    (folder / "net.py").write_text(MODEL)
    torch.save(torch.rand(2, 3, 8, 8), folder / "example.pt")
    command = ["archive", "--model-name", "net", "--model-file", str(folder / "net.py"), "--force"]
    command += ["--format", "torchscript"]
    command += ["--example", str(folder / "example.pt"), "--export-path", str(folder), *options]
    with (
        walk.noting() if walk else nullcontext(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        status = main(command)
    if status:
        raise SystemExit(f"packing ended with status {status}")


def posted(url: str, body: bytes | None = None) -> None:
    """Send a POST request; a refusal ends the script with its text."""
    headers = {"Content-Type": "application/json"} if body else {}
    answer = requests.post(url, body, headers=headers, timeout=60)
    if not answer.ok:
        raise SystemExit(f"{url}: {answer.status_code} {answer.text}")


def called(address: str, tensor: list[float]) -> None:
    """Call `ModelInfer` of the v2 protocol over gRPC."""
    import grpc

    from torchere.serving.frontend.grpc.protos import open_inference_pb2 as v2

    inputs = v2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 3, 8, 8])
    inputs.contents.fp32_contents.extend(tensor)
    request = v2.ModelInferRequest(model_name="net", inputs=[inputs])
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            v2.ModelInferRequest.SerializeToString,
            v2.ModelInferResponse.FromString,
        )
        call(request, timeout=60)


async def request_walks(folder: Path) -> dict[str, Walk]:
    """Serve the packed model, and walk through a prediction of each protocol and through a registration."""
    from torchere.serving.config.server_settings import Address, ServerSettings
    from torchere.serving.server import Server

    settings = ServerSettings(
        model_store=folder,
        temp_dir=folder,
        inference_address=Address(),
        management_address=Address(),
        metrics_address=None,
        grpc_inference_address=Address(),
        grpc_management_address=None,
        token_auth_enabled=False,
        model_api_enabled=True,
        system_metrics_enabled=False,
    )
    server = Server(settings)
    ends = await server.start()
    management, inference = (f"http://127.0.0.1:{ends.rest[api].port}" for api in ("management", "inference"))
    grpc_address = f"127.0.0.1:{ends.grpc['inference'].port}"
    tensor = [0.5] * 192
    picture = [[[0.5] * 8] * 8] * 3
    v2_input = {"name": "x", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": tensor}
    rest, v2 = json.dumps({"x": picture}).encode(), json.dumps({"inputs": [v2_input]}).encode()
    walks: dict[str, Walk] = {}

    async def walk(name: str, send: Callable[[], object], warmed: bool = True) -> None:
        if warmed:
            await asyncio.to_thread(send)
        walks[name] = Walk()
        with walks[name].noting():
            await asyncio.to_thread(send)

    try:
        registered = f"{management}/models?url=net.mar&initial_workers=1&synchronous=true"
        await walk("register over REST", lambda: posted(registered), warmed=False)
        await walk("prediction over REST", lambda: posted(f"{inference}/predictions/net", rest))
        infer = f"{inference}/v2/models/net/infer"
        await walk("v2 tensor over REST", lambda: posted(infer, v2))
        await walk("v2 tensor over gRPC", lambda: called(grpc_address, tensor))
    finally:
        await server.stop()
    return walks


def print_walks(names_too: bool) -> None:
    """Measure the walks and print the number of modules of each."""
    with tempfile.TemporaryDirectory() as folder:
        packed(Path(folder))
        walks = asyncio.run(request_walks(Path(folder)))
        walks["archive --quantize int8-static"] = Walk()
        samples = (
            "--quantize",
            "int8-static",
            "--samples",
            f"{folder}/example.pt",
            "--accept-drift",
            "--accept-slower",
        )
        packed(Path(folder), walks["archive --quantize int8-static"], *samples)
    for name, walk in walks.items():
        until = f", {walk.until_frame} until the worker's frame" if walk.until_frame else ""
        print(f"{name:<34} {len(walk.modules):>5} modules{until}")
        if names_too:
            print("    " + "\n    ".join(module.removeprefix("torchere.") for module in walk.modules))


def main(argv: list[str]) -> int:
    """Print the figures; see the module."""
    graph = grimp.build_graph(*PACKAGES)
    chain, loop = layers(graph), circle(graph)
    figures = {**sizes(), "layers": len(chain), "modules in a circle": len(loop)}
    for name, value in figures.items():
        limit = f"   (at most {LIMITS[name]})" if name in LIMITS else ""
        print(f"{name:<34} {value:>5}{limit}")
    print("longest chain: " + " > ".join(room.removeprefix("torchere.") for room in chain))
    if loop:
        print("circle: " + " > ".join(loop))
    if "--walks" in argv:
        print_walks("--names" in argv)
    return 1 if any(figures[name] > limit for name, limit in LIMITS.items()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
