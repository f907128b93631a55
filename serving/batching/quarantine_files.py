"""Saves convicted requests to files for replay; bounded in number and total size.

Each request is one JSON file that only its owner can read, because it holds a client's data. Headers that may
hold a secret are left out. The oldest files are deleted when a bound is exceeded.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
from datetime import datetime, timezone
from pathlib import Path

from torchere.serving.batching.quarantine import Conviction
from torchere.serving.config.server_settings import QuarantineSettings
from torchere.serving.types import ModelKey

logger = logging.getLogger(__name__)

SUFFIX = ".quarantined.json"
_SECRET = re.compile(r"auth|cookie|token|secret|key|credential|session", re.IGNORECASE)


class QuarantineFiles:
    """Writes the quarantined requests of one version to files, in a background thread.

    Used on the event loop.
    """

    def __init__(self, key: ModelKey, settings: QuarantineSettings | None) -> None:
        self._key = key
        self._settings = settings
        self._writing: set[asyncio.Task[None]] = set()

    def __call__(self, conviction: Conviction) -> None:
        """Log a conviction, and save the request if saving is configured."""
        logger.error(
            "request %s is quarantined: it was running at two crashes of %s, and will not run again: %s",
            conviction.request.request_id,
            self._key,
            "; then ".join(conviction.causes),
            extra={"digest": conviction.digest},
        )
        if self._settings is not None and self._settings.max_bytes:
            task = asyncio.ensure_future(asyncio.to_thread(self._save, conviction, self._settings))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def _save(self, conviction: Conviction, settings: QuarantineSettings) -> None:
        try:
            save(self._key, conviction, settings)
        except OSError as err:
            logger.warning("a quarantined request can't be saved in %s: %s", settings.directory, err)


def save(key: ModelKey, conviction: Conviction, settings: QuarantineSettings) -> Path | None:
    """Write one request and delete the oldest files over the bounds; None if it alone is too large.

    Raises:
        OSError: the directory can't be made or written.
    """
    text = json.dumps(_document(key, conviction), indent=1)
    if len(text) > settings.max_bytes:
        logger.warning("a quarantined request of %d bytes is not saved: over quarantine_max_bytes", len(text))
        return None
    settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S%f}-{key.name[:100]}-{conviction.digest[:12]}{SUFFIX}"
    path = settings.directory / name
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)  # a partial file, on a full disk
        raise
    _prune(settings, path)
    return path


def _prune(settings: QuarantineSettings, newest: Path) -> None:
    """Delete the oldest files until the rest are within the bounds."""
    files = settings.directory.glob(f"*{SUFFIX}")
    # The names begin with the time; the newest file comes first even if the clock was set back.
    latest_first = sorted(files, key=lambda file: (file == newest, file), reverse=True)
    room = settings.max_bytes
    for place, file in enumerate(latest_first):
        try:
            room -= file.stat().st_size
        except FileNotFoundError:  # another server has deleted it
            continue
        if place >= settings.max_files or room < 0:
            file.unlink(missing_ok=True)


def _document(key: ModelKey, conviction: Conviction) -> dict[str, object]:
    request = conviction.request
    return {
        "model": key.name,
        "version": key.version,
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "requestId": request.request_id,
        "digest": conviction.digest,
        "causes": conviction.causes,
        "headers": [[name, value] for name, value in request.headers if not _SECRET.search(name)],
        "parameters": [
            {
                "name": parameter.name,
                "contentType": parameter.content_type,
                "base64": base64.b64encode(parameter.value).decode("ascii"),
            }
            for parameter in request.parameters
        ],
    }
