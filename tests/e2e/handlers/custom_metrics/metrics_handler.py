"""Every call of the metrics API, and the older one beside it."""

import logging
import subprocess
import sys

from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_type_enum import MetricTypes
from ts.service import emit_metrics

logger = logging.getLogger(__name__)


class MetricsHandler:
    def initialize(self, context):
        self.words = context.metrics.add_metric_to_cache(
            metric_name="words_total",
            unit="count",
            dimension_names=["ModelName", "language"],
            metric_type=MetricTypes.COUNTER,
        )

    def handle(self, data, context):
        metrics = context.metrics
        sizes = [len(row["body"]) for row in data]
        self.words.add_or_update(3, [context.model_name, "en"])
        metrics.add_counter("Calls", 1, None)
        metrics.add_time("Preparing", 12.5, None, "ms", [Dimension("step", "resize")])
        metrics.add_size("Picture", sizes[0], 0, "kB")
        metrics.add_percent("Full", 50.0)
        metrics.add_metric("Lengths", sizes[0], unit="count", metric_type=MetricTypes.HISTOGRAM)
        metrics.add_error("Failures", 2)
        metrics.add_counter("NobodyDeclared", 1)
        emit_metrics([Metric("Old", 7, "ms", [Dimension("ModelName", "custom_metrics")])])
        logger.info("[METRICS]%s", str(Metric("Logged", 1, "count", [Dimension("kind", "old")])))
        print(f"[METRICS]{Metric('Printed', 5, 'ms', [Dimension('kind', 'old')])}")
        child = Metric("OfAChild", 2, "count", [Dimension("kind", "old")])
        subprocess.run([sys.executable, "-c", f"print('[METRICS]{child}')"], check=True)
        print("after the values of", bytes(data[0]["body"]))
        found = metrics.get_metric("words_total", MetricTypes.COUNTER) is self.words
        return [{"found": found}] * len(data)
