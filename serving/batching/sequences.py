"""Sequences of related requests, which run in order on one executor. Bookkeeping only, no clock.

Contract: TorchServe's stateful batching. A sequence begins with its first request, stays on one executor, has
at most one new request in a batch, and ends after an idle or total time-out, or when its handler ends it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import SequenceSettings
from torchere.serving.errors import QueueFull

MOST_FORMER = 10_000  # expired sequences whose executor is remembered


class Sequence:
    """One sequence: its executor, its waiting requests, and its last activity (monotonic seconds)."""

    __slots__ = ("began_s", "executor_id", "name", "running", "touched_s", "waiting")

    def __init__(self, name: str, executor_id: int | None, now_s: float) -> None:
        self.name = name
        self.executor_id = executor_id
        self.waiting: deque[Request] = deque()
        self.running: set[Request] = set()  # taken and not answered, including unfinished ones
        self.began_s = self.touched_s = now_s

    def expires_s(self, settings: SequenceSettings) -> float:
        """Return when the sequence expires; it is not idle while a request waits or runs."""
        idle_s = float("inf") if self.waiting or self.running else self.touched_s + settings.max_idle_s
        return min(idle_s, self.began_s + settings.timeout_s if settings.timeout_s else float("inf"))


class SequenceTable:
    """All sequences of a version; bounds their number and the waiting requests of each. Not thread-safe."""

    def __init__(self, settings: SequenceSettings, refusal: str) -> None:
        self._settings = settings
        self._refusal = refusal
        self._sequences: dict[str, Sequence] = {}
        # Executors of expired sequences, the latest last: a handler may hold the state of one that goes on.
        self._former: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def waiting(self) -> list[Request]:
        """Every waiting request, sequence by sequence."""
        return [request for sequence in self._sequences.values() for request in sequence.waiting]

    def add(self, name: str, request: Request, now_s: float) -> None:
        """Append a request to its sequence, or begin a new one. Call `expire` before.

        Raises:
            QueueFull: too many sequences, or too many requests wait in this one.
        """
        sequence = self._sequences.get(name)
        if sequence is None:
            if len(self._sequences) >= self._settings.max_sequences:
                raise QueueFull(self._refusal)
            sequence = self._sequences[name] = Sequence(name, self._former.pop(name, None), now_s)
        if len(sequence.waiting) >= self._settings.max_queue_size:
            raise QueueFull(self._refusal)
        sequence.waiting.append(request)
        sequence.touched_s = now_s

    def remove(self, request: Request) -> None:
        """Remove a waiting request; do nothing if it is not waiting."""
        for sequence in self._sequences.values():
            if request in sequence.waiting:
                sequence.waiting.remove(request)

    def heads(self, executor_id: int, limit: int) -> list[Sequence]:
        """Return at most `limit` sequences of the executor, or of none yet, whose next request may run."""
        ready = (s for s in self._sequences.values() if s.waiting and not s.running)
        able = (s for s in ready if s.executor_id in (None, executor_id))
        return sorted(able, key=lambda sequence: sequence.waiting[0].enqueued_s)[:limit]

    def joining(self, going_on: Iterable[Request], limit: int) -> list[Sequence]:
        """Return at most `limit` sequences whose next request may run beside their own in `going_on`."""
        between_batches = set(going_on)
        ready = (s for s in self._sequences.values() if s.waiting and s.running)
        able = (s for s in ready if s.running <= between_batches)
        return sorted(able, key=lambda sequence: sequence.waiting[0].enqueued_s)[:limit]

    def take(self, sequence: Sequence, executor_id: int) -> Request:
        """Take the next request of a sequence and bind the sequence to the executor."""
        sequence.executor_id = executor_id
        request = sequence.waiting.popleft()
        sequence.running.add(request)
        return request

    def give_back(self, name: str, request: Request) -> bool:
        """Put a request that was not begun back in front; return False if its sequence has ended."""
        sequence = self._sequences.get(name)
        if sequence is None:
            return False
        sequence.waiting.appendleft(request)
        return True

    def done(self, name: str, request: Request, now_s: float) -> None:
        """Note that a running request of the sequence is answered."""
        if (sequence := self._sequences.get(name)) is not None:
            sequence.running.discard(request)
            sequence.touched_s = now_s

    def end(self, names: Iterable[str]) -> list[Request]:
        """End sequences by name; return their waiting requests."""
        ended = [self._sequences.pop(name) for name in names if name in self._sequences]
        return [request for sequence in ended for request in sequence.waiting]

    def expire(self, now_s: float) -> list[Request]:
        """End the expired sequences; return their waiting requests."""
        over = [s for s in self._sequences.values() if s.expires_s(self._settings) <= now_s]
        for sequence in over:
            if sequence.executor_id is not None:
                self._former[sequence.name] = sequence.executor_id
        while len(self._former) > MOST_FORMER:
            del self._former[next(iter(self._former))]
        return self.end(sequence.name for sequence in over)

    def next_expiry_s(self) -> float:
        """Return when the next sequence expires; infinity if no sequence is open."""
        return min((s.expires_s(self._settings) for s in self._sequences.values()), default=float("inf"))

    def keep_on(self, executor_ids: Iterable[int]) -> None:
        """Unbind the sequences of other executors: they continue on any executor, without their state."""
        there = set(executor_ids)
        for sequence in self._sequences.values():
            if sequence.executor_id not in there:
                sequence.executor_id = None
