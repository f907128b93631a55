"""Requests that crash executors: found out by running them alone, and then never run again.

A request that was running when an executor crashed is *suspect*, whoever sends it again: it is known by its
content. A suspect runs alone. When its executor crashes once more it is *convicted*: it is answered with
`Quarantined`, now and whenever it comes. When anything else comes of its run it is acquitted, so that
requests which only shared a batch or a machine with the crash are not held to blame.
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

MAX_KNOWN = 1024  # suspects and convicts of a version; the ones not heard of for longest are forgotten
SUSPECT_FOR_S = 600.0  # a suspect that nobody sends again is forgotten after this


class Verdict(Enum):
    """What is known of a request."""

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
    """A request that was convicted just now, and why each of the two executors was lost."""

    request: Request
    digest: str
    causes: tuple[str, ...]


class Quarantine:
    """What is known of the requests of one version. Lives on the event loop.

    While nothing crashed, `active` is False and there is nothing else to ask.

    Args:
        on_conviction: Told of each conviction, once; must not block.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        on_conviction: Callable[[Conviction], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_conviction = on_conviction
        self._now = now
        self._records: OrderedDict[str, _Record] = OrderedDict()  # by digest, the latest heard of last
        self._sizes: Counter[int] = Counter()  # of the records: no other request need be hashed
        self.active = False

    @property
    def convicted(self) -> int:
        """How many requests are convicted."""
        return sum(record.convicted for record in self._records.values())

    def verdict(self, request: Request) -> Verdict:
        """What is known of a request."""
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
        """Whether `judge` has anything to do with a report: cheap, and False as long as nothing crashes."""
        return self.active or (bool(report.outcomes) and isinstance(report.outcomes[0], ExecutorDied))

    def judge(
        self, requests: Sequence[Request], report: BatchReport, began_s: float, *, alone: bool
    ) -> BatchReport:
        """Learn from the report of a run.

        Args:
            requests: those of the run.
            report: its report.
            began_s: monotonic seconds when the run began.
            alone: nothing else was inside the process.

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
        # A hung run acquits nobody; nor does an executor that was stopped.
        if not isinstance(outcome, (DeadlineExceeded, ExecutorDied)):
            self._acquit(request)
        return outcome

    def _crashed(self, request: Request, died: ExecutorDied, began_s: float, alone: bool) -> Outcome:
        size = _size(request)
        if not size:  # nothing in it: it is the model that crashes
            return died
        digest = digest_of(request)
        record = self._records.get(digest)
        if record is None:
            self._add(digest, _Record(self._now(), (died.detail,), size))
            return died
        self._records.move_to_end(digest)
        if record.convicted:
            return Quarantined(died.detail)
        # A run that began before the first crash was no trial: whatever ended both may have been outside.
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
    """The identity of what a request asks, the same each time a client sends it.

    Parameters count, and the headers that say what they are; ids, times and who asks do not.
    """
    digest = hashlib.blake2b(digest_size=16)
    for parameter in request.parameters:
        content = bytes(parameter.value)  # some are views
        digest.update(f"{parameter.name}\0{parameter.content_type}\0{len(content)}\0".encode())
        digest.update(content)
    for name, value in sorted((name.lower(), value) for name, value in request.headers):
        if name in ("content-type", "content-encoding"):
            digest.update(f"{name}\0{value}\0".encode())
    return digest.hexdigest()


def _size(request: Request) -> int:
    return sum(len(parameter.value) for parameter in request.parameters)
