"""Checks whether a server can serve an archive made for TorchServe: reads it, and runs none of its code."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchere.archiver.errors import ArchiveError, first_names
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import Archive, open_archive
from torchere.handlers.built_in import BUILT_IN_HANDLERS, CPP_ADVICE, CPP_HANDLERS, HOMES
from torchere.handlers.built_in import NOT_SHIPPED as HANDLERS_NOT_SHIPPED
from torchere.handlers.cpp import CppHandlerName, cpp_handler_name, problem_of
from torchere.handlers.ts_compat.alias import ALIASES, NOT_SHIPPED, names_of
from torchere.serving.commands.settings_trial import is_installed
from torchere.serving.config.model_properties import UNSUPPORTED_KEYS, unsupported_keys
from torchere.serving.config.model_settings import config_of
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import InvalidArchive, InvalidRequest
from torchere.serving.registry.names import check_model_name, check_version_name

MAX_SOURCE_BYTES = 4 * 2**20
MAX_LIBRARY_BYTES = 2**30
_OURS = frozenset(name.partition(".")[0] for name in (*ALIASES, "torchere"))
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)  # errors of Python's parser

Verdict = Literal["same", "differs", "unsupported"]


@dataclass(frozen=True, slots=True)
class MigrationFinding:
    """The verdict on one item of one file."""

    subject: str  # the file
    item: str  # the key, or a part of the archive
    verdict: Verdict
    text: str


_Found = tuple[str, Verdict, str]  # the fields of a `MigrationFinding` except `subject`


def archive_findings(path: Path, settings: ServerSettings) -> Iterator[MigrationFinding]:
    """Yield the findings on the archive file or folder at `path`; reads every file in it once."""
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
    changed = f"; changed after packing: {first_names(sorted(archive.changed))}" if archive.changed else ""
    return f"{archive.kind}, model {manifest.model_name}, version {manifest.model_version}{changed}"


def _contents(archive: Archive, settings: ServerSettings) -> Iterator[_Found]:
    manifest = archive.manifest
    in_cpp = cpp_handler_name(manifest.handler or "", manifest.runtime)
    if manifest.runtime == "LSP" and in_cpp is None:
        is_known = manifest.handler in CPP_HANDLERS
        yield "runtime", *(("same", "LSP, served by Python") if is_known else ("unsupported", CPP_ADVICE))
    yield from _unusable_names(archive)
    if in_cpp:
        yield _in_cpp(archive, in_cpp)
    else:
        yield from _handler(archive, settings.default_handler)
    yield from _config(archive, manifest)
    if manifest.requirements_file:
        yield _requirements(manifest, settings)
    brings_packages = bool(manifest.requirements_file) and settings.install_dependencies
    for entry in archive.entries:
        if entry.name.endswith(".py"):
            yield from _source(archive, entry.name, brings_packages)


def _unusable_names(archive: Archive) -> Iterator[_Found]:
    manifest = archive.manifest
    try:
        check_version_name(archive.path.name, manifest)
        if manifest.model_name:
            check_model_name(manifest.model_name)
    except (InvalidArchive, InvalidRequest) as err:
        yield "name", "unsupported", err.message


def _in_cpp(archive: Archive, name: CppHandlerName) -> _Found:
    if name.file not in {entry.name for entry in archive.entries}:
        return "handler", "unsupported", f"{name.file} is not in the archive: pack it again"
    library = archive.read_bytes(name.file, MAX_LIBRARY_BYTES)
    if problem := problem_of(library, name, importlib.metadata.version("torch")):
        return "handler", "differs", problem
    return "handler", "same", f"{name.class_name} in {name.file}, compiled for torchere"


def _handler(archive: Archive, default: str | None) -> Iterator[_Found]:
    """Yield whether the handler is there, and why it can't load."""
    handler = archive.manifest.handler or default
    if handler is None:
        text = "none is named; name one by default_service_handler or register with it"
        yield "handler", "unsupported", text
        return
    place, _, function = handler.partition(":")
    path = place.removeprefix("./")
    stem = path.removesuffix(".py").rpartition("/")[2]
    name = stem.removeprefix("ts.torch_handler.")
    files = {entry.name for entry in archive.entries}
    if file := next((one for one in (path, f"{path}.py", f"{stem}.py") if one in files), None):
        yield "handler", "same", handler
        yield from _entry_point(archive, file, function or "handle")
    elif name in HOMES:
        yield "handler", "same", f"{name}, built in"
        if name in BUILT_IN_HANDLERS:
            yield from _missing_weights(archive.manifest, files)
    elif handler == default and name not in HANDLERS_NOT_SHIPPED:
        yield "handler", "same", f"{handler}, by default_service_handler; have it beside the server"
    else:
        reason = HANDLERS_NOT_SHIPPED.get(name, "it is neither in the archive nor built in")
        yield "handler", "unsupported", f"{handler}: {reason}"


def _missing_weights(manifest: Manifest, files: Collection[str]) -> Iterator[_Found]:
    for name in (manifest.serialized_file, manifest.model_file):
        if name and name not in files:
            yield name, "unsupported", "is named by the manifest, and not in the archive: pack it again"


def _entry_point(archive: Archive, file: str, function: str) -> Iterator[_Found]:
    """Yield a finding if the file can't be a handler: it has neither the function nor exactly one class."""
    try:
        tree = ast.parse(archive.read_text(file, MAX_SOURCE_BYTES))
    except (ArchiveError, *_UNREADABLE):
        return  # `_source` says so
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if len(classes) != 1 and not any(_may_bind(node, function) for node in tree.body):
        found = ", ".join(classes) or "none"
        text = f"has no function {function!r}, and {len(classes)} classes ({found}); expected exactly one"
        yield file, "unsupported", text


def _may_bind(statement: ast.stmt, name: str) -> bool:
    """Whether a top-level statement may bind the name, or defines a class or function conditionally."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement.name == name
    for node in ast.walk(statement):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in ("*", name):
            return True
        if isinstance(node, ast.Name) and node.id in (name, "globals", "setattr"):
            return True
    return False


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
        text = "the virtual environment lies beside the unpacked archive and sees the server's packages"
        return "differs", text
    return "same", f"{value!r:.60}"


def _requirements(manifest: Manifest, settings: ServerSettings) -> _Found:
    file = str(manifest.requirements_file)
    if settings.install_dependencies:
        return file, "differs", "is installed into a folder of the version, not into the unpacked archive"
    text = "is not installed without install_py_dep_per_model=true; install it beside the server"
    return file, "same", text


def _source(archive: Archive, name: str, brings_packages: bool) -> Iterator[_Found]:
    """Yield the imports of a Python file that fail here; of `ts` only, if its requirements bring packages."""
    try:
        module = ast.parse(archive.read_text(name, MAX_SOURCE_BYTES))
    except ArchiveError as err:
        yield name, "differs", f"not looked into: {err.reason}"
        return
    except _UNREADABLE as err:
        yield name, "unsupported", f"does not compile with Python {platform.python_version()}: {_why(err)}"
        return
    missing = missing_imports(module)
    if not brings_packages:
        missing += _not_installed(module, {entry.name for entry in archive.entries})
    for sentence in missing:
        yield name, "unsupported", sentence


def _why(err: Exception) -> str:
    if isinstance(err, SyntaxError):
        return f"{err.msg} in line {err.lineno}"
    return str(err) or "it is nested too deeply"


def missing_imports(module: ast.Module) -> list[str]:
    """Return one sentence for each name in `ts` that a module imports but torchere does not provide."""
    found = ((line, _missing(path, name)) for line, path, name in _imported(ast.walk(module)))
    return [f"line {line}: {why}" for line, why in found if why]


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name ("" for `import module`) of each import among these nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def _missing(module: str, name: str) -> str:
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
    for ours, _, alias in names_of(module):
        if alias == "*":
            yield from vars(importlib.import_module(f"torchere.handlers.{ours}"))
        else:
            yield alias


def _not_installed(module: ast.Module, files: Collection[str]) -> list[str]:
    """Return a sentence for each package that a module imports and that is neither installed nor in `files`.

    Imports in functions, and in `try` or `if`, do not count: the module may work without them.
    """
    beside = {part.removesuffix(".py") for name in files for part in name.split("/")}
    known = _OURS | beside | sys.stdlib_module_names
    found: dict[str, str] = {}
    for line, path, _ in _imported(module.body):
        root = path.partition(".")[0]
        if root not in known and root not in found and not is_installed(root):
            found[root] = (
                f"line {line}: {root} is not installed here; install it beside the server, or pack the "
                "archive with its requirements and set install_py_dep_per_model=true"
            )
    return list(found.values())
