"""Audit log: one line for each call that changes models, keys or log levels, refused ones included.

The lines go to the log of the server, and to a file of their own if `audit_log` names one: one JSON object
per line, in the format of the JSON log.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from torchere.serving.errors import ServingError
from torchere.serving.logs.files import RotatingFile
from torchere.serving.logs.lines import JsonFormatter

AUDIT_LOGGER = "AUDIT_LOG"
Outcome = Literal["done", "refused", "failed"]

# Refused calls cost their client nothing. Without a limit a client without a key could fill the disk, or have
# the lines of others rotated away.
MAX_REFUSED = 600  # lines in `REFUSED_WITHIN_S`
REFUSED_WITHIN_S = 60.0

logger = logging.getLogger(AUDIT_LOGGER)


class AuditFileUnusable(ServingError):
    """The file of the audit log can't be opened."""


@dataclass(frozen=True, slots=True)
class AuditedCall:
    """One call."""

    identity: str  # of the client; "": its key has none, or the client was refused or needs no key
    address: str  # of the client, without its port
    transport: str  # "rest" or "grpc"
    action: str  # the change, as the table of authorisation names it
    model: str  # "": the call names no model, or was refused before it was read
    version: str  # "": the default version, or none
    outcome: Outcome  # "refused": the client may not do that
    status: int | str  # the HTTP status, or the name of the gRPC status code
    change: str = ""  # the value that it sets, as NAME=VALUE; "": the action says everything


class AuditLog:
    """Writes the lines of the process. Used on the event loop."""

    def __init__(self) -> None:
        self._file: RotatingFile | None = None
        self._refused = 0  # lines since `_began_s`
        self._began_s = 0.0
        self._omitted = 0  # lines that were left out since the last one

    def open(self, path: Path | None) -> None:
        """Write the lines to this file as well; None: to the log only.

        Raises:
            AuditFileUnusable: the file can't be opened.
        """
        self.close()
        if path is None:
            return
        try:
            self._file = RotatingFile(path, JsonFormatter())
        except OSError as err:
            raise AuditFileUnusable(
                "The audit log can't be written.",
                f"audit_log={path}: {err.strerror}; expected a file in a writable directory.",
            ) from err
        logger.addHandler(self._file)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            logger.removeHandler(file)
            file.close()

    def add(self, call: AuditedCall) -> None:
        """Write the line of one call, unless too many refused ones were written within a minute."""
        if call.outcome == "refused" and not self._has_room():
            self._omitted += 1
            return
        omitted, self._omitted = self._omitted, 0
        extra = asdict(call) | ({"omitted": omitted} if omitted else {})
        if not call.change:
            del extra["change"]
        subject = f" of {call.model}" if call.model else f" {call.change}" if call.change else ""
        status = "" if call.outcome == "done" else f" ({call.status})"
        message = f"{call.action}{subject} by {call.identity or call.address}: {call.outcome}{status}"
        # Not `logger.info`: the level of the log, which a call may change, must not switch the audit off.
        record = logger.makeRecord(AUDIT_LOGGER, logging.INFO, __file__, 0, message, (), None, extra=extra)
        logger.handle(record)

    def _has_room(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._began_s >= REFUSED_WITHIN_S:
            self._began_s, self._refused = now_s, 0
        self._refused += 1
        return self._refused <= MAX_REFUSED


audit_log = AuditLog()
