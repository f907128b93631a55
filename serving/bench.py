"""`torchere bench`: puts load on a model of a running server, and says how it did.

A small closed-loop client in Python, for a first look at one's own deployment: it takes processor time of
its own, so on the server's machine, or for the last figure, use wrk or k6.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from torchere.archiver.errors import plainly
from torchere.serving.bench_client import Client, ConnectionLost, Target, request_bytes
from torchere.serving.bench_figures import LOST, Tally, progress, report

_REFRESH_S = 0.2
_LAST_ANSWERS_S = 300.0  # for what was sent before the end; a model may take TorchServe's 120 s, twice
_PAUSE_S = 0.05  # after a lost connection, so that a server that is down is not hammered


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement: `request` is sent over and over by each of `clients`."""

    target: Target
    request: bytes
    clients: int
    seconds: float


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("model", metavar="MODEL", help="name of the model, or name/version")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8080", help="inference address (default: %(default)s)"
    )
    parser.add_argument(
        "--clients", type=_count, default=8, metavar="N", help="at once (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=_duration, default=10.0, metavar="S", help="default: %(default)g")
    parser.add_argument("--body", type=Path, metavar="FILE", help="what to send (default: an empty body)")
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="may be repeated; for example 'Content-Type: application/json', 'Authorization: Bearer KEY'",
    )


def run_bench(options: argparse.Namespace) -> int:
    """Measure and print; status 1 when a request was not answered with a 2xx, or nothing could be sent.

    Ctrl+C prints what was measured until then.
    """
    try:
        run = plan(options)
    except (ValueError, OSError) as err:
        print(f"torchere bench: {plainly(err)}", file=sys.stderr)
        return 1
    tally = Tally()
    started_s = time.perf_counter()
    try:
        elapsed_s = asyncio.run(measure(run, tally, show=sys.stderr.isatty()))
    except KeyboardInterrupt:
        print(report(tally, time.perf_counter() - started_s, run.clients))
        raise
    print(report(tally, elapsed_s, run.clients))
    return 0 if tally.latencies_s and not tally.errors else 1


def plan(options: argparse.Namespace) -> Run:
    """What the arguments ask for.

    Raises:
        ValueError: the address or a header is not one.
        OSError: the body can't be read.
    """
    target = Target.parse(f"{options.url.rstrip('/')}/predictions/{quote(options.model)}")
    body = options.body.read_bytes() if options.body else b""
    return Run(
        target, request_bytes(target, body, _headers(options.header)), options.clients, options.seconds
    )


async def measure(run: Run, tally: Tally, *, show: bool) -> float:
    """Run all clients; fills `tally` and returns the seconds it took, to the last answer.

    What has no answer five minutes after the end counts as lost.
    """
    started_s = time.perf_counter()
    stop_s = started_s + run.seconds
    clients = [asyncio.ensure_future(_client(run, tally, stop_s)) for _ in range(run.clients)]
    ticker = asyncio.ensure_future(_show_progress(run.seconds, tally)) if show else None
    try:
        ended, late = await asyncio.wait(
            clients, timeout=run.seconds + _LAST_ANSWERS_S, return_when=asyncio.FIRST_EXCEPTION
        )
        for client in ended:
            client.result()
        for client in late:
            client.cancel()
            tally.add(LOST, run.seconds, b"given up long after the end")
    finally:
        if ticker is not None:
            ticker.cancel()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # the bar makes room for the report
    return time.perf_counter() - started_s


async def _client(run: Run, tally: Tally, stop_s: float) -> None:
    client = Client(run.target)
    while (sent_s := time.perf_counter()) < stop_s:
        try:
            status, body = await client.send(run.request)
        except ConnectionLost as err:
            status, body = LOST, str(err).encode()
            await asyncio.sleep(_PAUSE_S)
        tally.add(status, time.perf_counter() - sent_s, body)
    client.close()


async def _show_progress(seconds: float, tally: Tally) -> None:
    started_s = time.perf_counter()
    while True:
        print(progress(time.perf_counter() - started_s, seconds, tally), end="", file=sys.stderr, flush=True)
        await asyncio.sleep(_REFRESH_S)


def _headers(lines: list[str]) -> dict[str, str]:
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"the header is {line!r}; expected 'Name: value'")
        headers[name.strip()] = value.strip()
    return headers


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from 1")
    return int(text)


def _duration(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected seconds above 0 and below a day")
    return seconds
