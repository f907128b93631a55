"""Changing what is logged while the server runs."""

from __future__ import annotations

import logging

from torchere.serving.telemetry.logging import LEVELS

logger = logging.getLogger(__name__)

INHERIT = "NOTSET"  # a logger without a level of its own has that of the next one above


class LogLevelError(ValueError):
    """There is no such logger, or no such level."""


def change_level(name: str, level: str) -> None:
    """Set the level of a logger from now on; "" is the one above all others. Any thread may call it.

    Raises:
        LogLevelError: nothing logs under that name, or the level is none of `LEVELS` and `INHERIT`.
    """
    wanted = level.upper()
    if wanted not in LEVELS and not (wanted == INHERIT and name):
        raise LogLevelError(f"level: found {level!r}, expected one of {', '.join((*LEVELS, INHERIT))}")
    if name and name not in logging.root.manager.loggerDict:
        raise LogLevelError(f"logger: nothing logs as {name!r}; GET /log-level shows those that have a level")
    logging.getLogger(name or None).setLevel(wanted)
    logger.warning("the log level of %s is %s from now on", name or "everything else", wanted)


def levels() -> dict[str, str]:
    """The levels that are set, by logger; that of "" holds for all others."""
    found = {"": logging.getLevelName(logging.root.level)}
    for name, logger in sorted(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and logger.level:
            found[name] = logging.getLevelName(logger.level)
    return found
