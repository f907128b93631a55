"""What each part of a cold start costs: the start as it is, beside starts without one of its parts.

    python benchmarks/cold_start_parts.py STORE/large.mar STORE/tiny.mar [--bare WEIGHTS.pt] [--rounds N]

Each round starts one server after the other for each archive and each variant, on free ports, and asks its
probes every 2 ms: the time from the start of the process to the first 200 of /livez, and of /readyz. Printed
are medians and the range. Archives are packed with `isolation: process`; their files are in the page cache.
Variants patch functions before the command line runs, so none needs a flag in the server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.processes import sigterm_exits

POLL_S = 0.002
LAST_S = 120.0
SETTINGS = """
inference_address=http://127.0.0.1:{port}
management_address=http://127.0.0.1:0
metrics_address=http://127.0.0.1:0
grpc_inference_port=0
grpc_management_port=0
default_workers_per_model=1
disable_token_authorization=true
load_models={archive}
model_store={store}
"""
NOT_AHEAD = """
import contextlib
from torchere.serving.workers import spawn
spawn.fork_server_ahead = lambda settings: contextlib.nullcontext()
"""
TORCH_FIRST = "import torch"  # as servers did that ran models themselves
COLLECTING = """
from torchere.serving.workers import spawn
spawn._START = spawn._START.replace("gc.disable()", "gc.enable()")
"""
VARIANTS = {
    "as it is": "",
    "collecting garbage": COLLECTING,
    "fork server when needed": NOT_AHEAD,
    "torch in the server": TORCH_FIRST,
}
MAIN = "\nimport sys\nfrom torchere.serving.commands.cli import main\nsys.exit(main(sys.argv[1:]))"
BARE = "import sys, torch; m = torch.jit.load(sys.argv[1]).eval(); print('ready', flush=True)"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def status_of(port: int, path: str) -> int:
    """The status that a probe answers; 0 while nothing listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = client.recv(65536)
        return int(answer[9:12]) if answer else 0
    return 0


def started(archive: Path, patch: str) -> tuple[float, float]:
    """Seconds to the first answer of /livez, and to the first 200 of /readyz."""
    port = free_port()
    with sigterm_exits(), tempfile.TemporaryDirectory() as folder:
        text = SETTINGS.format(port=port, archive=archive.name, store=archive.parent)
        Path(folder, "c.properties").write_text(text)
        command = [sys.executable, "-c", patch + MAIN, "serve", "--ncs", "--ts-config", "c.properties"]
        with Path(folder, "log").open("w") as log:
            began_s = time.perf_counter()
            with subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment()) as process:
                try:
                    live_s = until(process, port, "/livez", began_s)
                    return live_s, until(process, port, "/readyz", began_s)
                finally:
                    process.send_signal(signal.SIGTERM)
                    process.wait(LAST_S)


def environment() -> dict[str, str]:
    """Ours, with modules compiled once, as an installation has them."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir(), "torchere-cold-start"))}


def until(process: subprocess.Popen[bytes], port: int, path: str, began_s: float) -> float:
    """Seconds from the start of the process until the probe answers 200."""
    while status_of(port, path) != 200:
        if process.poll() is not None or time.perf_counter() - began_s > LAST_S:
            raise SystemExit(f"the server did not answer {path}; it ended with {process.returncode}")
        time.sleep(POLL_S)
    return time.perf_counter() - began_s


def bare(weights: Path) -> float:
    """Seconds in which a process imports torch and loads the file."""
    began_s = time.perf_counter()
    command = [sys.executable, "-c", BARE, str(weights)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
    return time.perf_counter() - began_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path, help="archives in the folder that is the store")
    parser.add_argument("--bare", type=Path, help="a TorchScript file to load without a server")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    loads: list[float] = []
    started(options.archives[0].absolute(), "")  # compiles the modules
    for _ in range(options.rounds):
        for archive in options.archives:
            for name, patch in VARIANTS.items():
                times.setdefault((archive.stem, name), []).append(started(archive.absolute(), patch))
        if options.bare:
            loads.append(bare(options.bare))
    for (model, name), found in times.items():
        live, ready = zip(*found, strict=True)
        spread = f"{min(ready):.2f} to {max(ready):.2f}"
        print(
            f"{model:8} {name:24} /livez {statistics.median(live):.2f} s, "
            f"/readyz {statistics.median(ready):.2f} s ({spread})"
        )
    if loads:
        print(f"bare torch {statistics.median(loads):.2f} s ({min(loads):.2f} to {max(loads):.2f})")


if __name__ == "__main__":
    main()
