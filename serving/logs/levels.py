"""Log levels that the settings give, and changes of levels while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from torchere.serving.logs.lines import LEVELS, MODEL_LOGGER

logger = logging.getLogger(__name__)

_HANDLERS = Path(__file__).resolve().parents[2] / "handlers"
_MAX_NAME_LENGTH = 200  # below the limit for names of files: a logger's name is looked up as one
INHERIT = "NOTSET"  # use the nearest ancestor's level; for the root logger, the level at startup


class Follower(Protocol):
    """A process with its own loggers, whose levels follow the levels of the server."""

    def set_log_level(self, name: str, level: int) -> None:
        """Set the level of a logger in that process; "" is the root logger."""


_changed: dict[str, int] = {}  # level by logger; for the whole process, as logging's own levels are
_followers: WeakSet[Follower] = WeakSet()
_at_start: dict[str, int] = {}  # the level of the root logger before its first change; it has no ancestor


class LogLevelError(ValueError):
    """The logger or the level does not exist."""


def follow(follower: Follower) -> None:
    """Send a new process the levels changed so far and every later change."""
    _followers.add(follower)
    for name in _changed:
        _tell(follower, name)


def set_level(name: str, level: int) -> None:
    """Set the level of a logger in this process only; 0 removes its level (see `INHERIT`)."""
    if not name and level:
        _at_start.setdefault(name, logging.root.level)
    elif not name:
        level = _at_start.pop(name, logging.root.level)
    logging.getLogger(name or None).setLevel(level)


def set_at_start(wanted: Mapping[str, str]) -> None:
    """Set levels, by logger, in this process and in all future workers; the loggers may be made later."""
    for name, level in wanted.items():
        _set(name, level)


def change_level(name: str, level: str) -> None:
    """Set the level of a logger in this process and in all current and future workers; "" is the root logger.

    Call it on the event loop.

    Raises:
        LogLevelError: there is no logger of that name, or the level is not in `LEVELS` or `INHERIT`.
    """
    wanted = level.upper()
    if wanted not in (*LEVELS, INHERIT):
        raise LogLevelError(f"level: found {level!r}, expected one of {', '.join((*LEVELS, INHERIT))}")
    # The handlers' loggers are in the workers. Any other unknown name would create a logger for each part.
    if name and name not in logging.root.manager.loggerDict and not _is_of_handlers(name):
        raise LogLevelError(f"logger: nothing logs as {name!r}; GET /log-level shows those that have a level")
    _set(name, wanted)
    level_now = wanted if name else logging.getLevelName(logging.root.level)
    logger.warning("the log level of %s is %s from now on", name or "everything else", level_now)


def _set(name: str, level: str) -> None:
    _changed[name] = logging.getLevelName(level)
    set_level(name, _changed[name])
    for follower in list(_followers):
        _tell(follower, name)


def _tell(follower: Follower, name: str) -> None:
    """Send a process the level of a logger. In a worker all loggers are `MODEL_LOG` to TorchServe."""
    if name in ("", MODEL_LOGGER):
        follower.set_log_level("", _changed.get(MODEL_LOGGER) or _changed.get("", 0))
    else:
        follower.set_log_level(name, _changed[name])


def _is_of_handlers(name: str) -> bool:
    """Return whether `handlers/` has a file for a module of this name: an import would import torch here."""
    parts = name.split(".")
    is_path = len(name) <= _MAX_NAME_LENGTH and all(map(str.isidentifier, parts))
    if not is_path or parts[:2] != ["torchere", "handlers"]:
        return False
    place = _HANDLERS.joinpath(*parts[2:])
    return place.joinpath("__init__.py").is_file() or place.with_suffix(".py").is_file()


def levels() -> dict[str, str]:
    """Return the level of each logger that has one; "" is the root logger, whose level all others inherit."""
    found = {"": logging.getLevelName(logging.root.level)}
    for name, logger in sorted(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and logger.level:
            found[name] = logging.getLevelName(logger.level)
    return found
