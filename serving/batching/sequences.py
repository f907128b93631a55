"""Sequences: requests that belong together, in order, on one executor. Bookkeeping only; `now` is passed in.

Contract: TorchServe's stateful batching. A sequence begins with its first request, lives on one executor, has
at most one new request in a batch, and ends when it idled or lived for too long, or its handler says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import SequenceSettings
from torchere.serving.errors import QueueFull


class Sequence:
    """One sequence: where it lives, what waits, and when it was last alive (monotonic seconds)."""

    __slots__ = ("began_s", "executor_id", "name", "running", "touched_s", "waiting")

    def __init__(self, name: str, executor_id: int | None, now_s: float) -> None:
        self.name = name
        self.executor_id = executor_id
        self.waiting: deque[Request] = deque()
        self.running: set[Request] = set()  # taken and not answered; unfinished ones, too
        self.began_s = self.touched_s = now_s

    def expires_s(self, settings: SequenceSettings) -> float:
        """When it ends if nothing happens; a request that waits or runs keeps it from idling."""
        idle_s = float("inf") if self.waiting or self.running else self.touched_s + settings.max_idle_s
        return min(idle_s, self.began_s + settings.timeout_s if settings.timeout_s else float("inf"))


class SequenceTable:
    """All sequences of a version, bounded in number and in what each may have waiting. Not thread-safe."""

    def __init__(self, settings: SequenceSettings, refusal: str) -> None:
        self._settings = settings
        self._refusal = refusal
        self._sequences: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def waiting(self) -> list[Request]:
        """Every request that waits, sequence by sequence."""
        return [request for sequence in self._sequences.values() for request in sequence.waiting]

    def add(self, name: str, request: Request, now_s: float) -> None:
        """Put a request at the end of its sequence, which begins if it is new. Call `expire` before.

        Raises:
            QueueFull: too many sequences, or too many requests wait in this one.
        """
        sequence = self._sequences.get(name)
        if sequence is None:
            if len(self._sequences) >= self._settings.max_sequences:
                raise QueueFull(self._refusal)
            sequence = self._sequences[name] = Sequence(name, None, now_s)
        if len(sequence.waiting) >= self._settings.max_queue_size:
            raise QueueFull(self._refusal)
        sequence.waiting.append(request)
        sequence.touched_s = now_s

    def remove(self, request: Request) -> None:
        """Take a waiting request out; without effect when it does not wait."""
        for sequence in self._sequences.values():
            if request in sequence.waiting:
                sequence.waiting.remove(request)

    def heads(self, executor_id: int, limit: int) -> list[Sequence]:
        """Sequences of that executor, or of none yet, whose next request may run: at most `limit`."""
        ready = (s for s in self._sequences.values() if s.waiting and not s.running)
        able = (s for s in ready if s.executor_id in (None, executor_id))
        return sorted(able, key=lambda sequence: sequence.waiting[0].enqueued_s)[:limit]

    def joining(self, going_on: Iterable[Request], limit: int) -> list[Sequence]:
        """Sequences whose next request may run beside their own among `going_on`: at most `limit`."""
        between_batches = set(going_on)
        ready = (s for s in self._sequences.values() if s.waiting and s.running)
        able = (s for s in ready if s.running <= between_batches)
        return sorted(able, key=lambda sequence: sequence.waiting[0].enqueued_s)[:limit]

    def take(self, sequence: Sequence, executor_id: int) -> Request:
        """Take the next request of a sequence to that executor, where the sequence lives from now on."""
        sequence.executor_id = executor_id
        request = sequence.waiting.popleft()
        sequence.running.add(request)
        return request

    def give_back(self, name: str, request: Request) -> bool:
        """Put a request that was not begun in front again; False when its sequence is over."""
        sequence = self._sequences.get(name)
        if sequence is None:
            return False
        sequence.waiting.appendleft(request)
        return True

    def done(self, name: str, request: Request, now_s: float) -> None:
        """A request of the sequence that ran is answered."""
        if (sequence := self._sequences.get(name)) is not None:
            sequence.running.discard(request)
            sequence.touched_s = now_s

    def end(self, names: Iterable[str]) -> list[Request]:
        """End sequences by name; returns what still waited in them."""
        ended = [self._sequences.pop(name) for name in names if name in self._sequences]
        return [request for sequence in ended for request in sequence.waiting]

    def expire(self, now_s: float) -> list[Request]:
        """End the sequences whose time is over; returns what still waited in them."""
        over = [s.name for s in self._sequences.values() if s.expires_s(self._settings) <= now_s]
        return self.end(over)

    def next_expiry_s(self) -> float:
        """When `expire` has something to do next; infinity when nothing is there."""
        return min((s.expires_s(self._settings) for s in self._sequences.values()), default=float("inf"))

    def keep_on(self, executor_ids: Iterable[int]) -> None:
        """Executors are gone: their sequences go on wherever there is room, without the state they had."""
        there = set(executor_ids)
        for sequence in self._sequences.values():
            if sequence.executor_id not in there:
                sequence.executor_id = None
