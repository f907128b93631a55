"""Budgets for the bytes of requests and answers that clients make the server hold, and for long decodes.

Frontends reserve bytes before they buffer a body or an unfinished message, and before they start to inflate
one. Requests that need no key (the health service, paths without a key) have a small budget of their own, so
that a client without a key can't exhaust the budget of authorised clients.

Used on the event loop only.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torchere.serving.io.loop_time import LoopTurns

Decoded = TypeVar("Decoded")
Refusal = TypeVar("Refusal", bound=Exception)

DEFAULT_BYTES = 2**31  # of all connections; a server derives its own limit from its memory
CONNECTION_SHARE = 4  # one connection gets at most 1/CONNECTION_SHARE of the limit
KEY_FREE_SHARE = 64  # all requests that need no key together get at most 1/KEY_FREE_SHARE of it
# Every budget except the key-free one has room for at least this many messages of the greatest size.
MIN_MESSAGES = 4
MESSAGE_OVERHEAD_BYTES = 4096  # of a gRPC message: names and tags around a body of the maximum size
KEY_FREE_MESSAGE_BYTES = 1024  # for the name of a service; too short for many fields of two bytes
MIN_KEY_FREE_BYTES = 2**20
# RFC 1951: a match of 258 bytes takes at least two bits, so data grow at most 1032-fold. Reserving more would
# refuse short messages without need.
MAX_INFLATION = 1032

ALL, CONNECTION, KEY_FREE = "all", "connection", "key_free"  # label values, by the budget that refuses
UNSENT = "unsent"  # label value for answers that clients have not read
# Limits on counts instead of bytes: connections of a listener, health watches, and useless frames (floods).
CONNECTIONS, WATCHES, FLOOD = "connections", "watches", "flood"

# zlib releases the GIL. Inflating longer data on the loop costs it more than a thread does. A kilobyte may
# hold a megabyte, and one read of a connection hundreds of such messages, so both sizes are limited.
INLINE_BYTES = 1024  # compressed
# The content takes longer than inflating it: 4 KB of inputs for a model take 3 ms to translate.
INLINE_INFLATED_BYTES = 4096
GZIP_BITS = 31
WINDOW_BITS = {"gzip": GZIP_BITS, "deflate": 15}  # for zlib: 15 for its own frame, 15 + 16 for a gzip frame
# Members of a gzip body. zlib copies the input after the end of a member, with the GIL held. So all members
# except the first get at most `_MEMBER_BYTES` of input at a time.
MAX_MEMBERS = 4096
_MEMBER_BYTES = 65_536
_MEMBER_START = b"\x1f\x8b"


def inflated_if_short(data: bytes | memoryview, window_bits: int) -> bytes | None:
    """Decompress bytes that are short in both forms; None: they are long or malformed, so use a thread."""
    if len(data) > INLINE_BYTES:
        return None
    unpacker = zlib.decompressobj(window_bits)
    try:
        found = unpacker.decompress(data, INLINE_INFLATED_BYTES)
    except zlib.error:
        return None
    return found if unpacker.eof and not unpacker.unused_data else None


def inflated(data: bytes | memoryview, window_bits: int, max_bytes: int) -> bytes:
    """Decompress bytes, including all members of a gzip body (RFC 1952, 2.2).

    It stops one byte after `max_bytes`, to bound the memory: a longer result may be incomplete.

    Raises:
        zlib.error: the bytes are malformed, end too early or too late, or have too many members.
    """
    pieces: list[bytes] = []
    left, rest, size = max_bytes + 1, memoryview(data), len(data)
    for _ in range(MAX_MEMBERS):
        unpacker = zlib.decompressobj(window_bits)
        while not unpacker.eof:
            if not rest:
                raise zlib.error(f"it ends too early, after {len(data)} bytes")
            given = rest[:size]
            pieces.append(unpacker.decompress(given, left))
            left -= len(pieces[-1])
            rest = rest[len(given) - len(unpacker.unused_data) :]
            if not left:
                return b"".join(pieces)
        if not rest:
            return b"".join(pieces)
        if window_bits != GZIP_BITS or rest[:2] != _MEMBER_START:
            raise zlib.error(f"{len(rest)} bytes stand behind its end")
        size = _MEMBER_BYTES
    raise zlib.error(f"it has more than {MAX_MEMBERS} members: compress it as one")


class BudgetExceeded(Exception):
    """There is no room for the bytes. The text names the budget; each protocol has its own status."""


class Budgets:
    """The budgets of one server.

    Args:
        limit_bytes: limit on the bytes of all connections' requests, and again on those of their answers.
        message_bytes: the greatest size of a message.
    """

    __slots__ = (
        *("connection_limit_bytes", "decodes", "held_bytes", "key_free_bytes", "key_free_limit_bytes"),
        *("limit_bytes", "refused", "turns", "unsent_bytes"),
    )

    def __init__(self, limit_bytes: int = DEFAULT_BYTES, message_bytes: int = 0) -> None:
        least = MIN_MESSAGES * message_bytes
        self.limit_bytes = max(limit_bytes, least)
        self.connection_limit_bytes = max(self.limit_bytes // CONNECTION_SHARE, least)
        self.key_free_limit_bytes = max(self.limit_bytes // KEY_FREE_SHARE, MIN_KEY_FREE_BYTES)
        self.held_bytes = 0  # bytes that all connections hold now
        self.key_free_bytes = 0  # the part of them that belongs to requests without a key
        # How often each budget refused bytes, and each other limit a connection or a call.
        self.refused: Counter[str] = Counter(
            dict.fromkeys((ALL, CONNECTION, KEY_FREE, UNSENT, CONNECTIONS, WATCHES, FLOOD), 0)
        )
        self.decodes = DecodeQueue()
        self.turns = LoopTurns()
        self.unsent_bytes = 0  # bytes of answers that clients of all connections have not read

    def over(self, held_bytes: int, size: int, *, key_free: bool) -> BudgetExceeded:
        """Count a refusal and return the error that names the exceeded budget."""
        if key_free and self.key_free_bytes + size > self.key_free_limit_bytes:
            budget, text = KEY_FREE, f"Requests without a key hold {self.key_free_limit_bytes} bytes"
        elif held_bytes + size > self.connection_limit_bytes:
            budget, limit_bytes = CONNECTION, self.connection_limit_bytes
            text = f"Unfinished calls of this connection have more than {limit_bytes} bytes"
        else:
            budget = ALL
            text = f"Unfinished calls of all clients have more than {self.limit_bytes} bytes: try again later"
        self.refused[budget] += 1
        return BudgetExceeded(text)

    def flaw_of_answers(self, longest_bytes: int) -> str:
        """Return an error, and count a refusal, if too many bytes of answers are unsent; else "".

        `longest_bytes` is the maximum size of one answer.
        """
        limit_bytes = max(self.limit_bytes, MIN_MESSAGES * longest_bytes)
        if self.unsent_bytes <= limit_bytes:
            return ""
        self.refused[UNSENT] += 1
        return f"Answers that clients have not taken have more than {limit_bytes} bytes"


class ConnectionBudget:
    """Bytes that one connection holds. Return each byte taken exactly once, with `give` or `give_all`."""

    __slots__ = ("_leased_bytes", "budgets", "held_bytes", "key_free_bytes")

    def __init__(self, budgets: Budgets) -> None:
        self.budgets = budgets  # of the server
        self.held_bytes = 0  # in total
        self.key_free_bytes = 0  # the part of them that belongs to requests without a key
        self._leased_bytes = 0  # the part of them that leases hold

    def take(self, size: int, key_free: bool = False) -> None:
        """Count `size` bytes more.

        Raises:
            BudgetExceeded: there is no room for them; nothing was counted.
        """
        budgets = self.budgets
        held, total = self.held_bytes + size, budgets.held_bytes + size
        if (
            held > budgets.connection_limit_bytes
            or total > budgets.limit_bytes
            or (key_free and budgets.key_free_bytes + size > budgets.key_free_limit_bytes)
        ):
            raise budgets.over(self.held_bytes, size, key_free=key_free)
        if key_free:
            budgets.key_free_bytes += size
            self.key_free_bytes += size
        self.held_bytes = held
        budgets.held_bytes = total

    def give(self, size: int, key_free: bool = False) -> None:
        """Give back `size` bytes that were taken."""
        self.held_bytes -= size
        self.budgets.held_bytes -= size
        if key_free:
            self.key_free_bytes -= size
            self.budgets.key_free_bytes -= size

    def give_all(self) -> None:
        """Return all bytes that the connection holds, except leased ones."""
        size = self.held_bytes - self._leased_bytes
        if size:
            self.budgets.held_bytes -= size
            self.budgets.key_free_bytes -= self.key_free_bytes
            self.held_bytes, self.key_free_bytes = self._leased_bytes, 0

    def lease_inflation(self, size: int, limit_bytes: int) -> Lease:
        """Lease room for the decompressed form of a compressed body of `size` bytes.

        The lease covers `size` times `MAX_INFLATION` bytes, and at most `limit_bytes`.

        Raises:
            BudgetExceeded: there is no room.
        """
        size = min(size * MAX_INFLATION, limit_bytes)
        self.take(size)
        self._leased_bytes += size
        return Lease(self, size)

    def end_lease(self, size: int) -> None:
        """Give back the bytes of a lease."""
        self._leased_bytes -= size
        self.give(size)


class Lease:
    """Bytes reserved for work in a thread. They stay held until it ends, even if the connection is lost."""

    __slots__ = ("_budget", "held_bytes")

    def __init__(self, budget: ConnectionBudget, size: int) -> None:
        self._budget = budget
        self.held_bytes = size

    def end(self) -> None:
        """Give the bytes back. Further calls have no effect."""
        size, self.held_bytes = self.held_bytes, 0
        self._budget.end_lease(size)


class ResultsBudget:
    """Bytes of results that one run of a workflow holds for its next steps, in the budget of all clients."""

    __slots__ = ("_budgets", "held_bytes")

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self.held_bytes = 0

    def take(self, size: int) -> None:
        """Count `size` bytes more; raise `BudgetExceeded`, and count none, if there is no room for them."""
        if self._budgets.held_bytes + size > self._budgets.limit_bytes:
            raise self._budgets.over(0, 0, key_free=False)
        self.held_bytes += size
        self._budgets.held_bytes += size

    def give(self, size: int) -> None:
        """Give back `size` bytes that were taken."""
        self.held_bytes -= size
        self._budgets.held_bytes -= size


def in_thread(work: Callable[[], Decoded]) -> asyncio.Future[Decoded]:
    """Run `work` in a thread. The future has the error if no thread can be started (a limit of processes)."""
    loop, left = asyncio.get_running_loop(), [work]

    def run() -> Decoded:
        return left.pop()()

    try:
        return loop.run_in_executor(None, run)
    except RuntimeError as error:
        left.clear()  # the executor has queued it, and would run it later, with all that it holds
        failed: asyncio.Future[Decoded] = loop.create_future()
        failed.set_exception(error.with_traceback(None))  # a traceback's frame references the future: a cycle
        return failed


MIN_PAUSE_S = 0.001  # the event loop needs no shorter pauses


class DecodeQueue:
    """Runs functions one at a time in a thread. Clients take turns, each in the order of its `add` calls.

    Decoding a body of JSON takes up to 24 times its size in memory, and half a second for the default
    `max_request_size`, mostly with the GIL held. Threads that decode several such bodies at once would only
    compete for the GIL with each other and with the event loop. After a long decode the next one waits for a
    tenth of its time, in which the event loop answers the requests that waited for the GIL.
    """

    __slots__ = ("_is_running", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, deque[QueuedDecode]] = {}  # by client; the first one is next
        self._is_running = False

    def add(
        self, work: Callable[[], Any], then: Callable[[asyncio.Future[Any]], None], client: str
    ) -> QueuedDecode:
        """Run `work` in a thread when it is its turn, then `then` with its future on the loop.

        `client` names the client: its identity, or its address.
        """
        queued = QueuedDecode(work, then)
        self._waiting.setdefault(client, deque()).append(queued)
        if not self._is_running:
            self._run_next()
        return queued

    async def run(self, work: Callable[[], Decoded], client: str) -> Decoded:
        """Run `work` as `add` does, and return its result; withdraw it if the awaiting task is cancelled."""
        decoded: asyncio.Future[Decoded] = asyncio.get_running_loop().create_future()

        def come_back(done: asyncio.Future[Decoded]) -> None:
            error = done.exception()
            if decoded.done():
                return
            decoded.set_exception(error) if error else decoded.set_result(done.result())

        queued = self.add(work, come_back, client)
        try:
            return await decoded
        finally:
            queued.withdraw()

    def _run_next(self) -> None:
        self._is_running = False
        while self._waiting and not self._is_running:
            client = next(iter(self._waiting))
            waiting = self._waiting.pop(client)
            queued = waiting.popleft()
            work, queued.work = queued.work, None
            if waiting:  # its next turn comes after the other clients
                self._waiting[client] = waiting
            if work is not None:
                self._is_running = True
                began_s = asyncio.get_running_loop().time()
                in_thread(work).add_done_callback(partial(self._end, queued, began_s))

    def _end(self, queued: QueuedDecode, began_s: float, running: asyncio.Future[Any]) -> None:
        loop = asyncio.get_running_loop()
        pause_s = (loop.time() - began_s) / 10
        if pause_s < MIN_PAUSE_S:
            self._run_next()
        else:
            loop.call_later(pause_s, self._run_next)
        then, queued.then = queued.then, None
        if then is not None and not running.cancelled():
            then(running)


def outcome_of(work: Callable[[], Decoded], expected: type[Refusal]) -> Decoded | Refusal:
    """Return the result of a decode, or the `expected` error that it raised.

    The frames of its traceback hold the decoded objects. Freeing millions of them takes a tenth of a second,
    so that happens here, in the thread.
    """
    try:
        return work()
    except expected as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return error


class QueuedDecode:
    """One function in a `DecodeQueue`."""

    __slots__ = ("then", "work")

    def __init__(self, work: Callable[[], Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        self.work: Callable[[], Any] | None = work  # None: it has started, or was withdrawn
        self.then: Callable[[asyncio.Future[Any]], None] | None = then

    def withdraw(self) -> None:
        """Drop the function and its arguments, unless it runs already; `then` is not called."""
        self.work = self.then = None
