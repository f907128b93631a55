"""Token authorization: keys in a file, and the check of the `Authorization` header.

The module is independent of the protocol: a frontend passes the header (or the gRPC metadata value) and
reports the error.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeAlias

from torchere.archiver.atomic import staged
from torchere.serving.access.fixed_keys import FixedKeys
from torchere.serving.access.identity import ANONYMOUS, REFUSED, Identity, Role, bearer_key, is_before
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import ServingError, Unauthorized

TokenKind = Literal["inference", "management", "api"]

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
_KEY_BYTES = 6  # TorchServe's key length, 8 characters, on which readers of key_file.json may rely
NAMES_IN_FILE: dict[TokenKind, str] = {"management": "management", "inference": "inference", "api": "API"}
_RENEWABLE: tuple[TokenKind, ...] = ("management", "inference")

# TorchServe's message, which clients and TorchServe's own tests compare.
_NOT_RENEWED = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"


class KeyFileUnwritable(ServingError):
    """The key file can't be written, so clients can't get the keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key and its expiry time."""

    secret: str = field(repr=False)
    expires_at_s: float | None  # seconds since the epoch; None: never
    ends_at_s: float | None = None  # the same moment on the monotonic clock: see `KeyRing`


class KeyRing:
    """The keys of one server run.

    The constructor generates new keys and writes them to `path`, which only the owner can read; the keys of
    an earlier run become invalid. Thread-safe: a check reads an immutable map, which a renewal replaces as a
    whole.

    Args:
        path: the key file; its directory must exist and be writable.
        expiration_min: minutes until an inference or management key expires; the API key never expires.
        clock: returns seconds since the epoch. Wall time, because the file contains the expiry times.
        monotonic: returns seconds of a clock that is never set. A key that was made while the wall clock was
            ahead expires by this one.

    Raises:
        KeyFileUnwritable: the file could not be written.
    """

    def __init__(
        self,
        path: Path,
        expiration_min: float = 60.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._lifetime_s = expiration_min * 60
        self._clock = clock
        self._monotonic = monotonic
        self._writing = threading.Lock()  # held by one renewal until file and memory agree again
        self._keys: Mapping[TokenKind, Key] = {kind: self._new_key(kind) for kind in NAMES_IN_FILE}
        _write_private(path, _document(self._keys))

    def authorize(self, role: Role, authorization: str | None, subjects: Sequence[str] = ()) -> Identity:
        """Check that `authorization` is `Bearer <key>` with the valid key of this role; no identity has it.

        Raises:
            Unauthorized: the value is missing or malformed, or the key is wrong or expired.
        """
        if role == "metrics" or not self._accepts(role, authorization):
            raise Unauthorized(REFUSED)
        return ANONYMOUS[role]

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        """Replace the management or inference key (the token API); the old key becomes invalid immediately.

        `authorization` must contain the API key.

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

    def close(self) -> None:
        """Delete the key file, unless it was replaced: it may hold the keys of a later server."""
        with self._writing, suppress(OSError, ValueError):
            if self.path.read_text(encoding="utf-8") == _document(self._keys):
                self.path.unlink()

    def _new_key(self, kind: TokenKind) -> Key:
        expires_at_s = ends_at_s = None
        if kind in _RENEWABLE:
            expires_at_s, ends_at_s = self._clock() + self._lifetime_s, self._monotonic() + self._lifetime_s
        value = "-"
        while value.startswith("-"):  # a command line would parse it as an option
            value = secrets.token_urlsafe(_KEY_BYTES)
        return Key(value, expires_at_s, ends_at_s)

    def _accepts(self, kind: TokenKind, authorization: str | None) -> bool:
        """Return whether the header has this key, and it has not expired; compares in constant time."""
        key = self._keys[kind]
        is_valid = is_before(self._clock(), key.expires_at_s) and is_before(self._monotonic(), key.ends_at_s)
        return hmac.compare_digest(bearer_key(authorization), key.secret.encode()) and is_valid


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
    try:
        # "x", so that another user can't have created a link or an open file there.
        with staged(path) as draft, open(draft, "x", encoding="utf-8", opener=_open_private) as file:
            file.write(text)
    except OSError as err:
        raise KeyFileUnwritable(
            "The keys for token authorization can't be stored.",
            f"{path.absolute()}: {err.strerror}; expected a writable directory: start in one, "
            "set key_file, or switch the tokens off with --disable-token-auth",
        ) from err


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


Keys: TypeAlias = KeyRing | FixedKeys


def keys_of(settings: ServerSettings) -> Keys | None:
    """Return the configured keys; None if every client may call.

    Raises:
        KeyFileUnusable, KeyFileUnwritable: see `FixedKeys` and `KeyRing`.
    """
    if not settings.authorizes_clients:
        return None
    if settings.token_keys_file is not None:
        return FixedKeys(settings.token_keys_file, takes_tokens=settings.token_auth_enabled)
    return KeyRing(settings.key_file, settings.token_expiration_min)
