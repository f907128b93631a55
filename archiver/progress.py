"""A progress bar for large files, drawn on a terminal and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

LARGE_BYTES = 64 * 2**20  # smaller files are packed before a bar could be read
_WIDTH = 30
_REDRAW_S = 0.1


class Progress:
    """Counts bytes of one file after the other; used by one thread.

    Nothing is written unless `stream` is a terminal and the file is large.
    """

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._clock = clock
        self._name = ""
        self._total_bytes = 0
        self._done_bytes = 0
        self._drawn_s = float("-inf")

    def start(self, name: str, total_bytes: int) -> None:
        """Begin a file of `total_bytes`."""
        self._name, self._total_bytes, self._done_bytes = name, total_bytes, 0

    def advance(self, count: int) -> None:
        """Tell that `count` more bytes are done, and draw the bar when it is due."""
        self._done_bytes += count
        now_s = self._clock()
        if self._stream and self._total_bytes >= LARGE_BYTES and now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            filled = _WIDTH * self._done_bytes // self._total_bytes
            percent = 100 * self._done_bytes // self._total_bytes
            self._stream.write(f"\r{self._name} [{'#' * filled:<{_WIDTH}}] {percent:3d}%")
            self._stream.flush()

    def finish(self) -> None:
        """End the file and take the bar away."""
        if self._stream and self._total_bytes >= LARGE_BYTES:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
