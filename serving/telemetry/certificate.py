"""Expiry time of an X.509 certificate file, parsed from its DER.

The standard library can only read the certificates of open connections.

X.509 (RFC 5280, 4.1): Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version OPTIONAL,
serialNumber, signature, issuer, validity SEQUENCE { notBefore, notAfter }, ... } ... }.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _EXPLICIT_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


class UnreadableCertificate(ValueError):
    """The file contains no readable certificate."""


class _Element(NamedTuple):
    """One DER element: its tag, its content, and the bytes after it."""

    tag: int
    content: bytes
    rest: bytes


def expiry_s(path: Path) -> float:
    """Return when the first certificate of a PEM file expires, in seconds since the epoch.

    Raises:
        UnreadableCertificate: the file does not exist, contains no certificate, or contains an invalid one.
    """
    try:
        found = _PEM.search(path.read_text(encoding="ascii", errors="replace"))
    except OSError as err:
        raise UnreadableCertificate(f"{path}: {err.strerror}") from err
    if found is None:
        raise UnreadableCertificate(f"{path}: no BEGIN CERTIFICATE in it; expected a PEM file")
    try:
        return _not_after(b64decode(found[1])).timestamp()
    except (binascii.Error, ValueError, IndexError) as err:
        raise UnreadableCertificate(f"{path}: the first certificate in it is broken: {err}") from err


def _not_after(der: bytes) -> datetime:
    certificate = _element(der, _SEQUENCE)
    fields = _element(certificate.content, _SEQUENCE).content
    if fields[0] == _EXPLICIT_VERSION:
        fields = _element(fields).rest
    for _ in ("serialNumber", "signature", "issuer"):
        fields = _element(fields).rest
    validity = _element(fields, _SEQUENCE)
    return _time(_element(_element(validity.content).rest))


def _element(der: bytes, tag: int | None = None) -> _Element:
    """Return the first element of DER data; its tag must be `tag` (None: any), else raise ValueError."""
    if tag is not None and der[0] != tag:
        raise ValueError(f"found the tag 0x{der[0]:02x}, expected 0x{tag:02x}")
    length, start = der[1], 2
    if length >= 0x80:  # long form: the low bits are the number of bytes of the length
        start += length - 0x80
        length = int.from_bytes(der[2:start], "big")
    if len(der) < start + length:
        raise ValueError("it ends early")
    return _Element(der[0], der[start : start + length], der[start + length :])


def _time(element: _Element) -> datetime:
    text = element.content.decode("ascii", "replace")
    if element.tag == _UTC_TIME:  # the year has two digits: below 50 means 20xx
        text = ("20" if int(text[:2]) < 50 else "19") + text
    elif element.tag != _GENERALIZED_TIME:
        raise ValueError(f"found the tag 0x{element.tag:02x}, expected a time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc)
