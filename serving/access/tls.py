"""TLS certificates of the listeners, reloaded from their files while the server runs.

The handshake of a new connection uses the key pair that was read last; open connections keep their own. Both
frontends use the same `Certificates`, so they always present the same certificate. Its expiry time is
parsed from its DER: the standard library can only read the certificates of open connections.
"""

from __future__ import annotations

import binascii
import logging
import re
import ssl
from base64 import b64decode
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from torchere.serving.access.reload import Reloaded
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import ServingError

# Time for the TLS handshake of a connection, which already counts towards the limit of its listener.
HANDSHAKE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)

# Python's own list, but at level 1; Python's begins with @SECLEVEL=2.
_LEVEL_1 = "@SECLEVEL=1:ECDH+AESGCM:ECDH+CHACHA20:ECDH+AES:DHE+AES:!aNULL:!eNULL:!aDSS:!SHA1:!AESCCM"
_TOO_SMALL = ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK")
_LARGER = (
    "its key or digest is too weak for OpenSSL: make a larger one (openssl req -x509 -nodes -newkey rsa:2048 "
    "-keyout KEY -out CERTIFICATE), or start as `torchserve`, which takes RSA keys of 1024 bits"
)


class CertificateUnusable(ServingError):
    """The PEM files are unreadable, or are not a certificate chain and its private key."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a listener's certificate chain and key, and of the CAs of its clients."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None  # None: clients are not asked for a certificate
    small_keys: bool = False  # take a key that is too small for OpenSSL's level 2, with a warning

    @property
    def all(self) -> tuple[Path, ...]:
        """All files."""
        own = (self.certificate, self.private_key)
        return own if self.client_ca is None else (*own, self.client_ca)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate chain and its private key, which OpenSSL has checked to match."""

    context: ssl.SSLContext
    http2_context: ssl.SSLContext  # offers HTTP/2 by ALPN, which gRPC clients require
    expires_at_s: float | None  # of the first certificate, seconds since the epoch; None: unknown


class Certificates(Reloaded[KeyPair]):
    """The key pair of the TLS listeners.

    Raises:
        CertificateUnusable: the files are unusable.
    """

    def __init__(self, files: TlsFiles) -> None:
        super().__init__("The TLS certificate", files.all, lambda: read_pair(files))

    def server_context(self, *, http2: bool = False) -> ssl.SSLContext:
        """Return a context for `loop.create_server`; each handshake uses the current key pair."""
        context = _CurrentContext(ssl.PROTOCOL_TLS_SERVER)
        context.certificates = self
        context.http2 = http2
        return context


def certificates_of(settings: ServerSettings) -> Certificates | None:
    """Return the configured key pair; None if none is configured.

    Raises:
        CertificateUnusable: the files cannot be loaded.
    """
    if settings.certificate_file is None or settings.private_key_file is None:
        return None
    return Certificates(
        TlsFiles(
            settings.certificate_file,
            settings.private_key_file,
            settings.client_ca_file,
            settings.small_tls_keys,
        )
    )


class _CurrentContext(ssl.SSLContext):
    """A context that delegates each new connection to the context of the current key pair.

    A new pair is never loaded into a context in use: if its second file could not be loaded, the context
    would contain a new certificate and an old key.
    """

    certificates: Certificates
    http2: bool

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Start TLS on one connection; the only method that asyncio and uvloop call."""
        pair = self.certificates.value
        context = pair.http2_context if self.http2 else pair.context
        return context.wrap_bio(*arguments, **options)


def read_pair(files: TlsFiles) -> KeyPair:
    """Read the files and have OpenSSL check that certificate and key match.

    Raises:
        CertificateUnusable: a file cannot be loaded. The message names the files but never includes their
            contents.
    """
    try:
        pair = _loaded(files)
    except (OSError, ValueError) as err:  # SSLError is an OSError
        expected = (
            _LARGER if _is_small(err) else "expected a PEM chain and its PEM key, without a pass phrase"
        )
        raise CertificateUnusable(
            "The TLS certificate can't be used.",
            f"{files.certificate} and {files.private_key}: {_said(err)}; {expected}.",
        ) from err
    pair.http2_context.set_alpn_protocols(["h2"])
    return pair


def _expires_at_s(files: TlsFiles) -> float | None:
    try:
        return expiry_s(files.certificate)
    except UnreadableCertificate as err:  # OpenSSL accepts more formats than our parser
        logger.warning("the expiry of the certificate can't be told: %s", err)
        return None


def _said(err: Exception) -> str:
    """Return the error text of the operating system or OpenSSL, without errno and C source line."""
    said: str = getattr(err, "strerror", None) or str(err)
    return said.partition(" (_ssl.c")[0]


def _is_small(err: Exception) -> bool:
    return getattr(err, "reason", None) in _TOO_SMALL


def _loaded(files: TlsFiles) -> KeyPair:
    try:
        return KeyPair(_context(files), _context(files), _expires_at_s(files))
    except ssl.SSLError as err:
        if not (files.small_keys and _is_small(err)):
            raise
        pair = KeyPair(_context(files, _LEVEL_1), _context(files, _LEVEL_1), _expires_at_s(files))
        logger.warning("%s: %s; it is used, as in TorchServe, but %s", files.certificate, _said(err), _LARGER)
        return pair


def _context(files: TlsFiles, ciphers: str = "") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if ciphers:
        context.set_ciphers(ciphers)
    context.load_cert_chain(files.certificate, files.private_key, password=_no_pass_phrase)
    _ask_for_certificates(context, files.client_ca)
    return context


def _ask_for_certificates(context: ssl.SSLContext, client_ca: Path | None) -> None:
    """Ask clients for a certificate of these CAs; one of another CA, or an expired one, ends the handshake.

    A client without a certificate is let in: probes have none, and a route may take a token instead.
    """
    if client_ca is None:
        return
    try:
        context.load_verify_locations(cafile=client_ca)
    except (OSError, ValueError) as err:
        raise CertificateUnusable(
            "The certificates of client_ca_file can't be used.",
            f"{client_ca}: {_said(err)}; expected the certificates of CAs in PEM.",
        ) from err
    context.verify_mode = ssl.CERT_OPTIONAL


def _no_pass_phrase() -> str:
    # Without this callback OpenSSL would prompt on the terminal and block the server forever.
    raise ValueError("the key has a pass phrase")


# X.509 (RFC 5280, 4.1): Certificate ::= SEQUENCE { tbsCertificate SEQUENCE { [0] version OPTIONAL,
# serialNumber, signature, issuer, validity SEQUENCE { notBefore, notAfter }, ... } ... }
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
