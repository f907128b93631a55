"""Packs models and handlers into archives, and reads archives safely. Needs the standard library only.

from torchere.archiver import ArchiveRequest, open_archive, write_archive

path = write_archive(ArchiveRequest(model_name="mlp", version="1.0", handler="service.py"))
open_archive(path).extract("unpacked")

The names are imported when they are first used, because a server's command line needs only one file of this
package, and starts without the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchere.archiver.container.entries import ArchiveLimits, Entry
    from torchere.archiver.errors import ArchiveError, PackingError
    from torchere.archiver.manifest import Manifest
    from torchere.archiver.reader import Archive, open_archive
    from torchere.archiver.request import ArchiveRequest
    from torchere.archiver.writer import write_archive

_HOMES = {
    "Archive": "reader",
    "ArchiveError": "errors",
    "ArchiveLimits": "container.entries",
    "ArchiveRequest": "request",
    "Entry": "container.entries",
    "Manifest": "manifest",
    "PackingError": "errors",
    "open_archive": "reader",
    "write_archive": "writer",
}

__all__ = [
    "Archive",
    "ArchiveError",
    "ArchiveLimits",
    "ArchiveRequest",
    "Entry",
    "Manifest",
    "PackingError",
    "open_archive",
    "write_archive",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
