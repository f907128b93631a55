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

from torchere.serving.batching.request import Request
from torchere.serving.logs.access_lines import AccessLog
from torchere.serving.logs.lines import configure
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.telemetry.saturation import TICK_S, LoadSample, SaturationWindow

GOAL_US = 5.0  # for metrics and timeline of one request and its batch
LINES = 1000
_RUNS = 5


def _answered() -> Request:
    """A request with the marks that the frontend, the data plane and the batcher leave."""
    request = Request("id", time.monotonic())
    request.read_s = request.enqueued_s = request.dequeued_s = request.started_s
    request.stages_s = (1e-5, 1e-4, 1e-5, 1e-6)
    request.answered_s = request.sending_s = request.started_s + 1e-3
    return request


class Work:
    """One request as the server counts it."""

    def __init__(self) -> None:
        self.metrics = Metrics("bench")
        self.meter = self.metrics.meter("model", "1.0")
        self.meter.load = lambda: LoadSample(queue_room=100, executors=2, wanted=2)
        self.metrics.show(self.meter)
        logger = logging.getLogger("ACCESS_LOG")
        configure("INFO", True, io.StringIO())
        self.log = AccessLog(logger)
        self.asked = _answered()
        self.window = SaturationWindow(self.meter.busy, self.meter.load, self.meter.requests)
        self._now_s = 0.0

    def request(self) -> None:
        """The events of one request: accepted, answered over REST, over; its times are counted in bulk."""
        self.meter.accepted(named=False)
        self.metrics.request_finished(200)
        self.meter.finished(self.asked, 200, self.asked.sending_s)

    def whole_request(self) -> Request:
        """The same with the object itself, and the marks that it collects on its way."""
        request = Request("id", time.monotonic())
        self.metrics.prediction_begins(request)
        request.read_s = time.monotonic()
        self.meter.accepted(named=False)
        request.meter = self.meter
        request.enqueued_s = request.dequeued_s = request.answered_s = time.monotonic()
        request.sending_s = time.monotonic()
        self.metrics.request_finished(200)
        self.metrics.prediction_ends(request, 200)
        return request

    def batch(self) -> None:
        """The events of one batch: begun, finished."""
        now_s = time.monotonic()
        self.meter.batches_running(1, now_s)
        self.meter.batches_running(0, now_s)
        self.meter.batch_finished(
            size=1,
            succeeded=1,
            failed=0,
            succeeded_wait_s=0.0001,
            failed_wait_s=0.0,
            executor_s=0.0008,
            handler_s=0.0005,
        )

    def tick(self) -> None:
        """Sample one version for its saturation, twice a second."""
        self._now_s += TICK_S
        self.window.tick(self._now_s)

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
    print(f"numbers of a request               {measure_us(work.request, count):6.2f} us")
    request_us, batch_us = measure_us(work.whole_request, count), measure_us(work.batch, count)
    print(f"timeline and numbers of a request  {request_us:6.2f} us")
    print(f"numbers of its batch               {batch_us:6.2f} us")
    print(f"together                           {request_us + batch_us:6.2f} us    goal: at most {GOAL_US:g}")
    print(f"a sample of a version's load       {measure_us(work.tick, count):6.2f} us    twice a second")
    lines_us = measure_us(work.lines, max(1, count // LINES)) / LINES
    print(f"a line in the access log           {lines_us:6.2f} us    of {LINES} together, thread included")
    work.log.close()
    return 0 if request_us + batch_us <= GOAL_US else 1


if __name__ == "__main__":
    sys.exit(main())
