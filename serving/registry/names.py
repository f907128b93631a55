"""Rules for the names of models, versions and runtimes, and the default name of a model."""

from __future__ import annotations

import re

from torchere.archiver.manifest import VERSION_RULE, Manifest, is_version
from torchere.serving.errors import InvalidArchive, InvalidRequest

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-.]{0,254}")  # the archiver's rule, with a bound
RUNTIMES = ("python", "python3", "LSP")


def default_model_name(url: str) -> str:
    """Return the name of a model that was given none, derived from its file name as in TorchServe."""
    name = url.rstrip("/").rpartition("/")[2]
    stem = name.rpartition(".")[0] if name.endswith((".mar", ".model")) else name
    return re.sub(r"\W", "_", stem)


def check_model_name(name: str) -> str:
    """Return `name` if it is a valid model name.

    Raises:
        InvalidRequest: it could be mistaken for a path, or does not fit a label or a log line.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidRequest(
            f"Model name {name[:80]!r} contains special characters. Expected a letter or digit, then "
            "letters, digits, '_', '-' or '.', at most 255 in all."
        )
    return name


def check_runtime(runtime: str) -> str:
    """Return `runtime` if it is one of TorchServe's; raise `InvalidRequest` otherwise."""
    if runtime not in RUNTIMES:
        raise InvalidRequest(f"Invalid RuntimeType value: {runtime}")
    return runtime


def check_version_name(archive: str, manifest: Manifest) -> str:
    """Return the version of a manifest if it is valid.

    Raises:
        InvalidArchive: it does not follow `VERSION_RULE`.
    """
    version = manifest.model_version
    if not is_version(version):
        raise InvalidArchive(
            f"Model version {version[:80]!r} of {archive} is not usable: expected {VERSION_RULE}."
        )
    return version
