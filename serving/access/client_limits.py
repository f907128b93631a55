"""Limits for each client: the rate of its requests, its unanswered predictions, and its weight in queues.

A client is an identity, or an address where it has none. Memory is bounded: beyond `MAX_ACCOUNTS` clients,
those that were idle longest are forgotten, and begin anew. Clients with a connection or an unanswered
prediction are kept.

Used on the event loop only. Each call takes constant time, and there is no timer.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, NoReturn

from torchere.serving.config.server_settings import MAX_CLIENT_LIMIT, ClientSettings
from torchere.serving.errors import TooManyRequests
from torchere.serving.types import ClientNumbers

MAX_ACCOUNTS = 10_000  # 300 bytes each
EVICTION_TRIES = 8  # accounts tried for each new account: several, so that the table gets smaller again
# An IPv6 client has a network of 2**64 addresses (RFC 6177), each of which would count as another client.
IPV6_PREFIX = 64
ROUNDING_S = 1e-9
RETRY_S = 1.0  # Retry-After of a refusal for concurrency; a refusal for a full queue has the same
MAX_WEIGHT = 100  # with more, a turn of one client would delay the other clients for too long

# Names of the limits: label values, like those of `frontend/budgets.py`.
RATE, CONCURRENCY, QUEUE_SHARE = "client_rate", "client_concurrency", "client_queue_share"
CLIENT_LIMITS = (RATE, CONCURRENCY, QUEUE_SHARE)

_TEXTS = {
    RATE: "This client sends requests faster than it may. Try again later.",
    CONCURRENCY: "This client has as many unanswered requests as it may have. Try again later.",
}


class Quota(NamedTuple):
    """The limits of one client; 0: no limit."""

    rate: float = 0.0  # requests a second
    burst: int = 0  # requests accepted at once after a pause; 0: as many as `rate` allows in a second
    concurrency: int = 0  # unanswered predictions
    weight: int = 1  # predictions in each of the client's turns while other clients wait


class Tally:
    """Counters of one identity, or of all clients without one: see `ClientNumbers`."""

    __slots__ = ("admitted", "refused")

    def __init__(self) -> None:
        self.admitted = 0
        self.refused: Counter[str] = Counter(dict.fromkeys(CLIENT_LIMITS, 0))


class Account:
    """The usage of one client; `name` is its identity or address. Lives on the event loop.

    Each request moves `paid_until_s` forward by an interval, to at most one burst from now: the generic cell
    rate algorithm (ITU-T I.371), a token bucket in one number.
    """

    __slots__ = (
        *("_refused", "burst_s", "concurrency", "connections", "interval_s", "name", "paid_until_s"),
        *("running", "tally", "weight"),
    )

    def __init__(self, name: str, quota: Quota, tally: Tally, refused: Counter[str]) -> None:
        self.name = name
        self.running = 0  # unanswered predictions: `enter` adds one, and its end subtracts one
        self.connections = 0  # connections that keep the account
        self.tally = tally
        self._refused = refused
        self.paid_until_s = 0.0  # monotonic time up to which the client's requests have used up its rate
        self.allow(quota)

    def allow(self, quota: Quota) -> None:
        """Apply the limits in `quota` to the client."""
        self.weight = quota.weight
        self.concurrency = quota.concurrency or MAX_CLIENT_LIMIT
        self.interval_s = 1 / quota.rate if quota.rate else 0.0  # between two requests; 0: no limit
        # The client's rate allows a whole burst in this time.
        self.burst_s = (quota.burst or max(1.0, quota.rate)) * self.interval_s + ROUNDING_S

    def charge(self, now_s: float) -> None:
        """Charge a request to the rate of the client, before its body is read.

        Raises:
            TooManyRequests: the request is too soon, or too many predictions of the client are unanswered.
        """
        if self.running >= self.concurrency:
            self.refuse(CONCURRENCY, RETRY_S)
        interval_s = self.interval_s
        if interval_s:
            paid_until_s = self.paid_until_s
            if paid_until_s <= now_s:
                self.paid_until_s = now_s + interval_s  # a burst is at least one request
                return
            ahead_s = paid_until_s + interval_s - now_s
            if ahead_s > self.burst_s:
                self.refuse(RATE, ahead_s - self.burst_s + ROUNDING_S)
            self.paid_until_s = paid_until_s + interval_s

    def enter(self) -> None:
        """Count a prediction as unanswered; decrement `running` once it has ended.

        Raises:
            TooManyRequests: too many predictions of the client are unanswered.
        """
        if self.running >= self.concurrency:
            self.refuse(CONCURRENCY, RETRY_S)
        self.running += 1
        self.tally.admitted += 1

    def count_refusal(self, limit: str) -> None:
        """Count a request that one of the limits refused."""
        self._refused[limit] += 1
        self.tally.refused[limit] += 1

    def refuse(self, limit: str, retry_after_s: float) -> NoReturn:
        """Count a request that a limit refuses, and raise `TooManyRequests`."""
        self.count_refusal(limit)
        raise TooManyRequests(_TEXTS[limit], retry_after_s)


OwnLimits = Mapping[str, Mapping[str, float]]  # limits by identity, then by the fields of `Quota`


class ClientLimits:
    """The accounts of all clients.

    Args:
        default: the quota of a client without limits of its own.
        refused: counts refusals by limit, for all clients together.
        own_limits: returns limits of identities, which replace the default's; a new mapping after a change.
            Metrics have a series for each of these identities, and one for all others. None: no such limits.
    """

    __slots__ = ("_accounts", "_default", "_own", "_own_limits", "_refused", "_tallies")

    def __init__(
        self,
        default: Quota,
        refused: Counter[str],
        own_limits: Callable[[], OwnLimits] | None = None,
    ) -> None:
        self._default = default
        self._refused = refused
        self._refused.update(dict.fromkeys(CLIENT_LIMITS, 0))
        self._own_limits = own_limits
        self._own: OwnLimits = {}
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # the most recently used is last
        self._tallies: dict[str, Tally] = {"": Tally()}
        if own_limits is not None:
            self._take(own_limits())

    def __len__(self) -> int:
        return len(self._accounts)

    def charge(self, client: str, now_s: float) -> Account:
        """Charge a request to the rate of its client, before its body is read; return the client's account.

        Raises:
            TooManyRequests: the request is too soon, or too many predictions of the client are unanswered.
        """
        if self._own_limits is not None and (own := self._own_limits()) is not self._own:
            self._take(own)
        account = self.account(client)
        account.charge(now_s)
        return account

    def keep(self, client: str) -> Account:
        """Return the account of the client of a connection, to be kept until `let_go`."""
        account = self.account(client)
        account.connections += 1
        return account

    def let_go(self, account: Account) -> None:
        """Record the end of a connection that kept the account of its client."""
        account.connections -= 1
        self._accounts.move_to_end(account.name)

    def tallies(self) -> Mapping[str, ClientNumbers]:
        """Return the counters by identity; "" has the counters of all clients without an identity."""
        running = dict.fromkeys(self._tallies.values(), 0)
        for account in self._accounts.values():
            if account.running:
                running[account.tally] += account.running
        return {
            name: ClientNumbers(tally.admitted, running[tally], dict(tally.refused))
            for name, tally in self._tallies.items()
        }

    def account(self, client: str) -> Account:
        """Return the account of a client; make it if the client has none."""
        name = network_of(client) if ":" in client else client
        accounts = self._accounts
        account = accounts.get(name)
        if account is None:
            self._forget()
            account = accounts[name] = Account(name, self._quota(name), self._tally(name), self._refused)
        else:
            accounts.move_to_end(name)
        return account

    def _quota(self, name: str) -> Quota:
        limits = self._own.get(name)
        return self._default._replace(**limits) if limits else self._default  # type: ignore[arg-type]

    def _tally(self, name: str) -> Tally:
        return self._tallies.get(name) or self._tallies[""]

    def _take(self, own: OwnLimits) -> None:
        """Give every account its new quota; add counters of new identities, drop those of removed ones."""
        self._own = own
        known = self._tallies
        self._tallies = {"": known[""]} | {name: known.get(name) or Tally() for name in own}
        for account in self._accounts.values():
            account.allow(self._quota(account.name))
            account.tally = self._tally(account.name)

    def _forget(self) -> None:
        """Make room for an account: forget idle ones among the `EVICTION_TRIES` least recently used."""
        accounts = self._accounts
        for _ in range(EVICTION_TRIES):
            if len(accounts) < MAX_ACCOUNTS:
                return
            name, account = next(iter(accounts.items()))
            if account.running or account.connections:
                accounts.move_to_end(name)
            else:
                del accounts[name]


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return the network of an IPv6 address, which counts as one client; return any other name unchanged."""
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
        ValueError: a limit is not a number, or is out of range; the text names it.
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
    settings: ClientSettings, own_limits: Callable[[], OwnLimits] | None, refused: Counter[str]
) -> ClientLimits | None:
    """Return the configured limits; None if no setting and no identity requires telling clients apart.

    This is decided at start-up: if the first identity is added later, its limits apply after a restart.
    """
    if settings == ClientSettings() and not (own_limits and own_limits()):
        return None
    return ClientLimits(Quota(settings.rate, settings.burst, settings.concurrency), refused, own_limits)
