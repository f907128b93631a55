"""Checks one archive for migration: container, manifest, configuration and handler; runs no code."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchere.archiver.errors import ArchiveError
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import Archive, open_archive
from torchere.handlers.resolve import BUILT_IN_HANDLERS
from torchere.handlers.resolve import NOT_SHIPPED as HANDLERS_NOT_SHIPPED
from torchere.handlers.ts_compat.alias import ALIASES, NOT_SHIPPED
from torchere.serving.config.model_settings import (
    UNSUPPORTED_KEYS,
    config_of,
    unsupported_keys,
)
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import InvalidArchive, InvalidRequest
from torchere.serving.registry.names import check_model_name, check_version_name

Verdict = Literal["same", "differs", "unsupported"]


@dataclass(frozen=True, slots=True)
class MigrationFinding:
    """The verdict on one item of one file."""

    subject: str  # the file
    item: str  # the key, or the part of the archive
    verdict: Verdict
    text: str


_Found = tuple[str, Verdict, str]  # the fields of a `MigrationFinding` but its subject


def archive_findings(path: Path, settings: ServerSettings) -> Iterator[MigrationFinding]:
    """Yield the findings about the archive file or folder at `path`; reads every file of it once."""
    try:
        archive = open_archive(path)
        archive.verify()
        found: list[_Found] = [("archive", "same", _identity(archive)), *_contents(archive, settings)]
    except ArchiveError as err:
        found = [("archive", "unsupported", f"{err.reason.rstrip('.')}; {err.advice}")]
    for item, verdict, text in found:
        yield MigrationFinding(str(path), item, verdict, text)


def _identity(archive: Archive) -> str:
    if not archive.has_manifest:
        return f"{archive.kind} without a manifest: version 1.0, named after the file or by the registration"
    manifest = archive.manifest
    return f"{archive.kind}, model {manifest.model_name}, version {manifest.model_version}"


def _contents(archive: Archive, settings: ServerSettings) -> Iterator[_Found]:
    manifest = archive.manifest
    if manifest.runtime == "LSP":
        yield "runtime", "unsupported", "the C++ backend is not supported; use a Python handler"
    yield from _unusable_names(archive)
    yield _handler(archive, manifest.handler or settings.default_handler, settings.default_handler)
    yield from _config(archive, manifest)
    if manifest.requirements_file:
        yield _requirements(manifest, settings)
    for entry in archive.entries:
        if entry.name.endswith(".py"):
            yield from _source(archive, entry.name)


def _unusable_names(archive: Archive) -> Iterator[_Found]:
    manifest = archive.manifest
    try:
        check_version_name(archive.path.name, manifest)
        if manifest.model_name:
            check_model_name(manifest.model_name)
    except (InvalidArchive, InvalidRequest) as err:
        yield "name", "unsupported", err.message


def _handler(archive: Archive, handler: str | None, default: str | None) -> _Found:
    if handler is None:
        return (
            "handler",
            "unsupported",
            "none is named; name one by default_service_handler or register with it",
        )
    path = handler.partition(":")[0].removeprefix("./")
    stem = path.removesuffix(".py").rpartition("/")[2]
    files = {entry.name for entry in archive.entries}
    if files & {path, f"{path}.py", f"{stem}.py"}:
        return "handler", "same", handler
    name = stem.removeprefix("ts.torch_handler.")
    if name in BUILT_IN_HANDLERS:
        return "handler", "same", f"{name}, built in"
    if handler == default and name not in HANDLERS_NOT_SHIPPED:
        return "handler", "same", f"{handler}, by default_service_handler; have it beside the server"
    reason = HANDLERS_NOT_SHIPPED.get(name, "it is neither in the archive nor built in")
    return "handler", "unsupported", f"{handler}: {reason}"


def _config(archive: Archive, manifest: Manifest) -> Iterator[_Found]:
    if not manifest.config_file:
        return
    try:
        config = config_of(archive)
    except InvalidArchive as err:
        yield manifest.config_file, "unsupported", err.message
        return
    for key, value in config.raw.items():
        verdict, text = _config_key(key, value)
        yield f"{manifest.config_file} {key}", verdict, config.ignored.get(key, text)


def _config_key(key: str, value: Any) -> tuple[Verdict, str]:
    if key in unsupported_keys({key: value}):
        return "unsupported", UNSUPPORTED_KEYS[key]
    if key == "useVenv" and value is True:
        return (
            "differs",
            "the virtual environment lies beside the unpacked archive and sees the server's packages",
        )
    return "same", f"{value!r:.60}"


def _requirements(manifest: Manifest, settings: ServerSettings) -> _Found:
    file = str(manifest.requirements_file)
    if settings.install_dependencies:
        return file, "differs", "is installed into a folder of the version, not into the unpacked archive"
    return (
        file,
        "same",
        "is not installed without install_py_dep_per_model=true; install it beside the server",
    )


def _source(archive: Archive, name: str) -> Iterator[_Found]:
    try:
        missing = missing_imports(archive.read_text(name, MAX_SOURCE_BYTES))
    except ArchiveError as err:
        yield name, "differs", f"not looked into: {err.reason}"
        return
    except (SyntaxError, ValueError, RecursionError) as err:
        yield name, "unsupported", f"is no Python of this version: {_why(err)}"
        return
    for sentence in missing:
        yield name, "unsupported", sentence


def _why(err: Exception) -> str:
    return f"{err.msg} in line {err.lineno}" if isinstance(err, SyntaxError) else str(err)


MAX_SOURCE_BYTES = 4 * 2**20


def missing_imports(source: str) -> list[str]:
    """Return one sentence for each `ts` name that the source imports and torchere does not provide.

    >>> missing_imports("from ts.torch_handler.base_handler import BaseHandler")
    []

    Raises:
        SyntaxError: the source is not valid for this Python version.
    """
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        found += [f"line {node.lineno}: {why}" for why in map(_missing, wanted) if why]
    return found


def _missing(wanted: tuple[str, str]) -> str:
    module, name = wanted
    if module != "ts" and not module.startswith("ts."):
        return ""
    for path in (module, f"{module}.{name}"):
        if path in NOT_SHIPPED:
            return f"{path} is not part of torchere: {NOT_SHIPPED[path]}"
    if module not in ALIASES:
        return f"{module} is an internal of TorchServe and not part of torchere"
    if name in ("", "*") or f"{module}.{name}" in ALIASES or name in _names(module):
        return ""
    return f"{module} has no {name} in torchere"


def _names(module: str) -> Iterator[str]:
    """Yield the names that an alias module exports."""
    for source in ALIASES[module]:
        ours, _, names = source.partition(":")
        if names:
            name, _, alias = names.partition("=")
            yield alias or name
        else:
            yield from vars(importlib.import_module(f"torchere.handlers.{ours}"))
