"""Where archives come from: the model store, one folder. Turns a name in it into an unpacked archive.

What comes from an allowed URL is copied into the store first.

Archives are unpacked into a folder of this server's own, which is removed on unregister and at the end.
Everything here blocks on the disk: call it in a thread.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchere.archiver.errors import ArchiveError
from torchere.archiver.names import MANIFEST_NAME
from torchere.archiver.reader import Archive, ArchiveLimits, open_archive
from torchere.archiver.signature import Signature
from torchere.handlers.signature import archive_signature
from torchere.serving.errors import (
    DownloadFailed,
    InvalidArchive,
    ModelNotFound,
    ServingError,
)
from torchere.serving.registry.allowed_urls import is_remote
from torchere.serving.registry.download import PART_PREFIX, Download, Downloader, Interrupt
from torchere.serving.registry.environments import Environment
from torchere.serving.registry.leftovers import ClaimedFolder, sweep_folders, sweep_parts
from torchere.serving.registry.model_config import (
    MAX_CONFIG_BYTES,
    UNSUPPORTED_KEYS,
    ModelConfig,
    parse_model_config,
    unsupported_keys,
)
from torchere.serving.registry.weight_sharing import WeightSharing, weights_file
from torchere.serving.settings import Limits, ServerSettings

logger = logging.getLogger(__name__)

SIGNATURE_NAME = "MAR-INF/signature.json"
MAX_TEXT_BYTES = 16 << 20  # a manifest or signature larger than this is not one
ARCHIVE_SUFFIXES = (".mar", ".model", ".tar.gz", ".tgz")


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """One archive, ready to load: unpacked under `directory`."""

    url: str  # as the caller named it
    directory: Path
    manifest: dict[str, Any] = field(default_factory=dict)  # as written; {} when the archive has none
    config: ModelConfig = field(default_factory=ModelConfig)
    signature: str | None = None  # text of MAR-INF/signature.json
    temporary: bool = True  # ours to delete
    file_name: str = ""  # in the model store
    outside_store: bool = False  # a folder named by its path, which does not lie directly in the store
    downloaded: Path | None = None  # the copy in the model store of what came from a URL
    environment: Environment | None = None  # None: the server's
    tensors: Signature | None = None  # what signature.json says that the model takes and gives


class Store:
    """The model store of one server. Thread-safe."""

    def __init__(
        self,
        root: Path | None,
        limits: Limits,
        temp_dir: Path | None,
        *,
        allowed_urls: Sequence[str] = (),
        download_timeout_s: float = 600.0,
    ) -> None:
        self._downloader = Downloader(allowed_urls, limits.max_download_bytes, download_timeout_s)
        self._root = root.resolve() if root else None
        self._limits = ArchiveLimits(
            max_entries=limits.max_archive_entries, max_total_bytes=limits.max_archive_bytes
        )
        self._temp_dir = temp_dir
        self._download_timeout_s = download_timeout_s
        self._folder = ClaimedFolder(temp_dir)
        self._sharing = WeightSharing()

    def is_to_fetch(self, url: str) -> bool:
        """Whether `url` is one, and no name in the store; touches no disk."""
        return is_remote(url)

    def download(self, url: str, reuse: bool = False, interrupt: Interrupt | None = None) -> Download:
        """Fetch an archive into the store; see `Downloader.download`.

        With `reuse` a file that is there already counts as fetched: a server that starts again must come up.

        Raises:
            ModelNotFound: the URL is not allowed, or there is no store.
            DownloadFailed, ServingError: see there.
        """
        return self._downloader.download(url, self._configured(), reuse, interrupt)

    def has(self, name: str, trusted: bool = False) -> bool:
        """Whether `open` would find something of that name."""
        try:
            self._resolve(name, trusted)
        except ServingError:
            return False
        return True

    def open(self, url: str, trusted: bool = False) -> Archive:
        """Find an archive and read what it says of itself; nothing is unpacked.

        Args:
            url: A name in the store, or the full path of a folder below it; else its last component counts.
            trusted: The operator's own words, not a client's: the path of a folder may lead anywhere.

        Raises:
            ModelNotFound: nothing of that name is in the store, with the contract's texts.
            DownloadFailed: a URL; `download` has to come first.
            InvalidArchive: it is there and broken.
        """
        path = self._resolve(url, trusted)
        try:
            return open_archive(path, self._limits)
        except ArchiveError as err:
            raise _invalid(err) from err

    def config_of(self, archive: Archive) -> ModelConfig:
        """The model config of an archive, which need not be unpacked for that.

        Raises:
            InvalidArchive: it is missing, or wrong.
        """
        name = archive.manifest.config_file
        try:
            return parse_model_config(archive.read_text(name, MAX_CONFIG_BYTES)) if name else ModelConfig()
        except ArchiveError as err:
            raise _invalid(err) from err

    def unpack(self, url: str, archive: Archive) -> StoredArchive:
        """Unpack an archive and read its model config.

        Raises:
            InvalidArchive: an entry, a digest or the model config is wrong; nothing stays behind.
            ServingError: the disk would not take it; likewise.
        """
        config = self.config_of(archive)
        for key in unsupported_keys(config.raw):
            name = archive.manifest.config_file
            logger.warning("%s: %s in %s has no effect: %s", url, key, name, UNSUPPORTED_KEYS[key])
        try:
            manifest = _manifest_as_written(archive)
            signature = _optional_text(archive, SIGNATURE_NAME)
            directory = self._extracted(archive)
        except ArchiveError as err:
            if getattr(err.__cause__, "errno", None):  # the system said so, not the archive: a full disk
                raise ServingError(f"Failed to save model: {url}", str(err)) from err
            raise _invalid(err) from err
        except OSError as err:
            raise ServingError(f"Failed to save model: {url}", str(err)) from err
        return StoredArchive(
            url,
            directory,
            manifest,
            config,
            signature,
            file_name=archive.path.name,
            outside_store=archive.path.parent.resolve() != self._root,
            tensors=archive_signature(directory),
        )

    def _extracted(self, archive: Archive) -> Path:
        """A folder with what is in an archive, in one of its own; neither is there when that fails."""
        folder = Path(tempfile.mkdtemp(dir=self._folder.path))
        try:
            archive.extract(folder / "model")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder / "model"

    def share_weights(self, archive: Archive, stored: StoredArchive, handler: str | None) -> None:
        """Let an unpacked archive share the memory of its weights with others; before it is loaded."""
        if weights := weights_file(archive, stored.directory, handler):
            self._sharing.join(weights)

    def remove(self, stored: StoredArchive, *, keep_download: bool = False) -> None:
        """Delete what `unpack` made, and the copy of what was downloaded for it."""
        if stored.downloaded and not keep_download:
            stored.downloaded.unlink(missing_ok=True)
        self._sharing.leave(stored.directory)
        if stored.temporary:
            shutil.rmtree(stored.directory.parent, ignore_errors=True)

    def close(self) -> None:
        """Delete everything this store unpacked."""
        self._folder.release()

    def sweep(self) -> None:
        """Delete what servers that were killed left in the temporary folder and in the store."""
        swept = sweep_folders(self._temp_dir)
        if self._root is not None:
            # Nobody writes to a part for longer than a download may take.
            swept += sweep_parts(self._root, PART_PREFIX, self._download_timeout_s)
        if swept:
            names = ", ".join(str(path) for path in swept)
            logger.warning("deleted what a server that was killed had left: %s", names)

    def names(self) -> list[str]:
        """Every archive in the store, packed or a folder, sorted: what `load_models=all` means.

        Folders without a manifest are none, `lost+found` of a volume for one.

        Raises:
            ServingError: it can't be listed.
        """
        if self._root is None:
            return []
        try:
            paths = list(self._root.iterdir())
        except OSError as err:
            text = f"{self._root}: {err.strerror}; expected a folder that this user may read."
            raise ServingError("The model store can't be read.", text) from err
        return sorted(
            path.name
            for path in paths
            if not path.name.startswith(".")
            and (path.name.endswith(ARCHIVE_SUFFIXES) or os.path.isfile(path / MANIFEST_NAME))
        )

    def _configured(self) -> Path:
        if self._root is None:
            raise ModelNotFound("Model store has not been configured.")
        return self._root

    def _resolve(self, url: str, trusted: bool) -> Path:
        if not url:
            raise ModelNotFound("empty url")
        if ".." in url:
            raise ModelNotFound(f"Relative path is not allowed in url: {url}")
        if is_remote(url):
            raise DownloadFailed(f"Failed to download archive from: {url}", "it was not downloaded before")
        if folder := self._folder_at(url, trusted):
            return folder
        root = self._configured()
        name = url.rstrip("/").rpartition("/")[2]
        path = root / name
        if not name or not _exists(path):
            raise ModelNotFound(f"Model not found at: {url}", f"there is no {name!r} in {root}")
        if path.resolve().parent != root and not path.is_symlink():
            raise ModelNotFound(f"Model not found at: {url}")
        return path

    def _folder_at(self, url: str, trusted: bool) -> Path | None:
        """The folder that a full path names, if it may be named so."""
        path = Path(url)
        if not (path.is_absolute() and _exists(path) and path.is_dir()):
            return None
        root = self._root
        is_below = root is not None and path != root and path.parent.resolve().is_relative_to(root)
        return path if trusted or is_below else None


def _exists(path: Path) -> bool:
    """Whether there is something; of what can't be the name of anything, there is nothing."""
    try:
        return path.exists()
    except (ValueError, OSError):  # a NUL character; a name that is too long, a loop of links
        return False


def store_of(server: ServerSettings) -> Store:
    """The store that the settings describe."""
    return Store(
        server.model_store,
        server.limits,
        server.temp_dir,
        allowed_urls=server.allowed_urls,
        download_timeout_s=server.download_timeout_s,
    )


def _manifest_as_written(archive: Archive) -> dict[str, Any]:
    text = _optional_text(archive, MANIFEST_NAME)
    return json.loads(text) if text else {}


def _optional_text(archive: Archive, name: str) -> str | None:
    present = any(entry.name == name for entry in archive.entries)
    return archive.read_text(name, MAX_TEXT_BYTES) if present else None


def _invalid(err: ArchiveError) -> InvalidArchive:
    return InvalidArchive(err.reason, str(err))
