"""The one record that all parts of the migration check speak in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["same", "differs", "unsupported"]


@dataclass(frozen=True, slots=True)
class MigrationFinding:
    """What becomes of one thing in one file."""

    subject: str  # the file
    item: str  # the key, or the part of the archive
    verdict: Verdict
    text: str
