"""What a log record holds besides its message; for the server's formatters and those of its workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What a record is made of. `taskName` came with Python 3.12."""

_HIDDEN_PREFIX = "_"  # extras for other handlers


def extras_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What `extra=` gave, by name."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in OWN_FIELDS and not name.startswith(_HIDDEN_PREFIX)
    }


def trace_of(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback and the stack of a record of this process or another; "" without."""
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    elif record.exc_text:
        parts.append(record.exc_text)  # a record that came from another process
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)
