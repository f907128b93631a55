"""The quarantine: finds requests that crash executors by running them alone, and then refuses them.

A request that was running when an executor crashed is *suspect*. It is identified by its content, so it stays
suspect if any client sends it again. A suspect request runs alone. If its executor crashes again, the request
is *convicted*: it is answered with `Quarantined`, now and each time it is sent. On any other outcome it is
acquitted, so that requests which only shared a batch or a machine with the crash are not blamed.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from torchere.serving.batching.request import Request
from torchere.serving.errors import DeadlineExceeded, ExecutorDied, Quarantined
from torchere.serving.workers.executor import BatchReport, Outcome

MAX_KNOWN = 1024  # suspects and convicts of a version; the least recently seen are forgotten first
SUSPECT_FOR_S = 600.0  # a suspect is forgotten after this


class Verdict(Enum):
    """The quarantine's verdict on a request."""

    CLEAN = "clean"
    SUSPECT = "suspect"
    CONVICTED = "convicted"


@dataclass(slots=True)
class _Record:
    since_s: float  # the first crash, monotonic
    causes: tuple[str, ...]
    size: int
    convicted: bool = False


@dataclass(frozen=True, slots=True)
class Conviction:
    """A newly convicted request, and the cause of each executor loss."""

    request: Request
    digest: str
    causes: tuple[str, ...]


class Quarantine:
    """The suspect and convicted requests of one version. Lives on the event loop.

    `active` is False while there are none; then every request is clean.

    Args:
        on_conviction: Called once for each conviction; must not block.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        on_conviction: Callable[[Conviction], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_conviction = on_conviction
        self._now = now
        self._records: OrderedDict[str, _Record] = OrderedDict()  # by digest, the most recently seen last
        self._sizes: Counter[int] = Counter()  # of the records; other sizes need no hashing
        self.active = False

    @property
    def convicted(self) -> int:
        """The number of convicted requests."""
        return sum(record.convicted for record in self._records.values())

    def verdict(self, request: Request) -> Verdict:
        """Return the verdict on a request."""
        size = _size(request)
        if size not in self._sizes:
            return Verdict.CLEAN
        digest = digest_of(request)
        record = self._records.get(digest)
        if record is None:
            return Verdict.CLEAN
        self._records.move_to_end(digest)
        if record.convicted:
            return Verdict.CONVICTED
        if self._now() - record.since_s >= SUSPECT_FOR_S:
            self._forget(digest)
            return Verdict.CLEAN
        return Verdict.SUSPECT

    def concerns(self, report: BatchReport) -> bool:
        """Whether `judge` must see a report: cheap, and False as long as no executor crashes."""
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
        # A hung run acquits no request; nor does an executor that was stopped.
        if not isinstance(outcome, (DeadlineExceeded, ExecutorDied)):
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
        # A run that began before the first crash proves nothing: both crashes may have one outside cause.
        if not alone or began_s < record.since_s:
            return died
        record.convicted = True
        record.causes += (died.detail,)
        if self._on_conviction is not None:
            self._on_conviction(Conviction(request, digest, record.causes))
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

    It covers the parameters and the headers content-type and content-encoding, but no ids, times or client.
    """
    digest = hashlib.blake2b(digest_size=16)
    for parameter in request.parameters:
        content = bytes(parameter.value)  # some values are views
        digest.update(f"{parameter.name}\0{parameter.content_type}\0{len(content)}\0".encode())
        digest.update(content)
    for name, value in sorted((name.lower(), value) for name, value in request.headers):
        if name in ("content-type", "content-encoding"):
            digest.update(f"{name}\0{value}\0".encode())
    return digest.hexdigest()


def _size(request: Request) -> int:
    return sum(len(parameter.value) for parameter in request.parameters)
