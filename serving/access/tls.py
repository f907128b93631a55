"""Where a listener's certificate comes from, and how a new one takes its place while the server runs.

The handshake of every new connection uses the pair that was read last; connections that are up keep theirs.
Both frontends ask the same `Certificates`, so they never show different ones.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchere.serving.access.reload import Reloaded
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import ServingError
from torchere.serving.telemetry.certificate import UnreadableCertificate, expiry_s

logger = logging.getLogger(__name__)


class CertificateUnusable(ServingError):
    """The PEM files can't be read, or are no certificate chain and the key that belongs to it."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a listener's certificate chain and key."""

    certificate: Path
    private_key: Path


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate chain and its key, after OpenSSL has checked that they belong together."""

    context: ssl.SSLContext
    http2_context: ssl.SSLContext  # offers HTTP/2 by ALPN, without which gRPC's clients do not connect
    expires_at_s: float | None  # the first certificate of the chain, since the epoch; None: can't be told


class Certificates:
    """The key pair of the TLS listeners; `refresh` follows its files.

    Thread-safe for readers.

    Raises:
        CertificateUnusable: the files can't be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._pair: Reloaded[KeyPair] = Reloaded(
            "The TLS certificate", (files.certificate, files.private_key), lambda: read_pair(files)
        )

    @property
    def pair(self) -> KeyPair:
        """What the next handshake uses."""
        return self._pair.value

    def refresh(self) -> None:
        """Read the files again if they changed; blocks. A pair that can't be used changes nothing."""
        self._pair.refresh()

    def server_context(self, *, http2: bool = False) -> ssl.SSLContext:
        """A context for `loop.create_server`, whose every handshake uses the pair of that moment."""
        context = _CurrentContext(ssl.PROTOCOL_TLS_SERVER)
        context.certificates = self
        context.http2 = http2
        return context


def certificates_of(settings: ServerSettings) -> Certificates | None:
    """The key pair that the settings name, if they do; raises `CertificateUnusable`."""
    if settings.certificate_file is None or settings.private_key_file is None:
        return None
    return Certificates(TlsFiles(settings.certificate_file, settings.private_key_file))


class _CurrentContext(ssl.SSLContext):
    """Stands for the context of the current pair, which each new connection asks for.

    A new pair is not loaded into a context in use: if its second file failed to load, the context would be
    left with a new certificate and an old key.
    """

    certificates: Certificates
    http2: bool

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """The beginning of one connection; asyncio and uvloop call nothing else."""
        pair = self.certificates.pair
        context = pair.http2_context if self.http2 else pair.context
        return context.wrap_bio(*arguments, **options)


def read_pair(files: TlsFiles) -> KeyPair:
    """Read both files and let OpenSSL check them.

    Raises:
        CertificateUnusable: the text names both files and never holds what is in them.
    """
    try:
        pair = KeyPair(_context(files), _context(files), _expires_at_s(files))
    except (OSError, ValueError) as err:  # SSLError is an OSError
        raise CertificateUnusable(
            "The TLS certificate can't be used.",
            f"{files.certificate} and {files.private_key}: {_said(err)}; expected a PEM chain and its PEM "
            "key, without a pass phrase.",
        ) from err
    pair.http2_context.set_alpn_protocols(["h2"])
    return pair


def _expires_at_s(files: TlsFiles) -> float | None:
    try:
        return expiry_s(files.certificate)
    except UnreadableCertificate as err:  # OpenSSL takes more forms than we read
        logger.warning("the expiry of the certificate can't be told: %s", err)
        return None


def _said(err: Exception) -> str:
    """What the system or OpenSSL says, without its number or its line of C."""
    said: str = getattr(err, "strerror", None) or str(err)
    return said.partition(" (_ssl.c")[0]


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.private_key, password=_no_pass_phrase)
    return context


def _no_pass_phrase() -> str:
    # Without this OpenSSL would ask the terminal, and the server would wait there for ever.
    raise ValueError("the key has a pass phrase")
