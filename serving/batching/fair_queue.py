"""The waiting requests of one version, in the order in which they run: clients take turns.

While all waiting requests are of one client, or fit into a batch, they run in order of rank. Otherwise the
waiting clients take turns (weighted round robin): in its turn, a client has as many requests run as its
weight, in order of rank. So a client waits for one turn of each other client at most, however many requests
these have waiting. A priority orders the requests of one client only: each client chooses its own.

A request of priority p has the rank of one that arrived p times `HEAD_START_S` earlier. So a more urgent
request overtakes others, but none waits for ever: a request is overtaken only by those that arrive within
their head start over it. Deadlines are unaffected: a late request is dropped at any priority.

Requests without an account count as those of one client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torchere.serving.access.client_limits import Account
from torchere.serving.batching.request import Request

LOWEST, HIGHEST = -9, 9  # priorities; 0 is the default
HEAD_START_S = 1.0


def rank_s(request: Request) -> float:
    """Return the rank of a request in monotonic seconds; the lowest rank goes first."""
    return request.enqueued_s - request.priority * HEAD_START_S


def position(queue: Sequence[Request], request: Request) -> int:
    """Return the index at which to insert a request into an ordered queue, after those of equal rank."""
    rank = rank_s(request)
    at = len(queue)
    while at and rank_s(queue[at - 1]) > rank:
        at -= 1
    return at


class Mixed:
    """Marks that several clients wait."""


MIXED = Mixed()


class _Line:
    """The waiting requests of one client, and the rest of its turn."""

    __slots__ = ("requests", "turn", "weight")

    def __init__(self, weight: int) -> None:
        self.requests: deque[Request] = deque()
        self.weight = self.turn = weight


class FairQueue:
    """A queue of requests. Lives on the event loop.

    The requests that run next are in one deque, in order: all of them as long as there is one client or less
    than a batch. Beyond that, the rest wait in one line per client, from which `first` refills the deque.

    Args:
        batch_size: the largest number of requests in a batch.

    Attributes:
        front: the requests that run next, in order. While none is behind, and none of them has a priority, a
            request of `client` may be appended here: a queue of one client then costs no more than a deque.
        behind: how many requests wait in lines. Unless it is 0, call `first` only to dispatch: a client that
            comes later waits for the requests that are in front already.
        client: the client of all requests in front; `MIXED`: there are several.
        is_ranked: a request may have a priority.
    """

    __slots__ = ("_batch_size", "_lines", "_turns", "_weights", "behind", "client", "front", "is_ranked")

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.front: deque[Request] = deque()
        self.client: Account | Mixed | None = None
        self.is_ranked = False
        self._lines: dict[Account | None, _Line] = {}
        self._turns: deque[_Line] = deque()  # the same lines; the first has its turn
        self.behind = 0
        self._weights = 0  # of the lines together

    def __len__(self) -> int:
        return len(self.front) + self.behind

    def __iter__(self) -> Iterator[Request]:
        yield from self.front
        for line in self._turns:
            yield from line.requests

    def first(self, count: int) -> deque[Request]:
        """Return the requests that run next, in order: at least `count`, or all if fewer wait.

        The caller takes them from the left of the deque.
        """
        front = self.front
        while self.behind and len(front) < count:
            if len(self._turns) == 1 and not front:
                self._unite()
                return self.front
            line = self._turns[0]
            request = line.requests.popleft()
            self._note_client(request.account)
            front.append(request)
            line.turn -= 1
            if not line.turn and line.requests:
                line.turn = line.weight
                self._turns.rotate(-1)
            self._taken_from(line, request.account)
        return front

    def add(self, request: Request) -> None:
        """Add a request at its place."""
        self.is_ranked = bool(request.priority) or (self.is_ranked and len(self) > 0)
        if self.behind or (self.client is not request.account and len(self.front) >= self._batch_size):
            self._add_behind(request)
        else:  # all of them share the next batch, or have one client
            self._note_client(request.account)
            self._insert(self.front, request)

    def put_back(self, request: Request) -> None:
        """Put a removed request at the front again: it runs next."""
        self._note_client(request.account)
        self.front.appendleft(request)

    def remove(self, request: Request) -> bool:
        """Remove a request; return False if it does not wait here."""
        if request in self.front:
            self.front.remove(request)
            return True
        line = self._lines.get(request.account)
        if line is None or request not in line.requests:
            return False
        line.requests.remove(request)
        self._taken_from(line, request.account)
        return True

    def before(self, request: Request) -> int:
        """Return how many requests would run before this one if it were added now."""
        if not self.behind and (self.client is request.account or len(self.front) < self._batch_size):
            return self._place(self.front, request)
        if not self.behind:
            return 0
        weight = _weight(request.account)
        line = self._lines.get(request.account)
        own = 0 if line is None else self._place(line.requests, request)
        others = self._weights - (0 if line is None else weight)
        return min(len(self), len(self.front) + own + (own // weight + 1) * others)

    def has_share_left(self, request: Request) -> bool:
        """Return whether with this request its client would have at most its share of the queue.

        A share is the queue, divided by weight among the clients that wait.
        """
        account = request.account
        if not self.behind:
            if self.client is account or not self.front:
                return False
            self._divide()
        line, weight = self._lines.get(account), _weight(account)
        own, weights = (0, self._weights + weight) if line is None else (len(line.requests), self._weights)
        return (own + 1) * weights <= weight * self.behind

    def displace(self) -> Request:
        """Remove and return the last request of the client that has the most requests relative to its weight.

        Call it only after `has_share_left` was True for a request, and the request was added.
        """
        longest = max(self._turns, key=lambda each: len(each.requests) / each.weight)
        displaced = longest.requests.pop()
        self._taken_from(longest, displaced.account)
        return displaced

    def _note_client(self, account: Account | None) -> None:
        """Note the client of a request that joins the front."""
        if not self.front:
            self.client = account
        elif self.client is not account:
            self.client = MIXED

    def _insert(self, requests: deque[Request], request: Request) -> None:
        if self.is_ranked:
            requests.insert(position(requests, request), request)
        else:
            requests.append(request)

    def _place(self, requests: deque[Request], request: Request) -> int:
        is_ranked = self.is_ranked or request.priority
        return position(requests, request) if is_ranked else len(requests)

    def _divide(self) -> None:
        """Move the requests of the front into lines."""
        front, self.front = self.front, deque()
        if isinstance(self.client, Mixed):
            for request in front:
                self._line(request.account).requests.append(request)
        else:
            self._line(self.client).requests = front
        self.behind = len(front)

    def _unite(self) -> None:
        """Make the requests of the last remaining line the front."""
        (self.client,) = self._lines
        self.front = self._turns[0].requests
        self._lines.clear()
        self._turns.clear()
        self.behind = self._weights = 0

    def _line(self, account: Account | None) -> _Line:
        line = self._lines.get(account)
        if line is None:
            line = self._lines[account] = _Line(_weight(account))
            self._turns.append(line)
            self._weights += line.weight
        return line

    def _add_behind(self, request: Request) -> None:
        if not self.behind:
            self._divide()
        self._insert(self._line(request.account).requests, request)
        self.behind += 1

    def _taken_from(self, line: _Line, account: Account | None) -> None:
        self.behind -= 1
        if not line.requests:
            del self._lines[account]
            self._turns.remove(line)
            self._weights -= line.weight


def _weight(account: Account | None) -> int:
    return 1 if account is None else account.weight
