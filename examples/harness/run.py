"""The frame of an example: its arguments, its server, and its exit status."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import requests

from examples.harness.errors import ExampleFailed
from examples.harness.server import Ports, Server, started
from torchere.archiver.errors import ModelRefused
from torchere.client import ClientError

DEMO = Path(__file__).resolve().parents[2] / ".demo"


def main(name: str, run: Callable[[Path], None]) -> int:
    """Run an example in its work folder; the exit status is 0 when all is as it says.

    Args:
        name: of its folder in `.demo`.
        run: takes the work folder.
    """
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}.demo")
    parser.add_argument("--work", type=Path, default=DEMO / name, help="where to work (default: %(default)s)")
    work: Path = parser.parse_args().work.resolve()
    (work / "store").mkdir(parents=True, exist_ok=True)
    return status_of(lambda: run(work), work / "run")


def status_of(action: Callable[[], None], run_folder: Path) -> int:
    """Run the action; 1 and a line that says why when it fails, 130 when Ctrl+C or SIGTERM ends it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        action()
    except KeyboardInterrupt:
        print("\nstopped before it was over", file=sys.stderr)
        return 130
    except (ExampleFailed, ModelRefused) as error:
        print(f"\nfailed: {error}", file=sys.stderr)
    except (ClientError, requests.RequestException, grpc.RpcError) as error:
        print(f"\nfailed: the server refused: {error}; see {run_folder}/server.log", file=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"\nfailed: {error}", file=sys.stderr)
    else:
        return 0
    return 1


@contextlib.contextmanager
def served(work: Path, model: str) -> Iterator[Server]:
    """`{model}.mar` of the work folder's store on a server of its own, which is stopped in order.

    Raises:
        ServerFailed: it did not start, did not become ready, or did not end in order.
    """
    with started(work / "run", work / "store", [f"{model}={model}.mar"], Ports.free()) as server:
        server.wait_until_ready(model)
        print(f"serving  {server.url(server.ports.inference, f'/predictions/{model}')}", end="")
        print(f", gRPC on port {server.ports.grpc_inference}", flush=True)
        yield server
        print(f"stopped  by SIGTERM in {server.stop():.1f} s, exit status 0")
