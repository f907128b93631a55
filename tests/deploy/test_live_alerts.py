"""Every alert fires on a real Prometheus that scrapes a real server in trouble; minutes are seconds."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from servers import PROPERTIES as ANY_PORTS

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from harness.cgroup import CpuGroup, cpu_group
from harness.errors import Unavailable

# Each model is a kind of trouble. `thread` and `process` have two executors of 50 ms and a queue of four.
BUSY = """
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep(0.05 * len(data))
    return ["ok"] * len(data)
"""
HANDLERS = {
    "thread": BUSY,
    "process": BUSY,
    "slow": BUSY.replace("0.05", "1.2"),
    "hangs": BUSY.replace("0.05", "60"),
    "fails": "def handle(data, context):\n    return data and 1 / 0\n",
    # Ends its process, and can't be loaded again.
    "dies": """
import os

def handle(data, context):
    if data is None:
        if os.path.exists("FLAG"):
            raise RuntimeError("as asked")
        return None
    open("FLAG", "w").close()
    os._exit(1)
""",
    "broken": "raise RuntimeError('as asked')\n",
}
CONFIGURED = {
    "thread": "isolation: thread\njobQueueSize: 4\n",
    "process": "isolation: process\njobQueueSize: 4\n",
    "hangs": "minWorkers: 1\nmaxWorkers: 1\nresponseTimeout: 4\n",
    "dies": "minWorkers: 1\nmaxWorkers: 1\nmaxRetryTimeoutInSec: 8\n",
}
BOTH = ("thread", "process")
# What this machine's disk, memory and GPU do not do.
HOST = """
for name in ("MemoryUtilization", "DiskUtilization"):
    print(f"{name}.Percent:99|#Level:Host|#hostname:elsewhere,1700000000")
print("GPUMemoryUtilization.Percent:99|#Level:Host,DeviceId:0|#hostname:elsewhere,1700000000")
"""
PROPERTIES = f"""{ANY_PORTS.replace("per_model=1", "per_model=2")}certificate_file=cert.pem
private_key_file=key.pem
system_metrics_cmd=host.py
metric_time_interval=1
max_request_size=200000000
drain_timeout_s=0.5
"""


class Load:
    """Clients of one model that send their next request when they have an answer, as many as are wanted."""

    def __init__(self, server: Any, model: str) -> None:
        self._server = server
        self._model = model
        self._wanted = 0
        self._threads: list[threading.Thread] = []

    def clients(self, count: int) -> None:
        """Have so many from now on."""
        self._wanted = count
        while len(self._threads) < count:
            self._threads.append(threading.Thread(target=self._send, args=(len(self._threads),)))
            self._threads[-1].start()

    def stop(self) -> None:
        """Let all end."""
        self._wanted = 0
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _send(self, place: int) -> None:
        while place < self._wanted:
            try:
                self._server.predict(model=self._model)
            except (OSError, http.client.HTTPException):  # refused, failed or too late
                time.sleep(0.02)  # as a client does; at once, refusals would take all of the processor


class Upload:
    """A client that sends one large body, a part of 100 kB at a time: the server grows by as much."""

    def __init__(self, address: str, size: int) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self._connection.putrequest("POST", "/predictions/slow")
        self._connection.putheader("Content-Length", str(size))
        self._connection.endheaders()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(size,))
        self._thread.start()

    def stop(self) -> None:
        """Give it up."""
        self._is_over.set()
        self._thread.join()
        self._connection.close()

    def _send(self, size: int) -> None:
        for _ in range(size // 100_000 - 1):
            self._connection.send(bytes(100_000))
            if self._is_over.wait(0.05):
                return


@pytest.fixture(scope="module")
def group() -> Iterator[CpuGroup | None]:
    """The control group of the server, without a limit; None where none can be made."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(cpu_group(None))
        except Unavailable:
            group = None
        yield group


@pytest.fixture(scope="module")
def server(
    group: CpuGroup | None,
    start_server: Callable[..., AbstractContextManager[Any]],
    certificate: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A server with all models; `broken` is not ready."""
    folder = tmp_path_factory.mktemp("troubled")
    (folder / "store").mkdir()
    for name, handler in HANDLERS.items():
        with zipfile.ZipFile(folder / f"store/{name}.mar", "w") as archive:
            archive.writestr("h.py", handler.replace("FLAG", str(folder / "flag")))
            archive.writestr("model-config.yaml", CONFIGURED.get(name, "minWorkers: 1\nmaxWorkers: 1\n"))
            model = {"modelName": name, "modelVersion": "1.0", "handler": "h.py:handle"}
            manifest = {"runtime": "python", "model": model | {"configFile": "model-config.yaml"}}
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
    (folder / "config.properties").write_text(PROPERTIES)
    (folder / "host.py").write_text(HOST)
    certificate(folder, days=10)
    ready = [f"{name}:1.0" for name in HANDLERS if name != "broken"]
    with start_server(folder, ready, *[group.command] if group else []) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(
    server: Any,
    start_prometheus: Callable[..., AbstractContextManager[Any]],
    tool: Callable[[str], str],
    root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A Prometheus with the rules: same series, same thresholds, and seconds for minutes and hours."""
    rules = (root / "k8s/chart/rules/torchere.yaml").read_text()
    for minutes, seconds in (
        *((r"for: \d+[mh]", "for: 1s"), (r"\[6h:1h\]", "[5s:1s]"), (r"offset 6h", "offset 5s")),
        *((r"\[10m\]", "[20s]"), (r"\[\d+[mh]\]", "[4s]")),
    ):
        rules = re.sub(minutes, seconds, rules)
    folder = tmp_path_factory.mktemp("prometheus")
    with start_prometheus(tool("prometheus"), folder, server, rules) as running:
        yield running


def eventually(prometheus: Any, expression: str, count: int = 1) -> None:
    """Wait until a query has so many samples."""
    limit_s = time.monotonic() + 40
    while len(prometheus.query(expression)) < count:
        if time.monotonic() > limit_s:
            pytest.fail(f"{expression}: not seen; {prometheus.query('ALERTS')}")
        time.sleep(0.1)


def firing(alert: str) -> str:
    return f'ALERTS{{alertname="{alert}", alertstate="firing"}}'


@pytest.fixture
def loads(server: Any) -> Iterator[dict[str, Load]]:
    """Clients of each model, none yet."""
    found = {name: Load(server, name) for name in HANDLERS}
    yield found
    for load in found.values():
        load.stop()


def test_saturation_goes_from_idle_to_refusing_and_back_and_its_alerts_with_it(
    prometheus: Any, loads: dict[str, Load]
) -> None:
    def both(expression: str) -> None:
        eventually(prometheus, f'sum by (model) ({expression}) and {{model=~"thread|process"}}', len(BOTH))

    def clients(count: int) -> None:
        for name in BOTH:
            loads[name].clients(count)

    both("torchere_saturation == 0")
    clients(1)
    both("avg_over_time(torchere_saturation[3s]) > 0.3 < 0.6")
    clients(2)
    both("min_over_time(torchere_saturation[3s]) > 0.7 < 1.2")
    assert prometheus.query(firing("TorchereQueueNearlyFull")) == []
    clients(8)
    both("torchere_saturation > 1.8")
    for alert in ("TorchereSaturated", "TorchereQueueNearlyFull", "TorchereRejects"):
        both(firing(alert))
    clients(0)
    both("torchere_saturation == 0")
    assert prometheus.query(firing("TorchereQueueNearlyFull")) == []


def test_alerts_of_models_fire_for_models_in_trouble(
    server: Any, prometheus: Any, loads: dict[str, Load]
) -> None:
    for model, clients in (("slow", 1), ("fails", 2), ("hangs", 3), ("dies", 1)):
        loads[model].clients(clients)
    upload = Upload(server.inference, 200_000_000)

    try:
        for model, alerts in {
            "broken": ["TorchereModelNotReady"],
            "fails": ["TorchereErrorBudgetBurn", "TorchereErrorBudgetBurnSlow"],
            "slow": ["TorchereLatencyHigh"],
            "hangs": ["TorchereQueueOld", "TorchereNoProgress"],
            "dies": ["TorchereExecutorRestartLoop", "TorchereExecutorGaveUp"],
        }.items():
            for alert in alerts:
                eventually(prometheus, f'{firing(alert)} and {{model="{model}"}}')
        for alert in (
            *("TorchereNotReady", "TorchereCertificateExpires", "TorchereMemoryGrows"),
            *("TorchereGpuMemoryHigh", "TorchereDiskFull", "TorchereHostMemoryLow"),
        ):
            eventually(prometheus, firing(alert))
    finally:
        upload.stop()


def test_alerts_of_the_server_fire_when_it_is_throttled_stopped_and_gone(
    server: Any, group: CpuGroup | None, prometheus: Any, loads: dict[str, Load]
) -> None:
    if group is not None:
        loads["fails"].clients(12)  # of 50 requests a second, which take more than a fifth of any core
        group.limit(0.2)
        eventually(prometheus, firing("TorchereCpuThrottled"))
        group.limit(None)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        eventually(prometheus, firing("TorchereDown"))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    eventually(prometheus, firing("TorchereEventLoopSlow"))
    prometheus.scrape_only()
    eventually(prometheus, firing("TorchereNoTargets"))


def test_no_alert_is_missing_here(rules: list[dict[str, Any]]) -> None:
    text = Path(__file__).read_text()
    assert [
        rule["alert"] for rule in rules if f'"{rule.get("alert", "record")}"' not in text and "alert" in rule
    ] == []
