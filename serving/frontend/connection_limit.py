"""Limit on the open connections of a listener, so that clients can't take all file descriptors.

Each connection takes a descriptor of the process, and so do files, the other ports, and the sockets of
workers. A process without a free one can neither accept a probe nor restart a worker.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, MutableSet
from heapq import nsmallest
from itertools import chain
from typing import Any, Protocol

from torchere.serving.frontend.budgets import CONNECTIONS, Budgets

RESERVE_SHARE = 4  # 1/RESERVE_SHARE of the descriptors are for workers, archives and logs
MIN_RESERVE = 48  # minimum of this share: an idle server has 20 descriptors open, and 5 for each worker
CONTROL_SHARE = 32  # 1/CONTROL_SHARE of them are for each listener that serves no predictions
CONTROL_LISTENERS = 3  # management, metrics and gRPC management
INFERENCE_LISTENERS = 2  # REST and gRPC
DEFAULT_CONNECTIONS = 16_384  # of an inference listener, if descriptors suffice; an idle one takes 4 to 7 KiB
MIN_CONNECTIONS = 16
# uvloop accepts one connection of a listening socket per loop iteration (as libuv does since 1.45), and an
# iteration may run a whole batch: of 128 clients connecting at once the last waited half a second. So the
# loop watches the socket of a REST listener through this many descriptors.
ACCEPTED_A_TURN = 32
LISTENING_SHARE = 32  # but at most 1/LISTENING_SHARE of the process's descriptors
REST_LISTENERS = 3  # inference, management and metrics
UNLIMITED_FILES = 2**20  # Linux' own maximum (fs.nr_open), in place of "unlimited"
# The minimum limit on open files with which every listener has MIN_CONNECTIONS.
MIN_FILES = MIN_RESERVE + (CONTROL_LISTENERS + INFERENCE_LISTENERS) * MIN_CONNECTIONS + REST_LISTENERS * 4
# A search for idle connections looks at every connection. So it closes several at once, and if all are busy,
# the next search is at least SEARCH_INTERVAL_S later.
CLOSED_AT_ONCE = 64  # 1/CLOSED_AT_ONCE of the limit
SEARCH_INTERVAL_S = 0.1


class IdleConnection(Protocol):
    """The part of a connection that the limit uses."""

    def idle_since_s(self) -> float | None:
        """Return since when it has no request, in monotonic seconds; None if it has one."""

    def close_idle(self) -> None:
        """Close it; its client may connect again."""


def connection_limit(files: int, wanted: int = 0, *, serves_inference: bool = True) -> int:
    """Return the limit on the connections of a listener, its share of the process's descriptors. Pure.

    Args:
        files: limit of open files of the process.
        wanted: configured limit for an inference listener; 0: `DEFAULT_CONNECTIONS`.
        serves_inference: whether the listener serves predictions.
    """
    control = max(files // CONTROL_SHARE, MIN_CONNECTIONS)
    if not serves_inference:
        return min(control, DEFAULT_CONNECTIONS)
    reserve = max(files // RESERVE_SHARE, MIN_RESERVE)
    left = files - reserve - CONTROL_LISTENERS * control - REST_LISTENERS * listening_descriptors(files)
    return min(wanted or DEFAULT_CONNECTIONS, max(left // INFERENCE_LISTENERS, MIN_CONNECTIONS))


def listening_descriptors(files: int) -> int:
    """Return the number of descriptors through which the loop watches a REST listener's socket. Pure."""
    return max(1, min(ACCEPTED_A_TURN, files // LISTENING_SHARE))


def open_file_limit() -> int:
    """Return how many files this process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UNLIMITED_FILES if soft == resource.RLIM_INFINITY else soft


def limit_of_listener(serves_inference: bool, wanted: int, budgets: Budgets) -> ConnectionLimit:
    """Return the limit of one listener of this process; `wanted` as for `connection_limit`."""
    return ConnectionLimit(
        connection_limit(open_file_limit(), wanted, serves_inference=serves_inference), budgets
    )


class ConnectionLimit:
    """Makes room for new connections of one listener. Used on the event loop only.

    Above the limit the connections idle for longest are closed, as an idle timeout would do later. So a
    client with many idle connections at worst forces others to reconnect. If new connections were refused
    instead, it would lock the others out. A new connection is refused only while all others are busy.
    """

    __slots__ = ("_budgets", "_searchable_s", "handshakes", "limit")

    def __init__(self, limit: int, budgets: Budgets) -> None:
        self.limit = limit  # of open connections
        self.handshakes: set[IdleConnection] = set()  # of TLS; they count as open connections
        self._budgets = budgets
        self._searchable_s = 0.0

    def admits(self, others: MutableSet[Any]) -> bool:
        """Tell whether a new connection may join the others; idle ones are closed and removed for it."""
        if len(others) + len(self.handshakes) < self.limit:
            return True
        now_s = time.monotonic()
        victims: list[tuple[float, int, IdleConnection]] = []
        if now_s >= self._searchable_s:
            victims = nsmallest(self.limit // CLOSED_AT_ONCE + 1, _idle(chain(others, self.handshakes)))
            if not victims:
                self._searchable_s = now_s + SEARCH_INTERVAL_S
        for _, _, connection in victims:
            others.discard(connection)  # it is in one of the two sets
            self.handshakes.discard(connection)
            connection.close_idle()
        self._budgets.refused[CONNECTIONS] += len(victims) or 1
        return bool(victims)


def _idle(connections: Iterable[IdleConnection]) -> Iterator[tuple[float, int, IdleConnection]]:
    for number, connection in enumerate(connections):
        since_s = connection.idle_since_s()
        if since_s is not None:
            yield since_s, number, connection
