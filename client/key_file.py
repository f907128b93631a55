"""Finds the key for a server: in the environment, or in the `key_file.json` that a server has written."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from torchere.client.exchange import Api

KEY_FILE = Path("key_file.json")
VARIABLES: dict[Api, str] = {"inference": "TORCHERE_TOKEN", "management": "TORCHERE_MANAGEMENT_TOKEN"}


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key, and where it was found."""

    key: str = field(repr=False)
    source: str
    expires: str = ""  # in UTC, as the file has it; "": never, or not known


def find_key(
    address: str, api: Api = "inference", environ: Mapping[str, str] = os.environ
) -> FoundKey | None:
    """Return the key for the server at `address`; None if no key is found.

    The environment variable of the API counts first. A key file in the current folder is for servers of this
    machine: its key is sent to loopback addresses only.

    Raises:
        OSError: the file exists and can't be read.
        ValueError: it holds no such key.
    """
    variable = VARIABLES[api]
    if environ.get(variable):
        return FoundKey(environ[variable], variable)
    return read_key(KEY_FILE, api) if is_loopback(address) and KEY_FILE.is_file() else None


def read_key(path: Path, api: Api = "inference") -> FoundKey:
    """Return the key in a file: one that a server wrote, or one that holds nothing but the key.

    Raises:
        OSError: the file can't be read.
        ValueError: it holds no such key.
    """
    text = path.read_text(encoding="utf-8").strip()
    if text and text[0] not in "{[" and len(text.split()) == 1:
        return FoundKey(text, str(path))
    try:
        entry = json.loads(text)[api]
        return FoundKey(str(entry["key"]), str(path.absolute()), str(entry.get("expiration time", "")))
    except (ValueError, LookupError, TypeError, AttributeError) as err:
        raise ValueError(
            f'{path}: no key found; expected one word, or {{"{api}": {{"key": "KEY"}}}} as servers write it'
        ) from err


def is_loopback(address: str) -> bool:
    """Return whether the host of a URL, or of host:port, is this machine, by its address or as localhost."""
    try:
        name = urlsplit(address if "://" in address else f"//{address}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
