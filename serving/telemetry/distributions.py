"""Histograms with the same buckets: values are added row by row, and counted many rows at a time.

Finding the bucket of each value separately would take five times as long as all other counting for a request.
So rows are buffered, and counted by numpy when there are enough of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client.samples import Exemplar

from torchere.serving.telemetry.exposition import HistogramRow, OwnFamily

# Upper bounds in seconds: from a tenth of a millisecond, the latency of small models, to the default response
# timeout.
SECONDS_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
FOLD_ROWS = 128  # counting this many rows blocks the event loop for a tenth of a millisecond

_BOUNDS = np.array(SECONDS_BUCKETS)
_WIDTH = len(SECONDS_BUCKETS) + 1  # the last bucket holds values above all bounds


class Histogram(NamedTuple):
    """A snapshot of one histogram. `exemplars` has one entry per bucket; None: no exemplar."""

    counts: Sequence[int]  # per bucket, not cumulative; there is one count more than bounds
    total: float
    exemplars: Sequence[Exemplar | None] = ()


class Distributions:
    """One histogram for each column of the added rows. Not thread-safe."""

    __slots__ = ("_counts", "_exemplars", "_offsets", "_rows", "_sums", "_width")

    def __init__(self, columns: int) -> None:
        self._width = columns
        self._rows = array("d")
        self._counts = np.zeros(columns * _WIDTH, dtype=np.int64)
        self._sums = np.zeros(columns)
        self._offsets = np.arange(columns) * _WIDTH
        self._exemplars: dict[tuple[int, int], Exemplar] = {}  # the latest of each column and bucket

    def add(self, row: Sequence[float]) -> None:
        """Add a row: one value in seconds for each column."""
        self._rows.extend(row)
        if len(self._rows) >= FOLD_ROWS * self._width:
            self._fold()

    def add_rows(self, values: NDArray[np.float64]) -> None:
        """Count many rows immediately."""
        # The bucket of each value, numbered across all columns; `left`: a bucket includes its upper bound.
        places = np.searchsorted(_BOUNDS, values, side="left") + self._offsets
        self._counts += np.bincount(places.ravel(), minlength=len(self._counts))
        self._sums += values.sum(axis=0)

    def note(self, row: Sequence[float], labels: dict[str, str], now_s: float) -> None:
        """Store the values of a row as exemplars with these labels; `now_s` is in seconds since the epoch."""
        for column, value in enumerate(row):
            self._exemplars[column, bisect_left(SECONDS_BUCKETS, value)] = Exemplar(labels, value, now_s)

    def histograms(self) -> list[Histogram]:
        """Return the current histogram of each column."""
        self._fold()
        counts = self._counts.reshape(self._width, _WIDTH).tolist()
        return [
            Histogram(counts[column], float(self._sums[column]), self._exemplars_of(column))
            for column in range(self._width)
        ]

    def _exemplars_of(self, column: int) -> Sequence[Exemplar | None]:
        if not self._exemplars:
            return ()
        return [self._exemplars.get((column, bucket)) for bucket in range(_WIDTH)]

    def _fold(self) -> None:
        if not self._rows:
            return
        rows, self._rows = self._rows, array("d")
        self.add_rows(np.frombuffer(rows).reshape(-1, self._width))


_TEXTS = (*map(str, SECONDS_BUCKETS), "+Inf")


@lru_cache
def _kept_bounds(every: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the indices of the kept buckets, and their bounds as text; `every` 0 keeps only +Inf."""
    last = len(SECONDS_BUCKETS)
    kept = (*(range(0, last, every) if every else ()), last)
    return kept, tuple(_TEXTS[bucket] for bucket in kept)


def add_histogram(family: OwnFamily, labels: dict[str, str], values: Histogram, every: int = 1) -> None:
    """Add one histogram over `SECONDS_BUCKETS`.

    With `every` = 2 only every second bound is kept; with 0 only +Inf, so that only count and sum remain.
    """
    kept, bounds = _kept_bounds(every)
    cumulated = list(accumulate(values.counts))
    exemplars = _kept_exemplars(values.exemplars, kept) if values.exemplars else ()
    counts = [cumulated[bucket] for bucket in kept]
    family.rows.append(HistogramRow(labels, bounds, counts, values.total, exemplars))


def _kept_exemplars(exemplars: Sequence[Exemplar | None], kept: Sequence[int]) -> list[Exemplar | None]:
    """Return an exemplar for each kept bucket: its own, or else that of a lower bucket merged into it."""
    found: list[Exemplar | None] = []
    first = 0
    for bucket in kept:
        merged = exemplars[first : bucket + 1]
        found.append(next((exemplar for exemplar in reversed(merged) if exemplar), None))
        first = bucket + 1
    return found
