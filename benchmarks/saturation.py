"""Whether `torchere_saturation` is a signal to scale by: it must pass 1 before clients suffer, and come back.

    python benchmarks/saturation.py [--up 60] [--down 20] [--json FILE] [--svg FILE]

One server with two executors that are asleep 20 ms for each request, so that the client finds a core. First
its peak is measured by a closed loop. Then requests come at fixed moments, from a fifth of the peak up to
1.4 times of it, evenly faster for `--up` seconds, and at three tenths of it for `--down` seconds. The
gauge, a mean of the last five seconds, is read every quarter of a second from the metrics endpoint. Exit
status 1 when the p99 of a second was above `TARGET_MS` before the gauge had passed 1, or the gauge is above
`CALM` at the end.

`--svg` draws both against time, in an environment of its own with matplotlib (see `run.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.environments import environment
from harness.errors import Failed
from harness.paths import SCRIPTS
from harness.processes import free_ports, sigterm_exits

from torchere.serving.commands.bench import percentile
from torchere.serving.commands.load_client import Client, ConnectionLost, Target, request_bytes

EXECUTORS = 2
WORK_S = 0.02
TARGET_MS = 250.0  # p99 of a second
CALM = 0.7  # what the chart's autoscaler aims at
SAMPLE_S = 0.25
FROM, TO, REST = 0.2, 1.4, 0.3  # offered load over the peak
_PEAK_CLIENTS = 2 * EXECUTORS
_PEAK_S = 4.0
_START_S = 60.0
_HANDLER = f"""
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep({WORK_S})
    return ["ok"] * len(data)
"""


@dataclass(slots=True)
class Run:
    """What was seen; seconds count from the beginning of the ramp."""

    peak_rps: float = 0.0
    up_s: float = 0.0
    answers: list[tuple[float, float]] = field(default_factory=list)  # when sent, latency in ms
    refused: int = 0
    gauge: list[tuple[float, float]] = field(default_factory=list)  # when read, value


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows; None: it never happened."""

    saturated_s: float | None  # when the gauge passed 1
    slow_s: float | None  # when the p99 of a second passed the target
    end: float  # of the gauge

    @property
    def good(self) -> bool:
        """Whether the gauge warned in time, and calmed down."""
        in_time = self.saturated_s is not None and (self.slow_s is None or self.saturated_s < self.slow_s)
        return in_time and self.end < CALM


class Server:
    """`torchere serve` with the sleeping model on free loopback ports."""

    def __init__(self, folder: Path) -> None:
        self.port, self.metrics_port = free_ports(2)
        (folder / "store").mkdir()
        with zipfile.ZipFile(folder / "store" / "sleep.mar", "w") as archive:
            archive.writestr("handler.py", _HANDLER)
            model = {"modelName": "sleep", "modelVersion": "1.0", "handler": "handler.py:handle"}
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        (folder / "config.properties").write_text(
            f"inference_address=http://127.0.0.1:{self.port}\nmanagement_address=http://127.0.0.1:0\n"
            f"metrics_address=http://127.0.0.1:{self.metrics_port}\ngrpc_inference_port=0\n"
            f"grpc_management_port=0\nmodel_store=store\nload_models=all\n"
            f"default_workers_per_model={EXECUTORS}\ndisable_token_authorization=true\n"
        )
        command = [sys.executable, "-m", "torchere.serving", "serve", "--ncs", "--log-level", "WARNING"]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [*command, "--ts-config", "config.properties"], cwd=folder, stdout=self._log, stderr=self._log
        )

    def until_ready(self) -> None:
        """Wait for `/readyz`.

        Raises:
            Failed: the server ended, or it takes longer than a minute.
        """
        give_up_s = time.monotonic() + _START_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=5):
                    return
            except OSError as err:
                if self._process.poll() is not None or time.monotonic() > give_up_s:
                    raise Failed(f"the server does not get ready: {err}") from err
                time.sleep(0.1)

    def saturation(self) -> float:
        """The gauge, now."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics?name[]=torchere_saturation"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return float(answer.read().decode().split()[-1])

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


class Clients:
    """As many connections as there are requests at once."""

    def __init__(self, port: int, run: Run) -> None:
        self._target = Target.parse(f"http://127.0.0.1:{port}/predictions/sleep")
        self._request = request_bytes(self._target, b"x", {"Content-Type": "application/octet-stream"})
        self._run = run
        self._idle: list[Client] = []

    async def ask(self, began_s: float) -> bool:
        """One request, noted with its moment after `began_s`; False when it was not answered."""
        client = self._idle.pop() if self._idle else Client(self._target)
        sent_s = time.monotonic()
        try:
            reply = await client.send(self._request)
        except ConnectionLost:
            self._run.refused += 1
            return False
        self._idle.append(client)
        if reply.status != 200:
            self._run.refused += 1
            return False
        self._run.answers.append((sent_s - began_s, (time.monotonic() - sent_s) * 1000))
        return True

    async def peak_rps(self) -> float:
        """Answers a second to a closed loop."""
        stop_s = time.monotonic() + _PEAK_S

        async def one_client() -> int:
            count = 0
            while time.monotonic() < stop_s:
                count += await self.ask(0.0)
            return count

        return sum(await asyncio.gather(*(one_client() for _ in range(_PEAK_CLIENTS)))) / _PEAK_S

    async def ramp(self, began_s: float, up_s: float, down_s: float) -> None:
        """Requests at their moments, whatever has become of those before."""
        tasks = []
        at_s = 0.0
        while at_s < up_s + down_s:
            share = FROM + (TO - FROM) * at_s / up_s if at_s < up_s else REST
            at_s += 1 / (share * self._run.peak_rps)
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            tasks.append(asyncio.ensure_future(self.ask(began_s)))
        await asyncio.gather(*tasks)


async def measure(server: Server, up_s: float, down_s: float) -> Run:
    """The peak, then the ramp with the gauge read beside it."""
    run = Run(up_s=up_s)
    clients = Clients(server.port, run)
    run.peak_rps = await clients.peak_rps()
    run.answers.clear()
    run.refused = 0
    began_s = time.monotonic()
    load = asyncio.create_task(clients.ramp(began_s, up_s, down_s))
    while not load.done():
        value = await asyncio.to_thread(server.saturation)
        run.gauge.append((time.monotonic() - began_s, value))
        await asyncio.sleep(SAMPLE_S)
    await load
    return run


def p99_by_second(answers: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The p99 in ms of the requests sent in each second, at its end: nobody knows it earlier."""
    by_second: dict[int, list[float]] = {}
    for sent_s, latency_ms in answers:
        by_second.setdefault(int(sent_s), []).append(latency_ms)
    return [(second + 1.0, percentile(sorted(found), 99)) for second, found in sorted(by_second.items())]


def judge(run: Run) -> Verdict:
    """When the gauge warned, when clients suffered, and how it ended."""
    saturated = [at_s for at_s, value in run.gauge if value > 1]
    slow = [at_s for at_s, p99_ms in p99_by_second(run.answers) if p99_ms > TARGET_MS]
    return Verdict(min(saturated, default=None), min(slow, default=None), run.gauge[-1][1])


def draw(run: Run, path: Path) -> None:
    """Draw gauge and p99 against time.

    Raises:
        Unavailable: matplotlib can't be installed.
    """
    python = environment("plots") / "bin" / "python"
    figures = {
        "gauge": run.gauge,
        "p99": p99_by_second(run.answers),
        "offered": [[0, FROM], [run.up_s, TO], [run.up_s, REST], [run.gauge[-1][0], REST]],
        "target_ms": TARGET_MS,
    }
    command = [str(python), str(SCRIPTS / "draw_saturation.py"), str(path)]
    subprocess.run(command, input=json.dumps(figures), text=True, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and compare with the goal."""
    parser = argparse.ArgumentParser(description="Whether the saturation gauge warns before p99 suffers.")
    parser.add_argument("--up", type=float, default=60.0, help="seconds of rising load (default: 60)")
    parser.add_argument("--down", type=float, default=20.0, help="seconds of low load (default: 20)")
    parser.add_argument("--json", type=Path, help="write everything that was seen there")
    parser.add_argument("--svg", type=Path, help="draw it there")
    options = parser.parse_args(argv)
    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="torchere-saturation-") as folder:
        server = Server(Path(folder))
        try:
            server.until_ready()
            run = asyncio.run(measure(server, options.up, options.down))
        finally:
            server.stop()
    verdict = judge(run)
    print(f"peak                              {run.peak_rps:7.1f} requests a second")
    print(f"answered, refused                 {len(run.answers):7d}, {run.refused}")
    print(f"saturation above 1                {_moment(verdict.saturated_s)}")
    print(f"p99 of a second above {TARGET_MS:.0f} ms      {_moment(verdict.slow_s)}    goal: later, or never")
    print(f"saturation at the end             {verdict.end:7.2f}      goal: below {CALM}")
    if options.json:
        options.json.write_text(json.dumps({"run": asdict(run), "verdict": asdict(verdict)}))
    if options.svg:
        draw(run, options.svg)
    return 0 if verdict.good else 1


def _moment(at_s: float | None) -> str:
    return "  never" if at_s is None else f"{at_s:7.1f} s"


if __name__ == "__main__":
    sys.exit(main())
