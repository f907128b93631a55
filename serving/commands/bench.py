"""`torchere bench`: load-tests a model on a running server and reports throughput and latencies.

A small closed-loop client in Python, for a first measurement of a deployment. It uses much CPU time itself,
so use wrk or k6 on the machine of the server, or to measure maximum throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from torchere.archiver.arguments import described
from torchere.archiver.errors import plainly
from torchere.client.exchange import merged
from torchere.serving.commands.load_client import Client, ConnectionLost, Target, request_bytes
from torchere.serving.commands.requests import (
    REST_ADDRESS,
    add_body_arguments,
    add_server_arguments,
    advice,
    body_of,
    headers_of,
    key_of,
)

_REFRESH_S = 0.2
_PAUSE_S = 0.05  # after a lost connection, to limit the rate of reconnects


@dataclass(frozen=True, slots=True)
class Run:
    """One load test: each of `clients` clients sends `request` repeatedly for `seconds`."""

    target: Target
    request: bytes
    clients: int
    seconds: float
    timeout_s: float = 60.0  # for the responses that are pending at the end


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere bench` to `parser`."""
    text = "Load-test a model on a running server and print throughput, latencies and errors."
    described(parser, text, "torchere bench mlp --clients 32 --seconds 5 --file input.json")
    add_server_arguments(parser)
    add_body_arguments(parser, required=False)
    parser.add_argument(
        "--clients",
        type=_count,
        default=8,
        metavar="N",
        help="number of concurrent clients (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=_duration,
        default=10.0,
        metavar="S",
        help="duration of the test in seconds (default: %(default)g)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Run the load test and print the report; return 1 if a request got no 2xx response, or none was sent."""
    try:
        run = _plan(options)
    except (ValueError, OSError) as err:
        print(f"torchere bench: {plainly(err)}", file=sys.stderr)
        return 1
    shows_bar = sys.stderr.isatty()
    if not shows_bar:  # the terminal gets a bar that moves; a log, one line before the wait
        print(f"{run.clients} clients for {run.seconds:g} s: {run.target.url}", file=sys.stderr, flush=True)
    tally = Tally()
    started_s = time.perf_counter()
    try:
        elapsed_s = asyncio.run(_measure(run, tally, show=shows_bar))
    except KeyboardInterrupt:
        print(report(tally, time.perf_counter() - started_s, run.clients))
        raise
    print(report(tally, elapsed_s, run.clients))
    if not tally.latencies_s and (more := _advice(tally, options)):
        print(f"torchere bench: {more}", file=sys.stderr)
    return 0 if tally.latencies_s and not tally.errors else 1


def _advice(tally: Tally, options: argparse.Namespace) -> str:
    """Return the advice for the error that every request was answered with; "" if there were several."""
    address = options.address or REST_ADDRESS
    texts = {text for _, text in tally.errors}
    return advice(texts.pop(), address, options.model, key_of(options, address)) if len(texts) == 1 else ""


def _plan(options: argparse.Namespace) -> Run:
    """Create the load test that the arguments describe; raise ValueError for malformed ones."""
    address = options.address or REST_ADDRESS
    target = Target.parse(f"{address.rstrip('/')}/predictions/{quote(options.model)}")
    content_type, body = body_of(options)
    own = {"Content-Type": content_type} if content_type else {}
    given = headers_of(options.header)
    if "authorization" not in map(str.lower, given) and (key := key_of(options, address)):
        own["Authorization"] = f"Bearer {key.key}"
    request = request_bytes(target, body, merged(own, given))
    return Run(target, request, options.clients, options.seconds, options.timeout)


async def _measure(run: Run, tally: Tally, *, show: bool) -> float:
    """Run all clients and fill `tally`; return the seconds until the last response.

    Requests that have no response `timeout_s` after the end count as lost.
    """
    started_s = time.perf_counter()
    stop_s = started_s + run.seconds
    clients = [asyncio.ensure_future(_client(run, tally, stop_s)) for _ in range(run.clients)]
    ticker = asyncio.ensure_future(_show_progress(run.seconds, tally)) if show else None
    try:
        ended, late = await asyncio.wait(
            clients, timeout=run.seconds + run.timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for client in ended:
            client.result()
        for client in late:
            client.cancel()
            tally.add(LOST, run.seconds, b"given up long after the end")
    finally:
        if ticker is not None:
            ticker.cancel()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clear the progress bar before the report
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


PERCENTS = (50.0, 90.0, 99.0)
LOST = 0  # status of a request without a complete response
_BAR = 24  # characters
_MOST_TEXTS = 3  # texts shown per status
_MOST_TEXTS_KEPT = 100  # in total, because every text may be different
_MOST_CHARACTERS = 300  # per text
_OTHERS = "other texts"


@dataclass(slots=True)
class Tally:
    """The results of one load test. Not thread-safe.

    `latencies_s` holds latencies of 2xx responses only, in seconds: fast errors must not make a server look
    fast. `errors` counts all other requests by status and text.
    """

    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, status: int, latency_s: float, body: bytes = b"") -> None:
        """Count one request. If it got no response, `status` is `LOST` and `body` the cause."""
        if 200 <= status < 300:
            self.latencies_s.append(latency_s)
            return
        error = (status, refusal_text(body))
        is_kept = error in self.errors or len(self.errors) < _MOST_TEXTS_KEPT
        self.errors[error if is_kept else (status, _OTHERS)] += 1


def refusal_text(body: bytes) -> str:
    """Return the error text of a failed request as one line, from the JSON object or the raw body."""
    text = body.decode("utf-8", "backslashreplace")
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        said = (parsed.get("message") or parsed.get("error"), parsed.get("detail"))
        text = ": ".join(str(part) for part in said if part) or text
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values by the nearest-rank method.

    The result is the smallest value that at least `percent` % of the values do not exceed.

    Raises:
        ValueError: there are no values, or `percent` is not in the range above 0 up to 100.
    """
    if not ordered or not 0 < percent <= 100:
        raise ValueError(
            f"percentile {percent} of {len(ordered)} values; expected some, and 0 < percent <= 100"
        )
    return ordered[math.ceil(len(ordered) * percent / 100) - 1]


def report(tally: Tally, elapsed_s: float, clients: int) -> str:
    """Return the report as text."""
    answered = len(tally.latencies_s)
    lines = [
        f"{answered / elapsed_s:.1f} req/s   ({answered} answers in {elapsed_s:.1f} s, {clients} clients)"
    ]
    if answered:
        ordered = sorted(tally.latencies_s)
        shown = [f"p{percent:g} {percentile(ordered, percent) * 1000:.2f} ms" for percent in PERCENTS]
        lines.append("   ".join([*shown, f"max {ordered[-1] * 1000:.2f} ms"]))
    for status in sorted({status for status, _ in tally.errors}):
        texts = Counter({text: count for (of, text), count in tally.errors.items() if of == status})
        lines += [f"{count} x {_named(status)}{text and f': {text}'}" for text, count in _foremost(texts)]
    return "\n".join(lines)


def progress(elapsed_s: float, total_s: float, tally: Tally) -> str:
    """Return a line that overwrites the previous one, with progress bar, rate and errors so far."""
    done = min(1.0, elapsed_s / total_s)
    filled = round(done * _BAR)
    rate = len(tally.latencies_s) / elapsed_s if elapsed_s else 0.0
    errors = f", {tally.errors.total()} errors" if tally.errors else ""
    return f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {done:4.0%}  {rate:.0f} req/s{errors}   "


def _foremost(texts: Counter[str]) -> list[tuple[str, int]]:
    """Return the most frequent texts with their counts; the others are merged into one entry."""
    others = texts.pop(_OTHERS, 0)
    ordered = texts.most_common()
    others += sum(count for _, count in ordered[_MOST_TEXTS:])
    return ordered[:_MOST_TEXTS] + ([(_OTHERS, others)] if others else [])


def _named(status: int) -> str:
    return "no answer (connection lost)" if status == LOST else f"status {status}"
