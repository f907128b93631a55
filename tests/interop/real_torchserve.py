"""Serves archives packed by torchere with the real TorchServe 0.12.0, and compares torchere's answers to its.

    python tests/interop/real_torchserve.py                  both servers, one after the other
    python tests/interop/real_torchserve.py --torchere URL   the inference address of a running torchere
    python tests/interop/real_torchserve.py --only-torchserve
    python tests/interop/real_torchserve.py --build-only     make TorchServe's environment and stop

Not collected by pytest: it installs TorchServe into `.peers/torchserve` (needs Java 17 or newer) and starts
servers. A running torchere must serve the archives of `--work DIR`, where they are left for it. Exit code 1
when TorchServe does not load an archive of ours, or when one answer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchere.archiver import ArchiveRequest, write_archive

ROOT = Path(__file__).resolve().parents[2]
HANDLER = ROOT / "tests" / "conformance" / "handlers" / "json_tensor.py"
PEER = ROOT / ".peers" / "torchserve"
# TorchServe does not name all that it imports, so they are named here.
PACKAGES = [
    "torch==2.13.0",
    "torchserve==0.12.0",
    "torch-model-archiver==0.12.0",
    "pyyaml",
    "psutil",
    "packaging",
    "pillow",
    "numpy",
    "requests",
    "aiohttp",
    "captum",
    "nvgpu",
    "enum-compat",
    "torchvision==0.28.0",  # of its image handlers
    "transformers==5.24.0",  # of some checks of its test suite
]
# torchvision's compiled operators may be for another build of torch than the one at hand. Image handlers need
# none of them, but its import fails where two are not declared.
DECLARED_OPERATORS = """
import sys


class Declaring:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            import torch

            Declaring.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                Declaring.library.define(schema)


sys.meta_path.insert(0, Declaring)
"""
FORMATS = {"default": "mlp.mar", "zip-store": "stored.mar", "tgz": "packed.tar.gz", "no-archive": "folder"}
START_S = 120.0
STOP_S = 30.0
FEATURES = 8


@dataclass(frozen=True, slots=True)
class Call:
    """One request; `body` None is a GET."""

    path: str
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, as far as clients depend on it; JSON bodies are compared as values."""

    status: int
    content_type: str
    body: object


def calls() -> list[Call]:
    """The same requests for both servers: every archive, every way to address it, and the common mistakes."""
    row = json.dumps({"x": [0.5] * FEATURES}).encode()
    models = [name.partition(".")[0] for name in FORMATS.values()]
    return [
        Call("/ping"),
        *[Call(f"/predictions/{model}", row) for model in models],
        *[Call(f"/predictions/{model}/1.0", row) for model in models],
        Call("/predictions/mlp/9.9", row),
        Call("/predictions/nobody", row),
        Call("/predictions/mlp", b'{"x": "not numbers"}'),
        Call("/predictions/mlp", b"{"),
        Call("/no-such-path"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; see the module for what the exit code says."""
    parser = argparse.ArgumentParser(description="Serve torchere's archives with the real TorchServe.")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--only-torchserve", action="store_true")
    parser.add_argument("--torchere", metavar="URL", help="inference address of a running torchere")
    parser.add_argument(
        "--work", type=Path, help="keep archives and logs there (default: a temporary folder)"
    )
    options = parser.parse_args(argv)
    build_peer()
    if options.build_only:
        return 0
    with tempfile.TemporaryDirectory(prefix="torchere-interop-") as folder:
        work = options.work or Path(folder)
        store = pack(work)
        with torchserve(work / "torchserve", store) as url:
            expected = [ask(url, call) for call in calls()]
        show("TorchServe 0.12.0", expected)
        served = all(answer.status == 200 for answer in expected[: 1 + 2 * len(FORMATS)])
        if not served or options.only_torchserve:
            return 0 if served else 1
        if options.torchere:
            found = [ask(options.torchere, call) for call in calls()]
        else:
            with torchere(work / "torchere", store) as url:
                found = [ask(url, call) for call in calls()]
    show("torchere", found)
    return report(expected, found)


def build_peer() -> None:
    """Make TorchServe's environment, once."""
    if (PEER / "bin" / "torchserve").exists():
        return
    print(f"building {PEER} (about a minute)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
    subprocess.run([str(PEER / "bin" / "pip"), "install", "-q", *PACKAGES], check=True)
    (packages,) = PEER.glob("lib/python3.*/site-packages")
    (packages / "declared_operators.py").write_text(DECLARED_OPERATORS)
    (packages / "declared_operators.pth").write_text("import declared_operators\n")


def pack(work: Path) -> Path:
    """Pack one tiny TorchScript model with its handler in every format; returns the model store."""
    import torch  # slow, and not needed to build or to show the help

    store = work / "store"
    store.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    torch.jit.script(layers.eval()).save(str(work / "tiny.pt"))
    for archive_format, name in FORMATS.items():
        write_archive(
            ArchiveRequest(
                model_name=name.partition(".")[0],
                version="1.0",
                handler=str(HANDLER),
                serialized_file=work / "tiny.pt",
                export_path=store,
                archive_format=archive_format,  # type: ignore[arg-type]  # the keys of FORMATS are formats
                force=True,
            )
        )
    return store


@contextmanager
def torchserve(place: Path, store: Path) -> Iterator[str]:
    """Run the real TorchServe and give its inference address."""
    # It starts Python by name, and writes logs and snapshots where it stands.
    environment = {**os.environ, "PATH": f"{PEER / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    command = [str(PEER / "bin" / "torchserve"), "--start", "--foreground", "--ncs", "--disable-token-auth"]
    with _server(place, store, command, environment) as url:
        yield url


@contextmanager
def torchere(place: Path, store: Path) -> Iterator[str]:
    """Run torchere and give its inference address."""
    command = [str(Path(sys.executable).with_name("torchere")), "serve", "--disable-token-auth"]
    with _server(place, store, command, dict(os.environ)) as url:
        yield url


@contextmanager
def _server(place: Path, store: Path, command: list[str], environment: dict[str, str]) -> Iterator[str]:
    place.mkdir(parents=True, exist_ok=True)
    ports = free_ports(5)
    (place / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{ports[0]}\n"
        f"management_address=http://127.0.0.1:{ports[1]}\n"
        f"metrics_address=http://127.0.0.1:{ports[2]}\n"
        f"grpc_inference_port={ports[3]}\n"
        f"grpc_management_port={ports[4]}\n"
        "default_workers_per_model=1\n"
        "disable_token_authorization=true\n"
    )
    models = [f"{name.partition('.')[0]}={name}" for name in FORMATS.values()]
    command = [*command, "--model-store", str(store), "--ts-config", str(place / "config.properties")]
    with open(place / "output.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--models", *models],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its workers share the group, so that none of them outlives this script
        )
    url = f"http://127.0.0.1:{ports[0]}"
    try:
        wait_until_healthy(url, process, place / "output.log")
        yield url
    finally:
        stop(process)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when every model answers; RuntimeError with the end of the log when that takes too long."""
    waiting = [f"/predictions/{name.partition('.')[0]}" for name in FORMATS.values()]
    row = json.dumps({"x": [0.0] * FEATURES}).encode()
    deadline_s = time.monotonic() + START_S
    while waiting:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server does not answer on {waiting}; its last words:\n{tail(log)}")
        with suppress(OSError):  # not listening yet
            waiting = [path for path in waiting if ask(url, Call(path, row)).status != 200]
        if waiting:
            time.sleep(0.2)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and every process of its group."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        print("the server does not end by itself; killing it", flush=True)
    with suppress(ProcessLookupError):  # nobody was left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask(url: str, call: Call) -> Answer:
    """Send one request; error statuses are answers too."""
    headers = {"Content-Type": "application/json"} if call.body is not None else {}
    request = urllib.request.Request(f"{url}{call.path}", call.body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            status, kind, body = response.status, response.headers["Content-Type"], response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, kind, body = error.code, error.headers["Content-Type"], error.read()
    try:
        return Answer(status, kind or "", json.loads(body))
    except ValueError:
        return Answer(status, kind or "", body.decode(errors="replace"))


def show(server: str, answers: list[Answer]) -> None:
    """Print every answer on one line."""
    print(f"== {server}")
    for call, answer in zip(calls(), answers, strict=True):
        print(f"{call.path:<28}{answer.status}  {answer.content_type:<18}{json.dumps(answer.body)[:120]}")


def report(expected: list[Answer], found: list[Answer]) -> int:
    """Print the differences; 1 when there is one."""
    pairs = [
        (call, want, got) for call, want, got in zip(calls(), expected, found, strict=True) if want != got
    ]
    for call, want, got in pairs:
        print(f"DIFFERENT {call}\n  TorchServe {want}\n  torchere   {got}")
    print(f"{len(expected) - len(pairs)} of {len(expected)} answers are the same")
    return 1 if pairs else 0


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


if __name__ == "__main__":
    sys.exit(main())
