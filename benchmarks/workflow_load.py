"""A workflow under a steady load: a diamond of four functions, 500 requests a second for a minute.

    python benchmarks/workflow_load.py [--rate 500] [--seconds 60]

Requests leave at their times whether or not earlier ones are answered. Each has a body of its own, and its
answer has to be made of that. The goal: every request is answered, as expected, and none takes a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from harness.arguments import whole_seconds
from harness.processes import free_ports, sigterm_exits

STALL_S = 1.0
FUNCTIONS = """
def value(row):
    return bytes(row.get("data") or row.get("body") or b"")

def start(data, context):
    return data and [value(row) for row in data]

def left(data, context):
    return data and [value(row) + b"<" for row in data]

def right(data, context):
    return data and [value(row) + b">" for row in data]

def join(data, context):
    return data and [bytes(row["left"]) + bytes(row["right"]) for row in data]
"""
SPEC = """
models:
  min-workers: 1
  max-workers: 1
  batch-size: 8
  max-batch-delay: 5
dag:
  start: [left, right]
  left: [join]
  right: [join]
"""
PROPERTIES = """
inference_address=http://127.0.0.1:{inference}
management_address=http://127.0.0.1:{management}
enable_metrics_api=false
grpc_inference_port=0
grpc_management_port=0
enable_model_api=true
disable_token_authorization=true
"""


def packed(store: Path) -> None:
    """Write the workflow's archive into the store."""
    manifest = {"workflow": {"workflowName": "diamond", "specFile": "w.yaml", "handler": "f.py"}}
    with zipfile.ZipFile(store / "diamond.war", "w") as archive:
        archive.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("w.yaml", SPEC)
        archive.writestr("f.py", FUNCTIONS)


async def started(client: aiohttp.ClientSession, management: str, limit_s: float = 60.0) -> None:
    """Register the workflow as soon as the server answers."""
    until_s = time.monotonic() + limit_s
    while True:
        try:
            async with client.post(f"{management}/workflows?url=diamond.war") as answer:
                if answer.status == 200:
                    return
                text = await answer.text()
        except aiohttp.ClientError as error:
            text = str(error)
        if time.monotonic() > until_s:
            raise SystemExit(f"the workflow is not served after {limit_s:g} s: {text}")
        await asyncio.sleep(0.2)


async def loaded(inference: int, management: int, rate: int, seconds: float) -> int:
    """Send the requests; print the outcome, and return the exit status."""
    took_s: list[float] = []
    wrong: list[str] = []

    async def ask(number: int) -> None:
        begun_s = time.monotonic()
        try:
            async with client.post(
                f"http://127.0.0.1:{inference}/wfpredict/diamond", data=b"%d" % number
            ) as answer:
                body = await answer.read()
        except aiohttp.ClientError as error:
            wrong.append(f"{number}: {error}")
            return
        took_s.append(time.monotonic() - begun_s)
        if answer.status != 200 or body != b"%d<%d>" % (number, number):
            wrong.append(f"{number}: {answer.status} {body[:200]!r}")

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as client:
        await started(client, f"http://127.0.0.1:{management}")
        await asyncio.gather(*(ask(number) for number in range(50)))  # opens connections, warms up
        took_s.clear()
        begun_s = time.monotonic()
        tasks = []
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, begun_s + number / rate - time.monotonic()))
            tasks.append(asyncio.create_task(ask(number)))
        sent_s = time.monotonic() - begun_s
        await asyncio.gather(*tasks)
    took_s.sort()
    stalls = sum(each >= STALL_S for each in took_s)
    print(
        f"{len(tasks):,} requests in {sent_s:.1f} s ({len(tasks) / sent_s:.0f}/s): {len(took_s):,} answered, "
        f"{len(wrong)} lost or wrong, {stalls} of {STALL_S:g} s or more"
    )
    print(
        f"p50 {took_s[len(took_s) // 2] * 1e3:.1f} ms, p99 {took_s[len(took_s) * 99 // 100] * 1e3:.1f} ms, "
        f"longest {took_s[-1] * 1e3:.1f} ms"
    )
    for line in wrong[:5]:
        print(f"  {line}")
    return int(bool(wrong or stalls or len(took_s) != len(tasks)))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, load, and judge."""
    parser = argparse.ArgumentParser(description="A workflow under a steady load.")
    parser.add_argument("--rate", type=int, default=500, help="requests a second (default: 500)")
    parser.add_argument("--seconds", type=whole_seconds, default=60, help="of load (default: 60)")
    asked = parser.parse_args(argv)
    inference, management = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="torchere-bench-") as folder:
        packed(Path(folder))
        config = Path(folder, "config.properties")
        config.write_text(PROPERTIES.format(inference=inference, management=management), encoding="utf-8")
        command = [
            str(Path(sys.executable).with_name("torchere")),
            "serve",
            "--ncs",
            "--log-level",
            "WARNING",
        ]
        command += ["--model-store", folder, "--ts-config", str(config)]
        with sigterm_exits():
            server = subprocess.Popen(command, cwd=folder)
            try:
                return asyncio.run(loaded(inference, management, asked.rate, asked.seconds))
            finally:
                server.terminate()
                server.wait()


if __name__ == "__main__":
    raise SystemExit(main())
