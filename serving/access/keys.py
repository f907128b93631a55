"""Token authorization: keys in a file, and the check of the `Authorization` header.

The module is independent of the protocol: a frontend passes the header (or the gRPC metadata value) and
reports the error.
"""

from __future__ import annotations

import functools
import hmac
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, Protocol

from torchere.serving.access.identity import ANONYMOUS, Identity, Role
from torchere.serving.access.reload import Reloaded
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import NotAllowed, ServingError, Unauthorized

TokenKind = Literal["inference", "management", "api"]

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
_KEY_BYTES = 6  # TorchServe's key length, 8 characters, on which readers of key_file.json may rely
NAMES_IN_FILE: dict[TokenKind, str] = {"management": "management", "inference": "inference", "api": "API"}
_RENEWABLE: tuple[TokenKind, ...] = ("management", "inference")
_BEARER = re.compile(r"Bearer\s+(\S+)", re.ASCII)

# TorchServe's messages, which clients and TorchServe's own tests compare.
REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
_NOT_RENEWED = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"


class KeyFileUnwritable(ServingError):
    """The key file can't be written, so clients can't get the keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key and its expiry time."""

    secret: str = field(repr=False)
    expires_at_s: float | None  # seconds since the epoch; None: never

    def accepts(self, offered: bytes, now_s: float) -> bool:
        """Return whether `offered` equals this key and the key has not expired; compares in constant time."""
        same = hmac.compare_digest(offered, self.secret.encode())
        return same and (self.expires_at_s is None or now_s < self.expires_at_s)


class KeyRing:
    """The keys of one server run.

    The constructor generates new keys and writes them to `path`, which only the owner can read; the keys of
    an earlier run become invalid. Thread-safe: a check reads an immutable map, which a renewal replaces as a
    whole. `_writing` serializes renewals and is held while the file is written, so that file and memory
    differ only briefly.

    Args:
        path: the key file; its directory must exist and be writable.
        expiration_min: minutes until an inference or management key expires; the API key never expires.
        clock: returns seconds since the epoch. Wall time, because the file contains the expiry times.

    Raises:
        KeyFileUnwritable: the file could not be written.
    """

    def __init__(
        self,
        path: Path,
        expiration_min: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._lifetime_s = expiration_min * 60
        self._clock = clock
        self._writing = threading.Lock()
        self._keys: Mapping[TokenKind, Key] = {kind: self._new_key(kind) for kind in NAMES_IN_FILE}
        _write_private(path, _document(self._keys))

    def authorize(self, role: Role, authorization: str | None) -> Identity:
        """Check that `authorization` is `Bearer <key>` with the valid key of this role; it has no identity.

        Raises:
            Unauthorized: the value is missing or malformed, or the key is wrong or expired.
        """
        if role == "metrics" or not self._accepts(role, authorization):
            raise Unauthorized(REFUSED)
        return ANONYMOUS[role]

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        """Replace the management or inference key (the token API); the old key becomes invalid immediately.

        Args:
            wanted: "management" or "inference", as sent by the client.
            authorization: the `Authorization` header, which must contain the API key.

        Raises:
            Unauthorized: the API key is missing or wrong, or `wanted` has another value.
            KeyFileUnwritable: the file can't be written; the old key stays valid.
        """
        allowed = self._accepts("api", authorization)
        kind = next((kind for kind in _RENEWABLE if kind == wanted), None)
        if not allowed or kind is None:
            raise Unauthorized(_NOT_RENEWED)
        with self._writing:
            keys = {**self._keys, kind: self._new_key(kind)}
            _write_private(self.path, _document(keys))
            self._keys = keys

    def _new_key(self, kind: TokenKind) -> Key:
        expires_at_s = self._clock() + self._lifetime_s if kind in _RENEWABLE else None
        value = "-"
        while value.startswith("-"):  # a command line would parse it as an option
            value = secrets.token_urlsafe(_KEY_BYTES)
        return Key(value, expires_at_s)

    def _accepts(self, kind: TokenKind, authorization: str | None) -> bool:
        return self._keys[kind].accepts(bearer_key(authorization), self._clock())


def bearer_key(authorization: str | None) -> bytes:
    """Return the key in a `Bearer` header; b"", which is never a key, for any other header.

    The result is bytes because `hmac.compare_digest` refuses text that is not ASCII.
    """
    match = _BEARER.fullmatch(authorization or "")
    return match.group(1).encode("utf-8", "surrogatepass") if match else b""


def _document(keys: Mapping[TokenKind, Key]) -> str:
    """Return the text of the key file, in TorchServe's format and order."""
    entries: dict[str, dict[str, str]] = {}
    for kind, name in NAMES_IN_FILE.items():
        key = keys[kind]
        entries[name] = {"key": key.secret}
        if key.expires_at_s is not None:
            moment = datetime.fromtimestamp(key.expires_at_s, timezone.utc)
            entries[name]["expiration time"] = moment.strftime(_TIME_FORMAT)
    return json.dumps(entries, indent=2) + "\n"


def _write_private(path: Path, text: str) -> None:
    """Write the text to `path` atomically; only the owner can read the file at any time."""
    # A random name and O_EXCL, so that another user can't have created a link or an open file there.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
    except OSError as err:
        raise KeyFileUnwritable(
            "The keys for token authorization can't be stored.",
            f"{path.absolute()}: {err.strerror}; expected a writable directory: start in one, "
            "set key_file, or switch the tokens off with --disable-token-auth",
        ) from err


# Fixed keys for token authorization: a file that every replica of a server reads.
# Each TorchServe server generates its own keys, so a client's key is valid for one server only. With a fixed
# file the keys are the same for all replicas. The file is reloaded when it changes, so that keys can be
# rotated without a restart: add the new key to the file, update the clients, remove the old key.

MAX_FILE_BYTES = 65_536
_KEY = re.compile(r"[!-~]{8,}")  # characters valid in a header; TorchServe's keys have 8 of them
_KINDS: dict[str, TokenKind] = {name: kind for kind, name in NAMES_IN_FILE.items()}
_FORM = (
    'expected a JSON object like {"inference": "KEY", "management": "KEY"}; a list of keys, or '
    '{"key": "KEY", "expiration time": "2030-01-01T00:00:00Z"} as in key_file.json, may stand for each KEY'
)


class KeyFileUnusable(ServingError):
    """The file of fixed keys is unreadable, accessible to other users, or malformed."""


_Keys = Mapping[str, tuple[Key, ...]]  # by the kind of token


class FixedKeys:
    """The keys in a file that the operator writes and the server only reads.

    If the file has no key of a kind, calls of this kind are always rejected. Thread-safe: a check reads an
    immutable map that `refresh` replaces as a whole.

    Args:
        path: the file, which only its owner and group may read; see `read_keys` for the format.
        clock: returns seconds since the epoch. Wall time, because the file may contain expiry times.

    Raises:
        KeyFileUnusable: the file is unusable.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file: Reloaded[_Keys] = Reloaded("The token keys", (path,), functools.partial(read_keys, path))

    def authorize(self, role: Role, authorization: str | None) -> Identity:
        """Return the identity of the client whose `authorization` is `Bearer <key>` with a key of this role.

        Raises:
            Unauthorized: the value is missing or malformed, or the key is wrong or expired.
        """
        offered, now_s = bearer_key(authorization), self._clock()
        # Not a generator: the duration of the check must not reveal which key matched.
        accepted = [key.accepts(offered, now_s) for key in self._file.value.get(role, ())]
        if not any(accepted):
            raise Unauthorized(REFUSED)
        return ANONYMOUS[role]

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        """Reject the renewal, because the operator renews these keys by writing the file.

        Raises:
            NotAllowed: always.
        """
        raise NotAllowed("The keys of this server come from a file that it does not write; renew them there.")

    def refresh(self) -> None:
        """Reload the file if it has changed. Blocks. An unusable file leaves the keys unchanged."""
        self._file.refresh()


def keys_of(settings: ServerSettings) -> KeyRing | FixedKeys | None:
    """Return the configured keys; None if token authorization is disabled.

    Raises:
        KeyFileUnusable, KeyFileUnwritable: see `FixedKeys` and `KeyRing`.
    """
    if not settings.token_auth_enabled:
        return None
    if settings.token_keys_file is not None:
        return FixedKeys(settings.token_keys_file)
    return KeyRing(settings.key_file, settings.token_expiration_min)


def read_keys(path: Path) -> _Keys:
    """Read the keys of a file: a JSON object with `inference`, `management`, or both.

    Each value is a key, TorchServe's object with `key` and optionally `expiration time` (ISO 8601), or a list
    of these. `API`, which TorchServe's key file contains as well, is allowed but ignored. No error message
    contains a key.

    Raises:
        KeyFileUnusable: the file is missing, accessible to other users, or malformed.
    """
    try:
        document = json.loads(_read_private(path))
    except UnicodeDecodeError as err:
        raise _unusable(path, "no UTF-8") from err
    except (ValueError, RecursionError) as err:  # the error text has a position, but no contents
        raise _unusable(path, f"no JSON: {err}") from err
    if not isinstance(document, dict):
        raise _unusable(path, "no JSON object")
    unknown = sorted(set(document) - set(_KINDS))
    if unknown or not {"inference", "management"} & document.keys():
        raise _unusable(
            path, f"unknown member {unknown[0]!r}" if unknown else "neither inference nor management"
        )
    keys: dict[str, tuple[Key, ...]] = dict.fromkeys(_KINDS.values(), ())
    for name, entry in document.items():
        entries = entry if isinstance(entry, list) else [entry]
        keys[_KINDS[name]] = tuple(_key(path, name, each) for each in entries)
    return keys


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


def _key(path: Path, name: str, entry: object) -> Key:
    plain = {"key": entry} if isinstance(entry, str) else entry
    if not isinstance(plain, dict) or not isinstance(plain.get("key"), str):
        raise _unusable(path, f"no key in {name!r}")
    if not _KEY.fullmatch(plain["key"]):
        found = f"a key in {name!r} is shorter than 8 characters, or has others than printable ASCII"
        raise _unusable(path, found)
    return Key(plain["key"], _expiry(path, name, plain.get("expiration time")))


def _expiry(path: Path, name: str, text: object) -> float | None:
    if text is None:
        return None
    try:
        # Python 3.10 rejects "Z" and fractions other than 3 or 6 digits; TorchServe writes 9.
        exact = re.sub(r"\.(\d+)", lambda fraction: f".{fraction[1][:6]:0<6}", str(text))
        moment = datetime.fromisoformat(re.sub("Z$", "+00:00", exact))
    except ValueError as err:
        raise _unusable(path, f"the expiration time of {name!r} is no ISO 8601 time") from err
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _unusable(path: Path, found: str, expected: str = _FORM) -> KeyFileUnusable:
    return KeyFileUnusable("The file of token_keys_file can't be used.", f"{path}: {found}; {expected}.")


class Keys(Protocol):
    """The keys of a server with token authorization, as the frontends use them."""

    def authorize(self, role: Role, authorization: str | None) -> Identity:
        """Return the identity of the client whose `Authorization` header has a valid key of that role.

        Raises:
            Unauthorized: the key is missing, wrong or expired.
        """

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        """Replace the key of the kind `wanted` if the header contains the API key.

        Raises:
            Unauthorized: the API key is missing or wrong, or the kind does not exist.
        """
