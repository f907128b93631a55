"""Limits for each client: the rate of its requests, its unanswered predictions, and its weight in queues.

A client is an identity, or an address where it has none. Memory is bounded: of more than `MAX_ACCOUNTS`
clients those that were idle for longest are forgotten, and begin anew.

Used on the event loop only. Each call takes constant time, and there is no timer.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from torchere.serving.config.server_settings import MAX_CLIENT_LIMIT, ClientSettings
from torchere.serving.errors import TooManyRequests

MAX_ACCOUNTS = 10_000  # 300 bytes each
EVICTION_TRIES = 8  # accounts with unanswered predictions are kept
# A client of IPv6 has a network of 2**64 addresses (RFC 6177), each of which would be a client of its own.
IPV6_PREFIX = 64
RETRY_S = 1.0  # after a refusal for concurrency, as for a full queue
MAX_WEIGHT = 100  # a longer turn of one client would delay the others for too long

# The limits, as label values beside those of `frontend/budgets.py`.
RATE, CONCURRENCY, QUEUE_SHARE = "client_rate", "client_concurrency", "client_queue_share"
CLIENT_LIMITS = (RATE, CONCURRENCY, QUEUE_SHARE)

_TEXTS = {
    RATE: "This client sends requests faster than it may. Try again later.",
    CONCURRENCY: "This client has as many unanswered requests as it may have. Try again later.",
}


class Quota(NamedTuple):
    """What one client may use; 0: no limit."""

    rate: float = 0.0  # requests a second
    burst: int = 0  # requests at once after a pause; 0: those of one second
    concurrency: int = 0  # unanswered predictions
    weight: int = 1  # predictions that run in its turn while other clients wait

    @property
    def burst_s(self) -> float:
        """The time in which the requests of a burst are earned, in seconds."""
        return (self.burst or max(1.0, self.rate)) / self.rate if self.rate else 0.0


class Tally:
    """Counters of one identity, or of all clients without one."""

    __slots__ = ("admitted", "refused", "running")

    def __init__(self) -> None:
        self.admitted = 0  # predictions
        self.running = 0  # of these, without an answer
        self.refused: Counter[str] = Counter(dict.fromkeys(CLIENT_LIMITS, 0))  # requests, by limit


class Account:
    """What one client uses. Lives on the event loop.

    Attributes:
        name: its identity, or its address.
        quota: what it may use.
        running: its unanswered predictions.
        paid_until_s: when its requests are all earned, in monotonic seconds: with R requests a second each
            adds 1/R (the generic cell rate algorithm, ITU-T I.371: a token bucket in one number).
        tally: where its requests are counted.
    """

    __slots__ = ("_refused", "name", "paid_until_s", "quota", "running", "tally")

    def __init__(self, name: str, quota: Quota, tally: Tally, refused: Counter[str]) -> None:
        self.name = name
        self.quota = quota
        self.running = 0
        self.paid_until_s = 0.0
        self.tally = tally
        self._refused = refused

    def leave(self) -> None:
        """Record that a prediction has its answer, or was not admitted."""
        self.running -= 1
        self.tally.running -= 1

    def count_refusal(self, limit: str) -> None:
        """Count a request that one of the limits refused."""
        self._refused[limit] += 1
        self.tally.refused[limit] += 1

    def refuse_over_concurrency(self) -> None:
        """Raise `TooManyRequests` if one more prediction would be too many."""
        if 0 < self.quota.concurrency <= self.running:
            self.count_refusal(CONCURRENCY)
            raise TooManyRequests(_TEXTS[CONCURRENCY], RETRY_S)


LimitsOf = Callable[[], Mapping[str, Mapping[str, float]]]
_NONE: Mapping[str, Mapping[str, float]] = {}


class ClientLimits:
    """The accounts of all clients.

    Args:
        default: the quota of a client without limits of its own.
        refused: counts refusals by limit, for all clients together.
        limits_of: returns the limits of each identity, which replace those of the default; a new mapping
            after a change. Metrics have a series for each of these identities, and one for all other clients.
        now: monotonic seconds.
    """

    __slots__ = ("_accounts", "_default", "_limits", "_limits_of", "_now", "_refused", "_tallies")

    def __init__(
        self,
        default: Quota,
        refused: Counter[str],
        limits_of: LimitsOf = lambda: _NONE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._default = default
        self._refused = refused
        self._refused.update(dict.fromkeys(CLIENT_LIMITS, 0))
        self._limits_of = limits_of
        self._limits: Mapping[str, Mapping[str, float]] = {}
        self._now = now
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # the most recently used is last
        self._tallies: dict[str, Tally] = {"": Tally()}
        self._take(limits_of())

    def __len__(self) -> int:
        return len(self._accounts)

    def charge(self, client: str) -> None:
        """Charge a request to the rate of its client, before its body is read.

        Raises:
            TooManyRequests: it is too soon, or too many predictions of the client are unanswered.
        """
        account = self._account(client)
        account.refuse_over_concurrency()
        quota = account.quota
        if not quota.rate:
            return
        now_s = self._now()
        paid_until_s = max(account.paid_until_s, now_s) + 1 / quota.rate
        wait_s = paid_until_s - now_s - quota.burst_s
        if wait_s > 1e-9:  # less is a rounding error
            account.count_refusal(RATE)
            raise TooManyRequests(_TEXTS[RATE], wait_s)
        account.paid_until_s = paid_until_s

    def enter(self, client: str) -> Account:
        """Count a prediction as unanswered; call `leave` of the account once it has ended.

        Raises:
            TooManyRequests: too many predictions of the client are unanswered.
        """
        account = self._account(client)
        account.refuse_over_concurrency()
        account.running += 1
        tally = account.tally
        tally.running += 1
        tally.admitted += 1
        return account

    def tallies(self) -> Mapping[str, Tally]:
        """Return the counters by identity; those of all clients without one are under ""."""
        return self._tallies

    def _account(self, client: str) -> Account:
        limits = self._limits_of()
        if limits is not self._limits:
            self._take(limits)
        name = network_of(client) if ":" in client else client
        accounts = self._accounts
        account = accounts.get(name)
        if account is None:
            if len(accounts) >= MAX_ACCOUNTS:
                self._forget_one()
            account = accounts[name] = Account(name, self._quota(name), self._tally(name), self._refused)
        else:
            accounts.move_to_end(name)
        return account

    def _quota(self, name: str) -> Quota:
        limits = self._limits.get(name)
        return self._default._replace(**limits) if limits else self._default  # type: ignore[arg-type]

    def _tally(self, name: str) -> Tally:
        return self._tallies.get(name) or self._tallies[""]

    def _take(self, limits: Mapping[str, Mapping[str, float]]) -> None:
        """Give every account its new quota; add counters of new identities, and drop those of others."""
        self._limits = limits
        known = self._tallies
        self._tallies = {"": known[""]} | {name: known.get(name) or Tally() for name in limits}
        for account in self._accounts.values():
            account.quota = self._quota(account.name)
            tally = self._tally(account.name)
            if tally is not account.tally:
                account.tally.running -= account.running
                tally.running += account.running
                account.tally = tally

    def _forget_one(self) -> None:
        """Forget the client that was idle for longest, unless the oldest ones have unanswered predictions."""
        accounts = self._accounts
        for _ in range(EVICTION_TRIES):
            name, account = next(iter(accounts.items()))
            if not account.running:
                del accounts[name]
                return
            accounts.move_to_end(name)


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return the network of an IPv6 address that counts as one client; any other name as it is."""
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ipaddress.IPv6Network((int(found), IPV6_PREFIX), strict=False))


_MOST = {name: MAX_CLIENT_LIMIT for name in ("rate", "burst", "concurrency")} | {"weight": MAX_WEIGHT}


LIMIT_NAMES = frozenset(_MOST)


def limits_in(entry: Mapping[str, object]) -> dict[str, float]:
    """Return the limits among the members of an entry of the file of keys; see `Quota`.

    Raises:
        ValueError: one is no number, or out of its range; the text says which.
    """
    limits: dict[str, float] = {}
    for name, most in _MOST.items():
        value = entry.get(name)
        if value is None:
            continue
        least = 1 if name == "weight" else 0
        is_number = type(value) is int or (name == "rate" and type(value) is float)
        if not (is_number and isinstance(value, (int, float)) and least <= value <= most):
            kind = "a number" if name == "rate" else "a whole number"
            raise ValueError(f"its {name} is {value!r}, expected {kind} from {least} to {most}")
        limits[name] = value
    return limits


def client_limits_of(
    settings: ClientSettings, limits_of: LimitsOf | None, refused: Counter[str]
) -> ClientLimits | None:
    """Return the configured limits; None if no setting and no identity asks to tell clients apart.

    It is decided once: the first identity that is named while the server runs has limits from the next start.
    """
    limits_of = limits_of or (lambda: _NONE)
    if settings == ClientSettings() and not limits_of():
        return None
    return ClientLimits(Quota(settings.rate, settings.burst, settings.concurrency), refused, limits_of)
