"""What models, versions and runtimes may be called, and what a model is called that nobody named."""

from __future__ import annotations

import re

from torchere.archiver.manifest import Manifest
from torchere.serving.errors import InvalidArchive, InvalidRequest

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]{0,254}")  # the archiver's rule, with a bound
RUNTIMES = ("python", "python3", "LSP")


def default_model_name(url: str) -> str:
    """The name of a model that nobody named: from its file, as TorchServe derives it."""
    name = url.rstrip("/").rpartition("/")[2]
    stem = name.rpartition(".")[0] if name.endswith((".mar", ".model")) else name
    return re.sub(r"\W", "_", stem)


def check_model_name(name: str) -> str:
    """The name, if it may be one.

    Raises:
        InvalidRequest: it could not be told apart from a path, or would not fit a label or a log line.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidRequest(
            f"Model name {name[:80]!r} contains special characters. Expected a letter or digit, then "
            "letters, digits, '_', '-' or '.', at most 255 in all."
        )
    return name


def check_runtime(runtime: str) -> str:
    """The runtime, if it is one of TorchServe's; raises `InvalidRequest`."""
    if runtime not in RUNTIMES:
        raise InvalidRequest(f"Invalid RuntimeType value: {runtime}")
    return runtime


def check_version_name(archive: str, manifest: Manifest) -> str:
    """The version of a manifest, if it may be one.

    Raises:
        InvalidArchive: as `check_model_name`.
    """
    version = manifest.model_version
    if not version.strip() or len(version) > 255 or "/" in version or not version.isprintable():
        raise InvalidArchive(
            f"Model version {version[:80]!r} of {archive} is not usable: expected 1 to 255 printable "
            "characters without '/'."
        )
    return version
