"""Opens untrusted archives: any input gives an Archive or an ArchiveError."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchere.archiver.atomic import staged
from torchere.archiver.container.directory import FolderContainer
from torchere.archiver.container.entries import (
    MANIFEST_NAME,
    ArchiveLimits,
    Chunks,
    Container,
    Entry,
    open_regular,
)
from torchere.archiver.container.tar import TarContainer
from torchere.archiver.container.zip import ZipContainer
from torchere.archiver.errors import ArchiveError, first_names
from torchere.archiver.manifest import Manifest

logger = logging.getLogger(__name__)

__all__ = ["Archive", "ArchiveError", "ArchiveLimits", "Entry", "Kind", "open_archive"]

Kind = Literal["zip", "tgz", "directory"]
_CONTAINERS: dict[Kind, Callable[[Path, ArchiveLimits], Container]] = {
    "zip": ZipContainer,
    "tgz": TarContainer,
    "directory": FolderContainer,
}
# The signature of a folder's files (OpenSSF Model Signing), which is not in the manifest's list of digests.
FOLDER_SIGNATURE = "model.sig"
_REPACK = "pack the archive again"


@dataclass(frozen=True, slots=True)
class Archive:
    """An opened archive, whose names, limits and manifest are checked; contents are checked when read.

    Holds no file open, may be shared between threads. `entries` lists every file.

    Tools of zip may change an archive after packing, so a file that is not as the manifest's digests say is
    an error only if the archive was opened `as_packed`. Otherwise its name is added to `changed`: that of a
    file that is missing or was added when the archive is opened, others when the file is read.
    """

    path: Path
    kind: Kind
    manifest: Manifest
    has_manifest: bool
    container: Container
    as_packed: bool = False
    changed: set[str] = field(default_factory=set, compare=False)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every file in the archive."""
        return self.container.entries

    @property
    def root(self) -> Path:
        """The archive's file; for a directory, the folder with its files: `path` or the only folder in it."""
        return self.container.root if isinstance(self.container, FolderContainer) else self.path

    def entry(self, name: str) -> Entry:
        """Return the entry of that name; raise ArchiveError if the archive lacks it."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise ArchiveError(
            self.path, "not in the archive", "`torchere inspect` lists the files in it", entry=name
        )

    def chunks(self, wanted: Callable[[Entry], bool] = lambda _: True) -> Iterator[tuple[Entry, Chunks]]:
        """Stream every wanted file; each is compared with its digest when its last chunk was read."""
        with _one_error(self.path):
            for entry, chunks in self.container.walk(wanted):
                yield entry, self._verified(entry, chunks)

    def read_text(self, name: str, max_bytes: int = 2**20) -> str:
        """Read a UTF-8 file of at most `max_bytes`, compared with its digest.

        Raises:
            ArchiveError: The file is missing, larger, damaged or not UTF-8.
        """
        try:
            return self.read_bytes(name, max_bytes).decode()
        except UnicodeDecodeError as error:
            raise ArchiveError(self.path, "the text is not UTF-8", "save it as UTF-8", entry=name) from error

    def read_bytes(self, name: str, max_bytes: int) -> bytes:
        """Read a file of at most `max_bytes`, compared with its digest.

        Raises:
            ArchiveError: The file is missing, larger or damaged.
        """
        entry = self.entry(name)
        if entry.size > max_bytes:
            reason = f"{entry.size} bytes, more than the {max_bytes} allowed"
            raise ArchiveError(self.path, reason, "make the file smaller", entry=name)
        with _one_error(self.path):
            walk = self.container.walk(lambda other: other is entry)
            return b"".join(chunk for _, chunks in walk for chunk in self._verified(entry, chunks))

    def extract(self, target: str | Path) -> Path:
        """Unpack everything into `target`, a new directory, and return it.

        The directory appears only when all files are unpacked and verified; after a failure it does not
        exist. Files get their modes from the umask, never from the archive. A link of a folder becomes a hard
        link, so that its bytes are on the disk once, or a copy where the file system has no hard links. The
        log has a warning with the names of the files that are not as they were packed.

        Raises:
            ArchiveError: `target` exists, the archive is damaged, or the disk is full; it was changed, and
                is opened `as_packed`; or it is too large with copies in place of links.
        """
        folder = Path(target)
        with _one_error(self.path), staged(folder) as work:
            if folder.exists() or folder.is_symlink():
                raise ArchiveError(self.path, f"{folder} exists", "unpack to a path that does not")
            try:
                work.mkdir()
                self._unpack(work)
            except OSError as error:  # an error of `target`, because reading raises ArchiveError
                total = sum(entry.size for entry in self.entries if entry.name not in self._links)
                reason = f"{error.strerror or error}: {total} bytes of {self.path} can't be unpacked there"
                advice = "free space, or name a folder on a larger disk in TEMP, or TMPDIR"
                raise ArchiveError(folder.parent, reason, advice) from error
        if self.changed:
            logger.warning(
                "%s was changed after packing, and is used as it is: files edited, added or taken out: %s",
                self.path,
                first_names(sorted(self.changed)),
            )
        return folder

    @property
    def _links(self) -> dict[str, str]:
        """The links of a folder, with the names of the files that they lead to."""
        return self.container.links if isinstance(self.container, FolderContainer) else {}

    def _unpack(self, work: Path) -> None:
        links, digests = self._links, self.manifest.digests or {}
        for entry, chunks in self.chunks(lambda entry: entry.name not in links or entry.name in digests):
            if entry.name not in links:
                _write(chunks, work / entry.name)
            for _ in chunks:  # of a link, whose digest is compared
                pass
        if isinstance(self.container, FolderContainer):
            self.container.make_links(work)

    def verify(self) -> None:
        """Read everything once and check sizes, CRCs and digests; raise ArchiveError at the first error.

        `changed` is complete then.
        """
        for _, chunks in self.chunks():
            for _ in chunks:
                pass

    def _verified(self, entry: Entry, chunks: Chunks) -> Chunks:
        expected = (self.manifest.digests or {}).get(entry.name)
        found = hashlib.sha256()
        with _one_error(self.path):
            for chunk in chunks:
                if expected is not None:
                    found.update(chunk)
                yield chunk
        if expected is not None and f"sha256:{found.hexdigest()}" != expected:
            reason = f"the SHA-256 is {found.hexdigest()}, not the one in the manifest"
            self._note(entry.name, reason, "do not use it; pack or fetch it again")

    def compare_names(self) -> None:
        """Find files that are missing or were added since the manifest's digests, if any, were recorded."""
        if self.manifest.digests is None:
            return
        present = {entry.name for entry in self.entries} - {MANIFEST_NAME}
        unlisted = {FOLDER_SIGNATURE} if self.kind == "directory" else set()
        for name in sorted(present - self.manifest.digests.keys() - unlisted):
            reason = "it is not in the manifest's list of digests"
            self._note(name, reason, "something was added later; " + _REPACK)
        for name in sorted(self.manifest.digests.keys() - present):
            reason = "it is missing, but the manifest has its digest"
            self._note(name, reason, "something was taken out; " + _REPACK)

    def _note(self, name: str, reason: str, advice: str) -> None:
        """Add the name to `changed`, or raise ArchiveError if the archive was opened `as_packed`."""
        if self.as_packed:
            raise ArchiveError(self.path, reason, advice, entry=name)
        self.changed.add(name)


def open_archive(
    path: str | Path, limits: ArchiveLimits | None = None, *, as_packed: bool = False
) -> Archive:
    """Open a `.mar`, a `.tar.gz` or a directory; the first bytes decide the kind, not the name.

    With `as_packed`, an archive that was changed after packing is refused, here or when its files are read.

    Raises:
        ArchiveError: The path does not exist, or the archive can't be used. See `ArchiveLimits` for the
            bounds.
    """
    place = Path(path)
    limits = limits or ArchiveLimits()
    if "\0" in str(place):
        raise ArchiveError(place, "the path has a NUL character", "name an existing archive")
    with _one_error(place):
        kind = _kind_of(place)
        container = _CONTAINERS[kind](place, limits)
        bare = Archive(place, kind, Manifest(), False, container)
        if not any(entry.name == MANIFEST_NAME for entry in bare.entries):
            return bare
        text = bare.read_text(MANIFEST_NAME, limits.max_manifest_bytes)
    archive = Archive(place, kind, Manifest.parse(text, str(place)), True, container, as_packed)
    archive.compare_names()
    return archive


def _write(chunks: Chunks, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "xb") as out:
        for chunk in chunks:
            out.write(chunk)


def _kind_of(path: Path) -> Kind:
    if path.is_dir():
        return "directory"
    with open_regular(path) as file:
        first = file.read(4)
    if first in (b"PK\3\4", b"PK\5\6"):
        return "zip"
    if first[:2] == b"\x1f\x8b":
        return "tgz"
    what = f"begins with {first.hex(' ')}" if first else "is empty"
    raise ArchiveError(path, f"the file {what}, which is neither zip nor gzip", "name a .mar or a .tar.gz")


@contextmanager
def _one_error(path: Path) -> Iterator[None]:
    """Turn an OSError into an ArchiveError."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        raise ArchiveError(path, reason, "check the path, its permissions and the disk") from error
