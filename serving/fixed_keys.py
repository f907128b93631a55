"""Keys for token authorisation that somebody else made: a file that every replica of a server reads.

TorchServe's servers make keys of their own, so a client's key fits one server of many. A fixed file makes
them the same everywhere. It is read again when it changes, so that keys can be rotated without a restart: put
the new key beside the old one, move the clients over, take the old one away.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from torchere.serving.errors import NotAllowed, ServingError, Unauthorized
from torchere.serving.reloading import Reloaded
from torchere.serving.settings import ServerSettings
from torchere.serving.tokens import NAMES_IN_FILE, REFUSED, Key, KeyRing, TokenKind, bearer_key

MAX_FILE_BYTES = 65_536
_KEY = re.compile(r"[!-~]{8,}")  # what a header can carry; TorchServe's own keys have 8 characters
_KINDS: dict[str, TokenKind] = {name: kind for kind, name in NAMES_IN_FILE.items()}
_FORM = (
    'expected a JSON object like {"inference": "KEY", "management": "KEY"}; a list of keys, or '
    '{"key": "KEY", "expiration time": "2030-01-01T00:00:00Z"} as in key_file.json, may stand for each KEY'
)


class KeyFileUnusable(ServingError):
    """The file of fixed keys can't be read, is open to others, or holds something other than keys."""


_Keys = Mapping[TokenKind, tuple[Key, ...]]


class FixedKeys:
    """The keys of a file that this server never writes.

    A kind of key that the file leaves out lets nobody pass. Thread-safe: a check reads an immutable map that
    `refresh` swaps whole.

    Args:
        path: The file, readable by its owner and group alone; see `read_keys` for what may be in it.
        clock: Seconds since the epoch; wall time, because the file may say when a key expires.

    Raises:
        KeyFileUnusable: it can't be used.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file: Reloaded[_Keys] = Reloaded("The token keys", (path,), functools.partial(read_keys, path))

    def authorize(self, kind: TokenKind, authorization: str | None) -> None:
        """Let a call pass that carries one of the keys of this kind, as `Bearer <key>`.

        Raises:
            Unauthorized: the value is missing or malformed, or no key of this kind, or has expired.
        """
        offered, now_s = bearer_key(authorization), self._clock()
        # A list, not a generator: how long the check takes must not tell which of the keys matched.
        accepted = [key.accepts(offered, now_s) for key in self._file.value[kind]]
        if not any(accepted):
            raise Unauthorized(REFUSED)

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        """Refuse: nobody renews these keys but whoever writes the file.

        Raises:
            NotAllowed: always.
        """
        raise NotAllowed("The keys of this server come from a file that it does not write; renew them there.")

    def refresh(self) -> None:
        """Read the file again if it changed; blocks. One that can't be used leaves the keys as they are."""
        self._file.refresh()


def keys_of(settings: ServerSettings) -> KeyRing | FixedKeys | None:
    """The keys that the settings ask for; None: everybody may pass.

    Raises:
        KeyFileUnusable, KeyFileUnwritable: see the two.
    """
    if not settings.token_auth_enabled:
        return None
    if settings.token_keys_file is not None:
        return FixedKeys(settings.token_keys_file)
    return KeyRing(settings.key_file, settings.token_expiration_min)


def read_keys(path: Path) -> _Keys:
    """The keys of the file: a JSON object with `inference`, `management`, or both.

    Each is a key, TorchServe's object with `key` and perhaps `expiration time` (ISO 8601), or a list of such.
    `API`, which TorchServe's file has too, is accepted and opens nothing. No message ever holds a key.

    Raises:
        KeyFileUnusable: the file is not there, may be read or written by others, or holds something else.
    """
    try:
        document = json.loads(_read_private(path))
    except UnicodeDecodeError as err:
        raise _unusable(path, "no UTF-8") from err
    except (ValueError, RecursionError) as err:  # their texts have a position and nothing of the document
        raise _unusable(path, f"no JSON: {err}") from err
    if not isinstance(document, dict):
        raise _unusable(path, "no JSON object")
    unknown = sorted(set(document) - set(_KINDS))
    if unknown or not {"inference", "management"} & document.keys():
        raise _unusable(
            path, f"unknown member {unknown[0]!r}" if unknown else "neither inference nor management"
        )
    keys: dict[TokenKind, tuple[Key, ...]] = dict.fromkeys(_KINDS.values(), ())
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
        # Python 3.10 reads no "Z", and three or six digits of a fraction only; TorchServe writes nine.
        exact = re.sub(r"\.(\d+)", lambda fraction: f".{fraction[1][:6]:0<6}", str(text))
        moment = datetime.fromisoformat(re.sub("Z$", "+00:00", exact))
    except ValueError as err:
        raise _unusable(path, f"the expiration time of {name!r} is no ISO 8601 time") from err
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


def _unusable(path: Path, found: str, expected: str = _FORM) -> KeyFileUnusable:
    return KeyFileUnusable("The file of token_keys_file can't be used.", f"{path}: {found}; {expected}.")
