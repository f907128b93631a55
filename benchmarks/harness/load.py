"""The same client for every contender: wrk for HTTP, h2load for gRPC. One at a time, on the same cores."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from harness.environments import need_tool
from harness.errors import Failed

_SCRIPT = Path(__file__).with_name("wrk.lua")
_GRPC_CALLS = Path(__file__).with_name("grpc_calls.py")
_FRAME_HEAD_BYTES = 5  # gRPC over HTTP/2: one byte "not compressed", four bytes length, big-endian


@dataclass(frozen=True, slots=True)
class Load:
    """What a load generator counted. Latencies in milliseconds, by percentile or "mean"."""

    per_second: float
    latency_ms: Mapping[str, float]
    requests: int  # that were answered
    client_cpu_us: float = 0.0  # the client's processor time a request; 0 where it does not say


def http_load(
    url: str,
    body: bytes,
    clients: int,
    seconds: float,
    content_type: str = "application/json",
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Load:
    """Closed loop: each of `clients` connections sends the next request when it has the last answer.

    Raises:
        Failed: one answer was not a 2xx or got lost; a figure with errors in it means nothing.
        Unavailable: wrk is not installed.
    """
    with tempfile.NamedTemporaryFile(suffix=".body") as file:
        file.write(body)
        file.flush()
        command = [need_tool("wrk", "wrk"), "-t1", f"-c{clients}", f"-d{seconds:g}s", "--timeout", "20s"]
        command += ["-s", str(_SCRIPT), url, "--", file.name, content_type]
        command += [f"{name}: {value}" for name, value in headers.items()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return wrk_result(done.stdout, done.stderr)


def wrk_result(output: str, complaints: str = "") -> Load:
    """Read what `wrk.lua` printed."""
    found = re.search(r"^JSON (.*)$", output, re.MULTILINE)
    if found is None:
        raise Failed(f"wrk printed no figures: {complaints or output}")
    counted = json.loads(found[1])
    bad = counted["bad_status"] + counted["lost"]
    if bad or not counted["requests"]:
        raise Failed(f"{bad} of {counted['requests']} requests were not answered with a 2xx")
    latency_ms = {key: value / 1000 for key, value in counted["latency_us"].items()}
    return Load(counted["requests"] / (counted["duration_us"] / 1e6), latency_ms, counted["requests"])


def grpc_load(
    address: str, method: str, message: bytes, *, connections: int, streams: int, seconds: float
) -> Load:
    """`connections` times `streams` calls of a unary method in flight; `method` is `/package.Service/Name`.

    h2load does not look into the answers: ask once with a real client before.

    Raises:
        Failed: calls failed.
        Unavailable: h2load is not installed.
    """
    with tempfile.NamedTemporaryFile(suffix=".grpc") as file:
        file.write(b"\0" + len(message).to_bytes(_FRAME_HEAD_BYTES - 1, "big") + message)
        file.flush()
        command = [
            need_tool("h2load", "nghttp2-client"),
            f"-c{connections}",
            f"-m{streams}",
            f"-D{seconds:g}",
        ]
        command += ["-d", file.name, "-H", "content-type: application/grpc", "-H", "te: trailers"]
        done = subprocess.run(
            [*command, f"http://{address}{method}"], capture_output=True, text=True, check=False
        )
    return h2load_result(done.stdout)


def deadline_load(
    address: str,
    method: str,
    message: bytes,
    *,
    connections: int,
    streams: int,
    seconds: float,
    answer_bytes: int,
) -> Load:
    """The same with another deadline in each call; see `grpc_calls.py`.

    Raises:
        Failed: a call failed, or was answered with fewer than `answer_bytes`.
    """
    with tempfile.NamedTemporaryFile(suffix=".grpc") as file:
        file.write(message)
        file.flush()
        command = [sys.executable, str(_GRPC_CALLS), address, method, file.name]
        command += [f"--connections={connections}", f"--streams={streams}", f"--seconds={seconds}"]
        command += [f"--answer-bytes={answer_bytes}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"calls failed: {done.stderr.strip()[-500:]}")
    return Load(**json.loads(done.stdout))


def h2load_result(output: str) -> Load:
    """Read h2load's report."""
    rate = re.search(r"finished in [\d.]+m?s, ([\d.]+) req/s", output)
    counts = re.search(r"requests: .* (\d+) done, .* (\d+) failed, (\d+) errored, (\d+) timeout", output)
    mean = re.search(r"time for request:\s+\S+\s+\S+\s+([\d.]+)(us|ms|s)\b", output)
    if rate is None or counts is None or mean is None:
        raise Failed(f"h2load printed no figures: {output[-500:]}")
    done, *lost = map(int, counts.groups())
    if any(lost) or not done or float(rate[1]) == 0:
        raise Failed(f"calls failed: {counts[0]}")
    scale = {"us": 0.001, "ms": 1.0, "s": 1000.0}[mean[2]]
    return Load(float(rate[1]), {"mean": float(mean[1]) * scale}, done)
