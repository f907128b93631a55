"""Where a listener's certificate comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a listener's certificate chain and key."""

    certificate: Path
    private_key: Path
