"""TorchServe's console lines, for scripts that read its metrics there."""

from collections.abc import Callable
from typing import Any

HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Echo(BaseHandler):
    def initialize(self, context):
        self.context = context
        self.initialized = True
    def preprocess(self, data):
        return [bytes(row["body"]) for row in data]
    def inference(self, data):
        return data
    def postprocess(self, data):
        return data
"""


def scraped(line: str) -> float:
    """The value of a metric as TorchServe's benchmark script finds it in a line of the console."""
    return float(line.split("|", 1)[0].split(":")[3])


def test_the_metrics_are_in_the_console_as_torchserves_benchmark_reads_them(
    start_server: Callable[..., Any], pack: Callable[..., str]
) -> None:
    pack("echo", {"h.py": HANDLER}, handler="h.py")
    server = start_server(
        *("--disable-token-auth", "--models", "echo.mar", "--log-format", "torchserve"),
        properties="metrics_mode=log\n",
    )
    server.follow("echo:1.0 is ready")
    for _ in range(3):
        assert server.call("POST", "/predictions/echo", b"x").body == b"x"
    assert server.stop() == 0
    lines = server.log().splitlines()
    for metric in ("PredictionTime", "HandlerTime", "QueueTime", "WorkerThreadTime", "CPUUtilization"):
        values = [scraped(line) for line in lines if metric in line]
        assert len(values) >= (1 if metric == "CPUUtilization" else 3), metric
        assert all(value >= 0 for value in values)
