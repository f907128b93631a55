"""Who may call what: three keys in a file, and the check of the `Authorization` header against them.

Knows no protocol; a frontend passes the header (or the gRPC metadata value) and lets the error through.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from torchere.serving.errors import ServingError, Unauthorized

TokenKind = Literal["inference", "management", "api"]

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
_KEY_BYTES = 6  # TorchServe's; 8 characters, and key_file.json readers may rely on it
NAMES_IN_FILE: dict[TokenKind, str] = {"management": "management", "inference": "inference", "api": "API"}
_RENEWABLE: tuple[TokenKind, ...] = ("management", "inference")
_BEARER = re.compile(r"Bearer\s+(\S+)", re.ASCII)

# The texts are TorchServe's; clients and its own tests compare them.
REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
_NOT_RENEWED = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"


class KeyFileUnwritable(ServingError):
    """The key file can't be written, so nobody could learn the keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key, and how long it lets anybody pass."""

    secret: str = field(repr=False)
    expires_at_s: float | None  # seconds since the epoch; None: never

    def accepts(self, offered: bytes, now_s: float) -> bool:
        """Whether `offered` is this key, and it has not expired; takes as long for any wrong key."""
        same = hmac.compare_digest(offered, self.secret.encode())
        return same and (self.expires_at_s is None or now_s < self.expires_at_s)


class KeyRing:
    """The keys of one server run.

    Constructing makes new keys and writes them to `path`, readable by the owner alone; keys of an earlier run
    are void. Thread-safe: a check reads an immutable map that renewing swaps whole; `_writing` keeps renewals
    apart and is held while the file is written, so that file and memory never disagree for long.

    Args:
        path: The key file; its directory must be there and writable.
        expiration_min: Minutes until an inference or management key expires; the API key never does.
        clock: Seconds since the epoch. Wall time, because the file states when a key expires.

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

    def authorize(self, kind: TokenKind, authorization: str | None) -> None:
        """Let a call pass that carries the key of this kind, as `Bearer <key>`.

        Raises:
            Unauthorized: the value is missing or malformed, or the key is another one or has expired.
        """
        if not self._accepts(kind, authorization):
            raise Unauthorized(REFUSED)

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        """Replace the management or inference key (the token API); the old one is void at once.

        Args:
            wanted: "management" or "inference", as the client spelt it.
            authorization: Must carry the API key.

        Raises:
            Unauthorized: it does not, or `wanted` is something else.
            KeyFileUnwritable: the old key stays in force.
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
        while value.startswith("-"):  # on a command line that would be an option
            value = secrets.token_urlsafe(_KEY_BYTES)
        return Key(value, expires_at_s)

    def _accepts(self, kind: TokenKind, authorization: str | None) -> bool:
        return self._keys[kind].accepts(bearer_key(authorization), self._clock())


def bearer_key(authorization: str | None) -> bytes:
    """The key in an `Authorization` header; b"", which is never a key, when the header has another form.

    Bytes, because `hmac.compare_digest` refuses text that is not ASCII.
    """
    match = _BEARER.fullmatch(authorization or "")
    return match.group(1).encode("utf-8", "surrogatepass") if match else b""


def _document(keys: Mapping[TokenKind, Key]) -> str:
    """The key file's text: what TorchServe writes, in its order."""
    entries: dict[str, dict[str, str]] = {}
    for kind, name in NAMES_IN_FILE.items():
        key = keys[kind]
        entries[name] = {"key": key.secret}
        if key.expires_at_s is not None:
            moment = datetime.fromtimestamp(key.expires_at_s, timezone.utc)
            entries[name]["expiration time"] = moment.strftime(_TIME_FORMAT)
    return json.dumps(entries, indent=2) + "\n"


def _write_private(path: Path, text: str) -> None:
    """Put the text at `path` in one step; at no time can anybody but the owner read it."""
    # A random name that must be new: nobody can have put a link or an open file there.
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
