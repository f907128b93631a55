"""The quarantine: finds requests that crash executors by running them alone, and then refuses them.

A request that was running when an executor crashed is *suspect*. It is identified by its content, so it stays
suspect if any client sends it again. A suspect request runs alone. If its executor crashes again, the request
is *convicted*: it is answered with `Quarantined`, now and each time it is sent, until the conviction
expires or is lifted. When it completes it is acquitted, so that requests which only shared a batch or a
machine with the crash are not blamed.

A kill from outside is not evidence. A kill by the out-of-memory killer makes a request suspect, so it runs
alone, but never convicts it: the kernel may have chosen this worker for the memory that a neighbour took.

`QuarantineFiles` saves convicted requests for replay, bounded in number and total size.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import math
import os
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

import msgspec

from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import QuarantineSettings
from torchere.serving.errors import ExecutorDied, Quarantined
from torchere.serving.types import InferRequest, ModelKey
from torchere.serving.workers.executor import NOT_RUN, BatchReport, Outcome

MAX_KNOWN = 1024  # suspects and convicts of a version; the least recently seen are forgotten first
SUSPECT_FOR_S = 600.0  # a suspect is forgotten after this
SUFFIX = ".quarantined.json"  # ends the file names of saved requests
_SECRET = re.compile(r"auth|cookie|token|secret|key|credential|session", re.IGNORECASE)

logger = logging.getLogger(__name__)


class Verdict(Enum):
    """The quarantine's verdict on a request."""

    CLEAN = "clean"
    SUSPECT = "suspect"
    CONVICTED = "convicted"


@dataclass(slots=True)
class _Record:
    since_s: float  # the first crash, or the first kill for memory; monotonic
    causes: tuple[str, ...]  # why executors crashed; a kill for lack of memory is not a crash
    size: int
    convicted_s: float | None = None  # monotonic; None: suspect

    @property
    def convicted(self) -> bool:
        return self.convicted_s is not None


@dataclass(frozen=True, slots=True)
class Conviction:
    """A newly convicted request, and the cause of each executor loss."""

    request: InferRequest  # a copy: the batcher empties its own when it answers the client
    digest: str
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConvictedRequest:
    """A convicted request as an operator sees it; `expires_in_s` None: never."""

    digest: str
    causes: tuple[str, ...]
    size: int  # bytes of the request's parameters
    convicted_for_s: float
    expires_in_s: float | None


class Quarantine:
    """The suspect and convicted requests of one version. Lives on the event loop.

    `active` is False while there are none; then every request is clean.

    Args:
        on_conviction: Called once for each conviction; must not block.
        now: Monotonic seconds.
        expiry_s: Seconds after which a conviction is forgotten; 0: never.
    """

    def __init__(
        self,
        on_conviction: Callable[[Conviction], None] | None = None,
        now: Callable[[], float] = time.monotonic,
        expiry_s: float = 0.0,
    ) -> None:
        self._expiry_s = expiry_s
        self._on_conviction = on_conviction
        self._now = now
        self._records: OrderedDict[str, _Record] = OrderedDict()  # by digest, the most recently seen last
        self._sizes: Counter[int] = Counter()  # sizes in the records; other sizes need no hashing
        self.active = False

    @property
    def convicted(self) -> int:
        """The number of convicted requests."""
        self._expire()
        return sum(record.convicted for record in self._records.values())

    def verdict(self, request: Request) -> Verdict:
        """Return the verdict on a request."""
        self._expire()
        size = _size(request)
        if size not in self._sizes:
            return Verdict.CLEAN
        digest = digest_of(request)
        record = self._records.get(digest)
        if record is None:
            return Verdict.CLEAN
        self._records.move_to_end(digest)
        return Verdict.CONVICTED if record.convicted else Verdict.SUSPECT

    def _expire(self) -> None:
        """Forget suspects and convictions that have expired; the table has at most `MAX_KNOWN` of them."""
        now_s = self._now()
        expiry_s = self._expiry_s or math.inf
        over = [
            digest
            for digest, record in self._records.items()
            if (record.convicted_s is None and now_s - record.since_s >= SUSPECT_FOR_S)
            or (record.convicted_s is not None and now_s - record.convicted_s >= expiry_s)
        ]
        for digest in over:
            self._forget(digest)

    def convicts(self) -> list[ConvictedRequest]:
        """Return the convicted requests, the least recently seen first."""
        self._expire()
        now_s = self._now()
        return [
            ConvictedRequest(
                digest,
                record.causes,
                record.size,
                now_s - record.convicted_s,
                record.convicted_s + self._expiry_s - now_s if self._expiry_s else None,
            )
            for digest, record in self._records.items()
            if record.convicted_s is not None
        ]

    def lift(self, digest: str | None = None) -> int:
        """Forget the conviction of `digest` (None: every conviction); return how many were lifted."""
        lifted = [convict.digest for convict in self.convicts() if digest in (None, convict.digest)]
        for name in lifted:
            self._forget(name)
        return len(lifted)

    def concerns(self, report: BatchReport) -> bool:
        """Return whether `judge` must see a report; it need not as long as no executor crashes. Cheap."""
        return self.active or (bool(report.outcomes) and isinstance(report.outcomes[0], ExecutorDied))

    def judge(
        self, requests: Sequence[Request], report: BatchReport, began_s: float, *, alone: bool
    ) -> BatchReport:
        """Update the records from the report of a run.

        Args:
            requests: the requests of the run.
            report: the report of the run.
            began_s: monotonic seconds when the run began.
            alone: no other run was inside the process.

        Returns:
            The report, with `Quarantined` for a request that was convicted.
        """
        alone = alone and len(requests) == 1
        outcomes = [
            self._learn(request, outcome, began_s, alone)
            for request, outcome in zip(requests, report.outcomes, strict=True)
        ]
        return msgspec.structs.replace(report, outcomes=outcomes)

    def _learn(self, request: Request, outcome: Outcome, began_s: float, alone: bool) -> Outcome:
        if isinstance(outcome, ExecutorDied) and outcome.crashed:
            return self._crashed(request, outcome, began_s, alone)
        if isinstance(outcome, ExecutorDied) and outcome.out_of_memory and _size(request):
            digest = digest_of(request)
            if digest not in self._records:
                self._add(digest, _Record(self._now(), (), _size(request)))
        # A run that hung or was given up acquits no request; nor does an executor that was stopped.
        if not isinstance(outcome, (*NOT_RUN, ExecutorDied)):
            self._acquit(request)
        return outcome

    def _crashed(self, request: Request, died: ExecutorDied, began_s: float, alone: bool) -> Outcome:
        size = _size(request)
        if not size:  # an empty request: the model itself crashes
            return died
        digest = digest_of(request)
        record = self._records.get(digest)
        if record is None:
            self._add(digest, _Record(self._now(), (died.detail,), size))
            return died
        self._records.move_to_end(digest)
        if record.convicted:
            return Quarantined(died.detail)
        if not record.causes:  # so far only the out-of-memory killer ended executors that ran it
            record.since_s, record.causes = self._now(), (died.detail,)
            return died
        # A run that began before the first crash proves nothing: both crashes may have one outside cause.
        if not alone or began_s < record.since_s:
            return died
        record.convicted_s = self._now()
        record.causes += (died.detail,)
        if self._on_conviction is not None:
            kept = InferRequest(request.request_id, tuple(request.parameters), tuple(request.headers))
            self._on_conviction(Conviction(kept, digest, record.causes))
        return Quarantined("; then ".join(record.causes))

    def _acquit(self, request: Request) -> None:
        if _size(request) not in self._sizes:
            return
        digest = digest_of(request)
        record = self._records.get(digest)
        if record is not None and not record.convicted:
            self._forget(digest)

    def _add(self, digest: str, record: _Record) -> None:
        self._records[digest] = record
        self._sizes[record.size] += 1
        if len(self._records) > MAX_KNOWN:
            self._forget(next(iter(self._records)))
        self.active = True

    def _forget(self, digest: str) -> None:
        record = self._records.pop(digest)
        self._sizes[record.size] -= 1
        if not self._sizes[record.size]:
            del self._sizes[record.size]
        self.active = bool(self._records)


def digest_of(request: Request) -> str:
    """Return a digest of the content of a request, the same each time a client sends it.

    It covers the parameters and the headers content-type and content-encoding, but not ids, times or client.
    The content type of a form in parts is left out: its boundary differs each time, and each part has
    its own type.
    """
    digest = hashlib.blake2b(digest_size=16)
    for parameter in request.parameters:
        content = bytes(parameter.value)  # some values are views
        digest.update(f"{parameter.name}\0{parameter.content_type}\0{len(content)}\0".encode())
        digest.update(content)
    for name, value in sorted((name.lower(), value) for name, value in request.headers):
        is_form = name == "content-type" and value.strip().lower().startswith("multipart/form-data")
        if name in ("content-type", "content-encoding") and not is_form:
            digest.update(f"{name}\0{value}\0".encode())
    return digest.hexdigest()


def _size(request: Request) -> int:
    return sum(len(parameter.value) for parameter in request.parameters)


class QuarantineFiles:
    """Writes the quarantined requests of one version to files, in a background thread.

    Each request is one JSON file that only its owner can read, because it holds a client's data. Headers that
    may hold a secret are left out. The oldest files are deleted when a bound is exceeded.

    Used on the event loop.
    """

    def __init__(self, key: ModelKey, settings: QuarantineSettings | None) -> None:
        self._key = key
        self._settings = settings
        self._writing: set[asyncio.Task[None]] = set()

    def __call__(self, conviction: Conviction) -> None:
        """Log a conviction, and save the request if saving is configured."""
        logger.error(
            "request %s is quarantined, and not run until that ends: it was running at two crashes of %s: %s",
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
        except FileNotFoundError:  # another server has deleted the file
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
