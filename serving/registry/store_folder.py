"""The folder that archives lie in: what in it is an archive, and which path somebody means by a name.

A client's words never lead out of the folder; the operator may also name a folder that lies elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from torchere.archiver.names import MANIFEST_NAME
from torchere.serving.errors import DownloadFailed, ModelNotFound, ServingError
from torchere.serving.registry.allowed_urls import is_remote

_ARCHIVE_SUFFIXES = (".mar", ".model", ".tar.gz", ".tgz")


def is_archive(path: Path) -> bool:
    """Whether `load_models=all` means this entry of the store: an archive, packed or unpacked.

    A folder without a manifest is none: a volume's `lost+found`, for one.
    """
    packed = path.name.endswith(_ARCHIVE_SUFFIXES)
    return not path.name.startswith(".") and (packed or os.path.isfile(path / MANIFEST_NAME))


class StoreFolder:
    """The model store on disk. Every call looks at the disk anew, and blocks on it. Thread-safe.

    Args:
        path: the folder; None: the server has no model store.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path.resolve() if path else None

    def configured(self) -> Path:
        """The folder.

        Raises:
            ModelNotFound: there is none.
        """
        if self.path is None:
            raise ModelNotFound("Model store has not been configured.")
        return self.path

    def names(self) -> list[str]:
        """The name of every archive in it, sorted; see `is_archive`.

        Raises:
            ServingError: the folder can't be listed.
        """
        if self.path is None:
            return []
        try:
            paths = list(self.path.iterdir())
        except OSError as err:
            text = f"{self.path}: {err.strerror}; expected a folder that this user may read."
            raise ServingError("The model store can't be read.", text) from err
        return sorted(path.name for path in paths if is_archive(path))

    def find(self, url: str, trusted: bool) -> Path:
        """Where the archive is that `url` names.

        Args:
            url: The full path of a folder below the store; of anything else only the last component counts,
                as a name in the store.
            trusted: The operator's own words, not a client's: the full path of a folder may lead anywhere.

        Raises:
            ModelNotFound: there is nothing of that name, with the contract's texts.
            DownloadFailed: it is a URL; what is there has to be downloaded first.
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
        if path.resolve().parent != root and not path.is_symlink():
            raise ModelNotFound(f"Model not found at: {url}")
        return path

    def _folder_at(self, url: str, trusted: bool) -> Path | None:
        """The folder that a full path names, if whoever says so may name it."""
        path = Path(url)
        if not (path.is_absolute() and _exists(path) and path.is_dir()):
            return None
        root = self.path
        is_below = root is not None and path != root and path.parent.resolve().is_relative_to(root)
        return path if trusted or is_below else None


def _exists(path: Path) -> bool:
    """Whether there is something at the path; False too for what no path may be."""
    try:
        return path.exists()
    except (ValueError, OSError):  # a NUL character; a name that is too long, a loop of links
        return False
