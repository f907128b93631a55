"""Verifies the signature of an archive on a private copy of it, which is then the only one that is read.

Anyone who may write to the model store can change an archive between its verification and its unpacking, also
in place and with the old times. So what is verified and unpacked is a copy in a folder of this server alone.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torchere.archiver.container.entries import open_regular
from torchere.archiver.reader import FOLDER_SIGNATURE, Archive, ArchiveLimits, open_archive
from torchere.serving.store.signing import Trust, read_signature, signature_path

_COPIED_BYTES = 2**23  # at a time: each piece takes the GIL


@dataclass(frozen=True, slots=True)
class VerifiedCopy:
    """A private copy of an archive with a valid signature."""

    archive: Archive
    signer: str
    folder: Path  # holds the copy

    def delete(self) -> None:
        """Delete the copy; idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)


def verified_copy(
    original: Archive, limits: ArchiveLimits, trust: Trust, parent: Path | None = None
) -> VerifiedCopy:
    """Copy an archive to a new folder below `parent`, verify its signature, and open it. Blocks.

    Args:
        original: the archive; beside it, or in it if it is a folder, is its signature.
        limits: the limits of the archive.
        trust: the trusted signers.
        parent: an existing folder; None: the system's for temporary files.

    Raises:
        ArchiveError: the archive is invalid or can't be read.
        UntrustedArchive: the signature is missing, invalid or not trusted.
        SigningUnusable: a trusted key is unusable.
        OSError: the copy can't be written. No error leaves a copy.
    """
    signature = read_signature(signature_path(original))  # before the copy, which may be large
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        copy = folder / "copy" / original.path.name
        copy.parent.mkdir()
        if original.kind == "directory":
            original.extract(copy)
            (copy / FOLDER_SIGNATURE).unlink(missing_ok=True)
        else:
            _copy_file(original.path, copy)
        archive = open_archive(copy, limits)
        used = {entry.name for entry in archive.entries}
        signer = trust.verify(copy, signature, used, folder / "signature")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return VerifiedCopy(archive, signer, folder)


def _copy_file(source: Path, target: Path) -> None:
    """Copy as many bytes as the file has now: another process may append to it without end."""
    with open_regular(source) as file, target.open("xb") as copy:
        left = file.seek(0, 2)
        file.seek(0)
        while left and (piece := file.read(min(left, _COPIED_BYTES))):
            copy.write(piece)
            left -= len(piece)
