"""Packs models and handlers into archives, and reads archives safely. Needs the standard library only.

from torchere.archiver import ArchiveRequest, open_archive, write_archive

path = write_archive(ArchiveRequest(model_name="mlp", version="1.0", handler="service.py"))
open_archive(path).extract("unpacked")
"""

from torchere.archiver.container.entries import ArchiveLimits, Entry
from torchere.archiver.errors import ArchiveError, PackingError
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import Archive, open_archive
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive

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
