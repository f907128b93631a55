"""One server that is stopped and started again on the same ports, as a pod with a name is."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from harness.errors import Failed
from harness.processes import free_ports

DRAIN_DELAY_S = 2.0  # longer than endpoints take to hear of it, as docs/operations.md asks for
DRAIN_TIMEOUT_S = 20.0
START_S = 120.0
SLOW_S = 0.2
_LAST_WORDS = re.compile(r"stopped: (\d+) predictions accepted, (\d+) answered")
_HANDLER = f"""
import time

def handle(data, context):
    if data is None:
        return None
    rows = [bytes(row.get("body") or row.get("data")) for row in data]
    if any(row.startswith(b"slow") for row in rows):
        time.sleep({SLOW_S})
    return rows
"""


def write_store(folder: Path) -> Path:
    """A model store with `echo`: it gives back what it gets, and takes its time for what begins with slow."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "echo.mar", "w") as archive:
        archive.writestr("handler.py", _HANDLER)
        model = {"modelName": "echo", "modelVersion": "1.0", "handler": "handler.py:handle"}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    return folder


class Replica:
    """A server and its ports. `start`, `until_ready`, `terminate`, `until_gone`, again and again."""

    def __init__(self, name: str, folder: Path, store: Path) -> None:
        self.name = name
        self.rest_port, self.grpc_port = free_ports(2)
        self.restarts = 0
        self._folder = folder
        folder.mkdir()
        (folder / "config.properties").write_text(
            f"inference_address=http://127.0.0.1:{self.rest_port}\nmanagement_address=http://127.0.0.1:0\n"
            f"enable_metrics_api=false\ngrpc_inference_port={self.grpc_port}\ngrpc_management_port=0\n"
            f"model_store={store}\nload_models=all\ndefault_workers_per_model=2\njob_queue_size=1000\n"
            f"disable_token_authorization=true\ndrain_delay_s={DRAIN_DELAY_S}\n"
            f"drain_timeout_s={DRAIN_TIMEOUT_S}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it is not ready yet."""
        command = [sys.executable, "-m", "torchere.serving", "serve", "--ncs"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--ts-config", "config.properties"], cwd=self._folder, stdout=log, stderr=log
            )

    async def until_ready(self) -> None:
        """Ask `/readyz` as a kubelet does.

        Raises:
            Failed: the server ended, or is not ready after `START_S`.
        """
        give_up_s = time.monotonic() + START_S
        while not await asyncio.to_thread(self._is_ready):
            if self._process is None or self._process.poll() is not None or time.monotonic() > give_up_s:
                raise Failed(f"replica {self.name} does not get ready:\n{self.log()[-1500:]}")
            await asyncio.sleep(0.1)

    def terminate(self) -> None:
        """SIGTERM."""
        if self._process is not None:
            self._process.terminate()

    async def until_gone(self) -> float:
        """Wait for the end; returns the seconds it took.

        Raises:
            Failed: the exit status is not 0, or not everything that was accepted was answered.
        """
        began_s = time.monotonic()
        if self._process is None:
            return 0.0
        status = await asyncio.to_thread(self._process.wait, DRAIN_DELAY_S + DRAIN_TIMEOUT_S + 15)
        accepted, answered = _LAST_WORDS.findall(self.log())[-1]
        if status != 0 or accepted != answered:
            raise Failed(f"replica {self.name} ended with {status}: {accepted} accepted, {answered} answered")
        self.restarts += 1
        return time.monotonic() - began_s

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        """What it said so far, over all its lives."""
        return (self._folder / "log").read_text(errors="replace")

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()
