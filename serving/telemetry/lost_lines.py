"""What is said of log lines that can't be written, or files that can't be moved: the reason, once in a while.

Python's logging writes a traceback of the log call for each of them. A full disk would have a server that
answers a thousand requests a second write megabytes of those a second, and do little else.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress

from torchere.serving.telemetry.outlet import has_room, may_stand_still

SAID_EVERY_S = 60.0


class SaysWhatIsLost(logging.Handler):
    """A part of handlers: what becomes of a record that the operating system doesn't take."""

    output = "standard output"  # what it is called
    _say_after_s = 0.0  # monotonic

    def handleError(self, record: logging.LogRecord) -> None:
        """Say why, as `say` does; what is no `OSError` as logging does.

        Call it in the `except` of the one that writes.
        """
        err = sys.exc_info()[1]
        if isinstance(err, OSError):
            self.say(f"lines of {self.output} are lost: {err.strerror or err}")
        else:
            super().handleError(record)

    def say(self, text: str) -> None:
        """Say it on standard error, at most once a minute; where nobody reads that it is left unsaid."""
        now_s = time.monotonic()
        if now_s >= self._say_after_s:
            self._say_after_s = now_s + SAID_EVERY_S
            with suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                descriptor = may_stand_still(sys.stderr)
                if descriptor is None or has_room(descriptor, timeout_ms=0):
                    sys.stderr.write(f"{text}\n")
                    sys.stderr.flush()
