"""What the book-keeping of one request costs: metrics, timeline, and its line in the access log.

    python benchmarks/telemetry.py [--requests 100000]

Runs what the server runs around each prediction and each batch, without a server, in batches of one, which is
the dearest case. Printed is the best of five runs in microseconds of processor time. The goal is for metrics
and timeline; tracing by OpenTelemetry is another matter, off unless asked for. Exit status 1: it is missed.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
import time
from collections.abc import Callable, Sequence

from torchere.serving.telemetry.access_lines import AccessLog
from torchere.serving.telemetry.logging import configure
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.timeline import Timeline

GOAL_US = 10.0  # for metrics and timeline of one request and its batch
LINES = 1000
_RUNS = 5


class _Request:
    """What a timeline reads from a request that waited."""

    def __init__(self) -> None:
        self.enqueued_s = self.dequeued_s = time.monotonic()
        self.company_s = 0.0
        self.stages_s = (1e-5, 1e-4, 1e-5, 1e-6)


class Work:
    """One request as the server counts it."""

    def __init__(self) -> None:
        self.metrics = Metrics("bench")
        self.meter = self.metrics.meter("model", "1.0")
        self.metrics.show(self.meter)
        logger = logging.getLogger("ACCESS_LOG")
        configure("INFO", True, io.StringIO())
        self.log = AccessLog(logger)
        self.waited = _Request()

    def request(self) -> Timeline:
        """From its head to its last byte."""
        timeline = self.metrics.timeline("rest", "id", time.monotonic())
        timeline.read_s = time.monotonic()
        self.meter.accepted(named=False)
        timeline.meter = self.meter
        timeline.answered(self.waited, time.monotonic())
        timeline.sending_s = time.monotonic()
        self.metrics.request_finished(200)
        timeline.finish(200)
        return timeline

    def batch(self) -> None:
        """A batch of one."""
        self.metrics.batch_finished(
            self.meter, size=1, executor_s=0.0008, handler_s=0.0005, succeeded_ids=lambda: ["id"]
        )

    def line(self) -> None:
        """Note a line for the access log, on the event loop."""
        self.log.add(("127.0.0.1", 1), b"POST /predictions/model HTTP/1.1", 200, time.monotonic())

    def lines(self) -> None:
        """A tenth of a second's lines at 10,000 a second: noted, and formatted and written by a thread."""
        for _ in range(LINES):
            self.line()
        self.log.flush()


def measure_us(action: Callable[[], object], count: int) -> float:
    """Processor time of one call, the best of `_RUNS`, in microseconds."""
    best = float("inf")
    for _ in range(_RUNS):
        started_s = time.process_time()
        for _ in range(count):
            action()
        best = min(best, time.process_time() - started_s)
    return best / count * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the goal."""
    parser = argparse.ArgumentParser(description="Processor time of the book-keeping of one request.")
    parser.add_argument("--requests", type=int, default=100_000, help="per run (default: 100000)")
    count = parser.parse_args(argv).requests // _RUNS
    work = Work()
    request_us, batch_us = measure_us(work.request, count), measure_us(work.batch, count)
    print(f"timeline and metrics of a request  {request_us:6.2f} us")
    print(f"metrics of its batch               {batch_us:6.2f} us")
    print(f"together                           {request_us + batch_us:6.2f} us    goal: at most {GOAL_US:g}")
    lines_us = measure_us(work.lines, max(1, count // LINES)) / LINES
    print(f"a line in the access log           {lines_us:6.2f} us    of {LINES} together, thread included")
    work.log.close()
    return 0 if request_us + batch_us <= GOAL_US else 1


if __name__ == "__main__":
    sys.exit(main())
