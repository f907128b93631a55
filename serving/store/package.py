"""The model store, a folder of archives: finds, downloads and unpacks an archive by name.

An archive from an allowed URL is first downloaded into the store. Archives are unpacked into a temporary
folder of this server; an unpacked archive is deleted when its version is unregistered, or when the server
stops. All calls block on the disk: make them in a thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from torchere.archiver.container.entries import MANIFEST_NAME
from torchere.archiver.errors import ArchiveError
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import Archive, ArchiveLimits, open_archive
from torchere.archiver.signature import Signature, archive_signature
from torchere.archiver.split import SECTION, Split
from torchere.archiver.workflow import MANIFEST_NAME as WORKFLOW_MANIFEST
from torchere.serving.config.kinds import shown_url
from torchere.serving.config.model_properties import UNSUPPORTED_KEYS, unsupported_keys
from torchere.serving.config.model_settings import ModelConfig, config_of
from torchere.serving.config.server_settings import Limits, ServerSettings
from torchere.serving.errors import DownloadFailed, InvalidArchive, ModelNotFound, ServingError
from torchere.serving.store.environment import Environment
from torchere.serving.store.fetch import PART_PREFIX, Download, Downloader, Interrupt, unsaved
from torchere.serving.store.scratch import ClaimedFolder, remove_tree, sweep_folders, sweep_parts
from torchere.serving.store.shared_weights import WeightSharing, weights_file
from torchere.serving.store.signing import (
    MAX_SIGNATURE_BYTES,
    Trust,
    TrustedKeys,
    signature_beside,
    signature_url,
    verified_copy,
)
from torchere.serving.store.url_rules import allow, is_remote

logger = logging.getLogger(__name__)

_OPENAPI_SIGNATURE_NAME = "MAR-INF/signature.json"  # TorchServe's; torchere's own is next to the weights
_MAX_TEXT_BYTES = 16 << 20  # limit for a manifest or a signature


@dataclass(frozen=True, slots=True)
class OpenedArchive:
    """An archive that was found and opened; `close` it after use."""

    archive: Archive  # of the copy, if there is one
    source: Path  # where it was found
    signer: str = ""  # "": signatures are not required
    copy: Path | None = None  # the folder of the copy that was verified; None: signatures are not required

    @property
    def manifest(self) -> Manifest:
        """The manifest of the archive."""
        return self.archive.manifest

    def close(self) -> None:
        """Delete the copy, if any; idempotent."""
        if self.copy is not None:
            remove_tree(self.copy)


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """One archive, ready to load: unpacked under `directory`."""

    url: str  # the URL or name that the caller gave
    directory: Path
    manifest: dict[str, Any] = field(default_factory=dict)  # unchanged; {} if the archive has none
    config: ModelConfig = field(default_factory=ModelConfig)
    signature: str | None = None  # the text of MAR-INF/signature.json
    file_name: str = ""  # in the model store
    outside_store: bool = False  # a folder given by its path that is not a direct entry of the store
    environment: Environment | None = None  # None: the environment of the server
    tensors: Signature | None = None  # the model's inputs and outputs from the archive's signature.json
    signer: str = ""  # who signed the archive; "": signatures are not required
    fingerprint: str = ""  # equal for archives with the same entries: see `_fingerprint`
    has_python: bool = False  # it contains Python files: one may shadow a built-in handler
    holds_gil: bool = False  # its model is a `.pt2` that holds the GIL on a CPU


class Store:
    """The model store of one server; or, if `models` is that store, its workflow store. Thread-safe."""

    def __init__(
        self,
        root: Path | None,
        limits: Limits,
        temp_dir: Path | None,
        *,
        allowed_urls: Sequence[str] = (),
        download_timeout_s: float = 600.0,
        trust: Trust | None = None,
        models: Store | None = None,
    ) -> None:
        self._trust = trust  # None: signatures are not required
        # Stores of one server share it: they may have the same folder.
        self._downloader: Downloader = (
            models._downloader
            if models
            else Downloader(allowed_urls, limits.max_download_bytes, download_timeout_s)
        )
        self._archives = StoreFolder(root)
        self._limits = ArchiveLimits(
            max_entries=limits.max_archive_entries, max_total_bytes=limits.max_archive_bytes
        )
        self._temp_dir = temp_dir
        self._unpacked = ClaimedFolder(temp_dir)
        self._sharing = WeightSharing()

    def download(
        self,
        url: str,
        by_operator: bool = False,
        interrupt: Interrupt | None = None,
        *,
        signs: bool = False,
        reuses: bool = False,
    ) -> Download:
        """Download an archive into the store; see `Downloader.download`.

        Raises:
            ModelNotFound: the URL is not allowed, or no store is configured.
            DownloadFailed, ServingError: see `Downloader.download`. If signatures are required, also if the
                download from `signature_url(url)` fails; the archive is then not kept.
        """
        fetch = partial(
            self._downloader.download,
            folder=self._archives.configured(),
            by_operator=by_operator,
            interrupt=interrupt,
            signs=signs,
            reuses=reuses,
        )
        download = fetch(url)
        if self._trust is None:
            return download
        try:
            fetch(signature_url(url), max_bytes=MAX_SIGNATURE_BYTES)
        except ServingError as err:
            if download.is_new:
                self._downloader.origins.delete(download.path)
            if isinstance(err, (DownloadFailed, ModelNotFound)):
                err.detail += "; require_signed=true needs the signature of the archive there"
            raise
        return download

    def delete(self, downloaded: Path) -> None:
        """Delete an archive that was downloaded, and the signature that was downloaded with it.

        A file that can't be deleted is logged: callers go on to free other things, or to raise their error.
        """
        try:
            self._downloader.origins.delete(downloaded)
            if self._trust is not None:
                self._downloader.origins.delete(signature_beside(downloaded))
        except OSError as err:
            logger.error("%s can't be deleted, and stays in the store: %s", downloaded, err)

    def place_of(self, name: str) -> Path:
        """Return the path that an archive of that name has in the store, whether it is there or not."""
        return (self._archives.path or Path()) / name.rstrip("/").rpartition("/")[2]

    def has(self, name: str, trusted: bool = False) -> bool:
        """Return whether `open` would find an archive of that name."""
        try:
            self._archives.find(name, trusted)
        except ServingError:
            return False
        return True

    def open(self, url: str, trusted: bool = False) -> OpenedArchive:
        """Find an archive, verify its signature if required, and read its manifest and entries.

        For `url` and `trusted`, see `StoreFolder.find`.

        Raises:
            ModelNotFound: no archive of that name is in the store.
            DownloadFailed: `url` is a remote URL, not a file in the store; call `download` first.
            InvalidArchive: the archive exists and is corrupt; or signatures are required, and it was changed
                after packing.
            UntrustedArchive: its signature is required, and missing, invalid or not trusted.
            ServingError: writing the verified copy to the disk failed, or a trusted key is unusable.
        """
        path = self._archives.find(url, trusted)
        try:
            original = open_archive(path, self._limits, as_packed=self._trust is not None)
        except ArchiveError as err:
            raise _invalid(err) from err
        if self._trust is None:
            return OpenedArchive(original, path)
        try:
            with self._unpacked.new_folder() as folder:
                copy, signer = verified_copy(original, self._limits, self._trust, folder)
        except (ArchiveError, OSError) as err:
            raise _refused(url, err) from err
        return OpenedArchive(copy, path, signer, folder)

    def config_of(self, archive: Archive) -> ModelConfig:
        """Return the model config of an archive, without unpacking it.

        Raises:
            InvalidArchive: the config is missing or invalid.
        """
        try:
            return config_of(archive)
        except ArchiveError as err:
            raise _invalid(err) from err

    def is_of_client(self, path: Path) -> bool:
        """See `Origins.is_of_client`."""
        return self._downloader.origins.is_of_client(path)

    def check_weights(self, config: ModelConfig) -> None:
        """Refuse an archive from a client's URL if `allowed_urls` does not match the URL of its weights.

        The workers would read the weights with the server's credentials. Blocks, see `allow`.

        Raises:
            InvalidArchive: `allowed_urls` does not match.
        """
        split = Split.read(config.raw)
        if split is None or not split.weights:
            return
        try:
            allow(split.weights.rstrip("/"), self._downloader.patterns)
        except ModelNotFound as err:
            raise InvalidArchive(
                f"The weights of the archive are elsewhere, and no client may name them: {split.weights}",
                f"{SECTION}.weights of its model config: {err.detail}; an archive of the model store, or of "
                "the operator, may name any",
            ) from err

    def unpack(self, url: str, opened: OpenedArchive) -> StoredArchive:
        """Unpack an archive and read its model config.

        Raises:
            InvalidArchive: an entry, a digest or the model config is invalid; no files are left.
            ServingError: writing to the disk failed; no files are left.
        """
        archive = opened.archive
        config = self.config_of(archive)
        name = archive.manifest.config_file
        for key in unsupported_keys(config.raw):
            logger.warning("%s: %s in %s has no effect: %s", shown_url(url), key, name, UNSUPPORTED_KEYS[key])
        for key, remark in config.ignored.items():
            logger.warning("%s: %s in %s %s", shown_url(url), key, name, remark)
        try:
            manifest = json.loads(_optional_text(archive, MANIFEST_NAME) or "{}")
            _check_sendable("manifest", manifest)
            _check_sendable("model config", config.raw)
            signature = _optional_text(archive, _OPENAPI_SIGNATURE_NAME)
            with self._unpacked.new_folder() as folder:
                directory = archive.extract(folder / "model")
        except (ArchiveError, OSError) as err:
            raise _refused(url, err) from err
        return StoredArchive(
            url,
            directory,
            manifest,
            config,
            signature,
            file_name=opened.source.name,
            outside_store=_real(opened.source.parent) != self._archives.path,
            tensors=archive_signature(directory),
            signer=opened.signer,
            fingerprint=_fingerprint(archive),
            has_python=any(entry.name.endswith(".py") for entry in archive.entries),
        )

    def share_weights(self, opened: OpenedArchive, stored: StoredArchive, handler: str | None) -> None:
        """Share the memory of an archive's weights with equal weights; call it before the load."""
        weights = weights_file(opened.archive, stored.directory, handler)
        if weights is not None:
            self._sharing.join(weights)

    def remove(self, stored: StoredArchive) -> None:
        """Delete the folder that `unpack` created."""
        self._sharing.leave(stored.directory)
        remove_tree(stored.directory.parent)

    def close(self) -> None:
        """Delete all unpacked archives of this store."""
        self._unpacked.release()

    def sweep(self) -> None:
        """Delete the files that killed servers left in the temporary folder and in the store."""
        swept = sweep_folders(self._temp_dir)
        if self._archives.path is not None:
            # A partial download that is older than the download timeout is no longer being written.
            swept += sweep_parts(self._archives.path, PART_PREFIX, self._downloader.timeout_s)
        if swept:
            names = ", ".join(str(path) for path in swept)
            logger.warning("deleted the files of a server that was killed: %s", names)

    def names(self) -> list[str]:
        """Return the archive names that `load_models=all` loads; see `StoreFolder.names`."""
        return self._archives.names()


def store_of(server: ServerSettings, models: Store | None = None) -> Store:
    """Create the model store from the settings; if `models` gives the model store, create the workflow store.

    Workflows are in the folder of the models unless the settings name another.

    Raises:
        SigningUnusable: signatures are required, and no key is trusted, or one is unusable.
    """
    trust = TrustedKeys(server.trusted_signing_keys) if server.require_signed else None
    own = None if models is None else server.workflow_store
    return Store(
        own or server.model_store,
        server.limits,
        server.temp_dir,
        allowed_urls=server.allowed_urls,
        download_timeout_s=server.download_timeout_s,
        trust=trust,
        models=models,
    )


def _fingerprint(archive: Archive) -> str:
    """Return a digest of the names and sizes of all entries, and of their checksums where the format has any.

    It finds mistakes, such as two releases of a model on two machines, without reading gigabytes.
    """
    entries = sorted((entry.name, entry.size, entry.crc) for entry in archive.entries)
    return hashlib.sha256(msgspec.msgpack.encode(entries)).hexdigest()


def _check_sendable(what: str, values: dict[str, Any]) -> None:
    """Reject values that can't be sent to a worker, such as an integer over 64 bits.

    The check is here so that the registration fails, not the load.
    """
    try:
        msgspec.msgpack.encode(values)
    except (OverflowError, ValueError, TypeError, RecursionError) as err:
        raise InvalidArchive(f"The {what} can't be given to a worker process: {err}") from err


def _optional_text(archive: Archive, name: str) -> str | None:
    present = any(entry.name == name for entry in archive.entries)
    return archive.read_text(name, _MAX_TEXT_BYTES) if present else None


def _refused(url: str, err: ArchiveError | OSError) -> ServingError:
    """Return the error for an archive that could not be opened, copied or unpacked."""
    # The second case is an OS error while the files were written, such as a full disk.
    if isinstance(err, OSError) or getattr(err.__cause__, "errno", None):
        return unsaved(url, str(err))
    return _invalid(err)


def _invalid(err: ArchiveError) -> InvalidArchive:
    return InvalidArchive(err.reason, str(err))


IS_WORKFLOW = "is a workflow, not a model: name it in load_workflows"


def is_workflow(archive: Archive) -> bool:
    """Return whether an archive is a workflow's, and not a model's, too."""
    names = {entry.name for entry in archive.entries}
    return WORKFLOW_MANIFEST in names and MANIFEST_NAME not in names


# The model store: which of its files are archives, and the path of a named archive.
# A name from a client can never refer to a file outside the folder; the operator may name a folder elsewhere.

_ARCHIVE_SUFFIXES = (".mar", ".model", ".tar.gz", ".tgz")


def is_archive(
    path: Path, suffixes: tuple[str, ...] = _ARCHIVE_SUFFIXES, manifest: str = MANIFEST_NAME
) -> bool:
    """Return whether `load_models=all` loads this store entry: an archive, packed or unpacked.

    A folder without a manifest, such as `lost+found` on a volume, is not an archive.
    """
    packed = path.name.endswith(suffixes)
    return not path.name.startswith(".") and (packed or os.path.isfile(path / manifest))


class StoreFolder:
    """The folder of the model store. Every call reads the disk again and blocks. Thread-safe.

    Args:
        path: the folder; None if the server has no model store.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = _real(path) if path else None

    def configured(self) -> Path:
        """Return the folder.

        Raises:
            ModelNotFound: no folder is configured.
        """
        if self.path is None:
            raise ModelNotFound("Model store has not been configured.")
        return self.path

    def names(self) -> list[str]:
        """Return the sorted names of all archives in the folder; see `is_archive`.

        Raises:
            ServingError: the folder can't be listed.
        """
        return sorted(path.name for path in self._entries("model") if is_archive(path))

    def workflow_names(self) -> list[str]:
        """Return the sorted names of the workflows that `load_workflows=all` loads, packed or unpacked.

        Raises:
            ServingError: the folder can't be listed.
        """
        found = (path for path in self._entries("workflow") if is_archive(path, (".war",), WORKFLOW_MANIFEST))
        return sorted(path.name for path in found)

    def _entries(self, kind: str) -> list[Path]:
        if self.path is None:
            return []
        try:
            return list(self.path.iterdir())
        except OSError as err:
            text = f"{self.path}: {err.strerror}; expected a folder that this user may read."
            raise ServingError(f"The {kind} store can't be read.", text) from err

    def find(self, url: str, trusted: bool) -> Path:
        """Return the path of the archive that `url` names.

        Args:
            url: the absolute path of a folder inside the store. Of any other text only the last component is
                used, as a name in the store.
            trusted: `url` is from the operator, not from a client, so the absolute path may be outside the
                store.

        Raises:
            ModelNotFound: no archive of that name exists; the message is TorchServe's.
            DownloadFailed: `url` is a remote URL, which must be downloaded first.
        """
        if not url:
            raise ModelNotFound("empty url")
        if ".." in url:
            raise ModelNotFound(f"Relative path is not allowed in url: {url}")
        if is_remote(url):
            raise DownloadFailed(f"Failed to download archive from: {url}", "it was not downloaded before")
        if folder := self._folder_at(url, trusted):
            return folder
        root = self.configured()
        name = url.rstrip("/").rpartition("/")[2]
        path = root / name
        if not name or not _exists(path):
            raise ModelNotFound(f"Model not found at: {url}", f"there is no {name!r} in {root}")
        if path == root or (_real(path).parent != root and not path.is_symlink()):  # "." is the store itself
            raise ModelNotFound(f"Model not found at: {url}")
        return path

    def _folder_at(self, url: str, trusted: bool) -> Path | None:
        """Return the folder at an absolute path if `trusted` or if it is inside the store; otherwise None."""
        path = Path(url)
        if not (path.is_absolute() and _exists(path) and path.is_dir()):
            return None
        root = self.path
        is_below = root is not None and path != root and path.parent.resolve().is_relative_to(root)
        return path if trusted or is_below else None


def _real(path: Path) -> Path:
    """Return the path without links, so that one folder has one path; as it is if its links can't be read so.

    A link through `/proc/PID/root`, as KServe makes for `oci://`, leads to the files of another container,
    and its text names a place in this one.
    """
    resolved = path.resolve()
    if not _exists(path) or (_exists(resolved) and resolved.samefile(path)):
        return resolved
    return path.absolute()


def _exists(path: Path) -> bool:
    """Return whether the path exists; False also for an invalid path."""
    try:
        return path.exists()
    except (ValueError, OSError):  # a NUL character; a name that is too long, a loop of links
        return False
