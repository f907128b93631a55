"""Clients in the operator's file: keys and names in certificates, each with its identity and roles.

Each TorchServe server generates its own keys, so a client's key is valid for one server only. With this file
they are the same for all replicas. It is reloaded when it changes, so that keys can be rotated without a
restart: add the new key to the file, update the clients, remove the old key.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from torchere.serving.access.client_limits import LIMIT_NAMES, limits_in
from torchere.serving.access.identity import (
    ANONYMOUS,
    REFUSED,
    ROLES,
    Identity,
    Role,
    bearer_key,
    is_before,
)
from torchere.serving.access.reload import Reloaded
from torchere.serving.errors import NotAllowed, ServingError, Unauthorized

MAX_FILE_BYTES = 1_048_576  # about 5,000 clients
_KEY = re.compile(r"[!-~]{8,}")  # characters valid in a header; TorchServe's keys have 8 of them
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/:-]{0,99}")  # appears in logs and labels
_IDENTITIES = "identities"
_UNUSED = "API"  # TorchServe's key file has it
_MEMBERS = frozenset({"identity", "roles", "key", "subject", "expiration time", *LIMIT_NAMES})
_MEMBERS_OF_KEYS = _MEMBERS - {"roles", "subject"}  # members of an entry under its role
_FORM = (
    'expected a JSON object like {"inference": "KEY", "management": "KEY"}; a list of keys, or '
    '{"key": "KEY", "expiration time": "2030-01-01T00:00:00Z"} as in key_file.json, may stand for each KEY; '
    '"identities" is a list of objects like {"identity": "NAME", "roles": ["inference"], "key": "KEY"}, with '
    '"subject" for the name in a certificate, and its limits: "rate", "burst", "concurrency", "weight"'
)


class KeyFileUnusable(ServingError):
    """The file of fixed keys is unreadable, accessible to other users, or malformed."""


@dataclass(frozen=True, slots=True)
class FixedKey:
    """The owner of one key or one name in certificates, and its expiry time."""

    identity: Identity
    expires_at_s: float | None  # seconds since the epoch; None: never


@dataclass(slots=True)
class Clients:
    """The contents of a key file."""

    # By role and SHA-256 of the key. A look-up by digest takes as long for a wrong key as for a right one,
    # however many keys there are.
    keys: dict[Role, dict[bytes, FixedKey]] = field(default_factory=lambda: {role: {} for role in ROLES})
    subjects: dict[str, FixedKey] = field(default_factory=dict)  # by the name in a certificate
    # Limits of identities with the role `inference`, by name; see `client_limits.py`.
    limits: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no client could call."""
        return not (self.subjects or any(self.keys.values()))


class FixedKeys(Reloaded[Clients]):
    """The clients in a file that the operator writes and the server only reads.

    If no client in the file has a role, calls that need this role are always rejected.

    Only the owner and group of the file may read it; `read_clients` describes its format. `clock` returns
    seconds since the epoch, wall time, because the file may contain expiry times. Without `takes_tokens` only
    certificates are accepted, but no keys.

    Raises:
        KeyFileUnusable: the file is unusable.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, *, takes_tokens: bool = True
    ) -> None:
        self._clock = clock
        self._takes_tokens = takes_tokens
        super().__init__("The token keys", (path,), lambda: read_clients(path))

    def authorize(self, role: Role, authorization: str | None, subjects: Sequence[str] = ()) -> Identity:
        """Return the identity of the client by the names in its certificate, or by the key in `Bearer <key>`.

        Raises:
            Unauthorized: neither has this role: they are missing, wrong or expired.
        """
        clients, now_s = self.value, self._clock()
        for subject in subjects:
            known = clients.subjects.get(subject)
            if known is not None and role in known.identity.roles and is_before(now_s, known.expires_at_s):
                return known.identity
        if self._takes_tokens:
            key = clients.keys[role].get(_digest(bearer_key(authorization)))
            if key is not None and is_before(now_s, key.expires_at_s):
                return key.identity
        raise Unauthorized(REFUSED)

    def client_limits(self) -> Mapping[str, Mapping[str, float]]:
        """Return the limits of each identity, by name; another mapping after each change of the file."""
        return self.value.limits

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        """Reject the renewal, because the operator renews these keys by writing the file.

        Raises:
            NotAllowed: always.
        """
        raise NotAllowed("The keys of this server come from a file that it does not write; renew them there.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_clients(path: Path) -> Clients:
    """Read the keys and subjects of a file: a JSON object.

    Its members `inference`, `management` and `metrics` hold keys of that role: a key, TorchServe's object
    with `key` and optionally `expiration time` (ISO 8601), to which `identity` may be added, or a list.
    `identities` is a list of objects with `identity`, `roles`, a `key`, a `subject` of certificates or both,
    and optionally `expiration time`. An entry with an identity may also set its limits. `API`, which
    TorchServe's key file contains as well, is allowed but ignored. No error message contains a key.

    Raises:
        KeyFileUnusable: the file is missing, accessible to other users, or malformed.
    """
    try:
        document = json.loads(_read_private(path))
    except UnicodeDecodeError as err:
        raise _unusable(path, "no UTF-8") from err
    except (ValueError, RecursionError) as err:  # the error text has a position, but no contents
        raise _unusable(path, f"no JSON: {err}") from err
    try:
        return _read_document(document)
    except _Flaw as err:
        raise _unusable(path, str(err)) from None


class _Flaw(Exception):
    """The document is malformed; the text says how."""


def _read_document(document: object) -> Clients:
    if not isinstance(document, dict):
        raise _Flaw("no JSON object")
    _check_members(document, {*ROLES, _UNUSED, _IDENTITIES})
    clients = Clients()
    for role in ROLES:
        for entry in _listed(document.get(role, [])):
            plain = {"key": entry} if isinstance(entry, str) else entry
            if not isinstance(plain, dict):
                raise _Flaw(f"no key in {role!r}")
            _check_members(plain, _MEMBERS_OF_KEYS, f" of a key in {role!r}")
            name = "" if plain.get("identity") is None else _identity_name(plain)
            identity = Identity(name, frozenset({role})) if name else ANONYMOUS[role]
            _add_key(clients, role, plain, identity)
            _add_limits(clients, plain, identity)
    for entry in _listed(document.get(_IDENTITIES, [])):
        _add_identity(clients, entry)
    if clients.is_empty:
        raise _Flaw("neither inference nor management, and no identities")
    return clients


def _check_members(entry: Mapping[str, object], known: Set[str], place: str = "") -> None:
    if unknown := sorted(entry.keys() - known):
        raise _Flaw(f"unknown member {unknown[0]!r}{place}")


def _listed(entry: object) -> list[Any]:
    return entry if isinstance(entry, list) else [entry]


def _add_identity(clients: Clients, entry: object) -> None:
    if not isinstance(entry, dict):
        raise _Flaw(f"no object in {_IDENTITIES!r}")
    name = _identity_name(entry)
    _check_members(entry, _MEMBERS, f" of identity {name!r}")
    given = _listed(entry.get("roles", []))
    wrong = [role for role in given if role not in ROLES]
    if wrong or not given:
        found = f"an unknown role of identity {name!r}" if wrong else f"no roles of identity {name!r}"
        raise _Flaw(f"{found}; there are {', '.join(ROLES)}")
    identity = Identity(name, frozenset(given))
    if "key" not in entry and "subject" not in entry:
        raise _Flaw(f"neither key nor subject of identity {name!r}")
    if "key" in entry:
        for role in cast("list[Role]", given):
            _add_key(clients, role, entry, identity)
    for subject in _listed(entry.get("subject", [])):
        if not isinstance(subject, str) or not subject:
            raise _Flaw(f"a subject of identity {name!r} is no text")
        if subject in clients.subjects:
            raise _Flaw(f"identity {name!r} has the subject of another one")
        clients.subjects[subject] = FixedKey(identity, _expiry(name, entry.get("expiration time")))
    _add_limits(clients, entry, identity)


def _add_limits(clients: Clients, entry: Mapping[str, object], identity: Identity) -> None:
    """Add the limits of an entry to those that its identity has from other entries."""
    try:
        limits = limits_in(entry)
    except ValueError as err:
        raise _Flaw(f"a limit of {identity.name!r} is unusable: {err}") from None
    if limits and not identity.name:
        raise _Flaw("an entry has limits and no identity")
    if identity.name and "inference" in identity.roles:
        known = clients.limits.setdefault(identity.name, {})
        if any(known.get(name, value) != value for name, value in limits.items()):
            raise _Flaw(f"two entries of identity {identity.name!r} have different limits")
        known |= limits


def _identity_name(entry: Mapping[str, object]) -> str:
    name = entry.get("identity")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _Flaw("the name of an identity is missing, or is not 1 to 100 letters, digits and ._@/:-")
    return name


def _add_key(clients: Clients, role: Role, entry: Mapping[str, object], identity: Identity) -> None:
    place = identity.name or role
    for secret in _secrets(entry, place):
        digest = _digest(secret.encode())
        key = FixedKey(identity, _expiry(place, entry.get("expiration time")))
        known = clients.keys[role].get(digest)
        if known is not None and known.identity != identity:
            raise _Flaw(f"a key of {place!r} is that of another identity, too")
        if known is None or (
            known.expires_at_s is not None and is_before(known.expires_at_s, key.expires_at_s)
        ):
            clients.keys[role][digest] = key  # if two entries have one key, the later expiry counts


def _secrets(entry: Mapping[str, object], place: str) -> Iterator[str]:
    for secret in _listed(entry.get("key")):
        if not isinstance(secret, str):
            raise _Flaw(f"no key in {place!r}")
        if not _KEY.fullmatch(secret):
            raise _Flaw(f"a key in {place!r} is shorter than 8 characters, or is not printable ASCII")
        yield secret


def _expiry(place: str, text: object) -> float | None:
    if text is None:
        return None
    try:
        # Python 3.10 rejects "Z" and fractions other than 3 or 6 digits; TorchServe writes 9.
        exact = re.sub(r"\.(\d+)", lambda fraction: f".{fraction[1][:6]:0<6}", str(text))
        moment = datetime.fromisoformat(re.sub("Z$", "+00:00", exact))
    except ValueError as err:
        raise _Flaw(f"the expiration time of {place!r} is no ISO 8601 time") from err
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _read_private(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise _unusable(
                    path, f"mode {mode:04o}, open to others", "expected 0600, or 0440 with a group"
                )
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as err:
        raise _unusable(path, str(err.strerror), "expected a file that this process may read") from err
    if len(text) > MAX_FILE_BYTES:
        raise _unusable(path, f"more than {MAX_FILE_BYTES} bytes")
    return text.decode("utf-8")


def _unusable(path: Path, found: str, expected: str = _FORM) -> KeyFileUnusable:
    return KeyFileUnusable("The file of token_keys_file can't be used.", f"{path}: {found}; {expected}.")
