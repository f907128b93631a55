"""Checks whether a TorchServe deployment can be migrated: reads its files and archives, runs no code.

Files are looked for by `os.path`, which raises no error where this user may not look into the folder.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torchere.archiver.errors import ArchiveError
from torchere.archiver.manifest import Manifest
from torchere.archiver.reader import Archive, open_archive
from torchere.handlers.built_in import BUILT_IN_HANDLERS, CPP_ADVICE, CPP_HANDLERS
from torchere.handlers.built_in import NOT_SHIPPED as HANDLERS_NOT_SHIPPED
from torchere.handlers.cpp import CppHandlerName, cpp_handler_name, problem_of
from torchere.serving.commands.handler_imports import missing_imports, not_installed
from torchere.serving.commands.serve_options import cut_off, newest_snapshot, old_defaults
from torchere.serving.commands.settings_trial import tried
from torchere.serving.config.model_properties import UNSUPPORTED_KEYS, unsupported_keys
from torchere.serving.config.model_settings import config_of
from torchere.serving.config.properties import ConfigurationError, read_properties
from torchere.serving.config.resolve import DEFAULTS, Configuration, Finding, configure
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import InvalidArchive, InvalidRequest, ServingError
from torchere.serving.registry.desired import location_of, startup_models
from torchere.serving.registry.names import check_model_name, check_version_name
from torchere.serving.registry.workflows import read_workflow
from torchere.serving.store.package import is_archive
from torchere.serving.store.url_rules import is_remote

MAX_SOURCE_BYTES = 4 * 2**20
MAX_LIBRARY_BYTES = 2**30
_VERDICTS: tuple[Verdict, ...] = ("same", "differs", "unsupported")


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """All findings, grouped by file."""

    findings: tuple[MigrationFinding, ...]

    def count(self, verdict: Verdict) -> int:
        """Return the number of findings with this verdict."""
        return sum(finding.verdict == verdict for finding in self.findings)

    def as_text(self) -> str:
        """Return the report as text."""
        lines: list[str] = []
        subject = ""
        for finding in self.findings:
            if finding.subject != subject:
                subject = finding.subject
                lines += [subject]
            lines.append(f"  {finding.verdict:<12}{finding.item}: {finding.text}")
        counts = ", ".join(f"{self.count(verdict)} {verdict}" for verdict in _VERDICTS)
        return "\n".join([*lines, counts])

    def as_json(self) -> str:
        """Return the report as JSON."""
        found = [
            {"subject": one.subject, "item": one.item, "verdict": one.verdict, "text": one.text}
            for one in self.findings
        ]
        counts = {verdict: self.count(verdict) for verdict in _VERDICTS}
        return json.dumps({"counts": counts, "findings": found}, indent=2)


def check_migration(
    config: Path | None,
    model_store: Path | None,
    snapshots: Path | None,
    environ: Mapping[str, str],
    workflow_store: Path | None = None,
) -> MigrationReport:
    """Read the given files and the configured stores, and return the findings.

    Args:
        config: a `config.properties`, or None.
        model_store: a folder of archives; None: the model store of the configuration.
        snapshots: the folder of snapshots; the newest one is read, because a start restores it. A deployment
            with `--ncs` has no such folder.
        environ: the environment variables with which the server would be started.
        workflow_store: a folder of workflow archives; None: the workflow store of the configuration, if any.

    Raises:
        ConfigurationError: a given file or folder can't be read, or none is given.
    """
    if config is None and model_store is None and snapshots is None and workflow_store is None:
        raise ConfigurationError(
            "nothing to check: name --ts-config, --model-store, --workflow-store or --snapshots"
        )
    findings: list[MigrationFinding] = []
    settings = ServerSettings()
    if config is not None:
        settings, found = config_findings(config, environ)
        findings += found
        findings += model_findings(config, settings, model_store)
    store = model_store or settings.model_store
    if snapshots is not None:
        findings += _snapshot(snapshots, store, environ)
    if store is not None:
        findings += _store(store, settings)
    if workflow_store is not None and not os.path.isdir(workflow_store):
        raise ConfigurationError(f"{workflow_store}: expected the folder of the workflow store")
    workflows = workflow_store or settings.workflow_store  # its absence is a finding of the configuration
    if workflows is not None and workflows != store and os.path.isdir(workflows):
        findings += _workflows(workflows)
    return MigrationReport(tuple(findings))


def _snapshot(folder: Path, store: Path | None, environ: Mapping[str, str]) -> Sequence[MigrationFinding]:
    if _listed(folder) is None:
        text = "there is no such folder, as with --ncs; without --ncs name the folder that has the snapshots"
        return [MigrationFinding(str(folder), "snapshots", "differs", text)]
    newest = newest_snapshot(folder)
    if newest is None:
        return [MigrationFinding(str(folder), "snapshots", "same", "there are none; nothing is restored")]
    return snapshot_findings(newest, store, environ)


def _store(store: Path, settings: ServerSettings) -> Iterator[MigrationFinding]:
    entries = _listed(store)
    if entries is None:
        raise ConfigurationError(f"{store}: expected the folder of the model store")
    yield from _workflows(store)
    for path in entries:
        if path.suffix != ".war" and is_archive(path):
            yield from archive_findings(path, settings)


def _workflows(store: Path) -> Iterator[MigrationFinding]:
    for path in _listed(store) or ():
        if path.suffix == ".war" and not path.name.startswith("."):
            yield _workflow(path)


def _listed(folder: Path) -> list[Path] | None:
    """Return the sorted entries of a folder; None if there is no such folder.

    Raises:
        ConfigurationError: the folder can't be listed, or this user may not enter a folder above it.
    """
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as err:
        raise ConfigurationError(f"{folder}: can't be read: {err.strerror}") from err


def _workflow(path: Path) -> MigrationFinding:
    try:
        read_workflow(open_archive(path), None)
    except ArchiveError as err:
        return MigrationFinding(str(path), "workflow", "unsupported", err.reason)
    except ServingError as err:
        return MigrationFinding(str(path), "workflow", "unsupported", err.full_text)
    return MigrationFinding(str(path), "workflow", "same", "can be registered")


# Keys without effect here, whose absence clients or operators would notice; all others are for tuning only.
MISSED_KEYS = frozenset(
    {
        "keystore",
        "plugins_path",
    }
)
# Keys whose default differs from TorchServe's; reported if the file does not set them.
OTHER_DEFAULTS = {
    "allowed_urls": "with torchserve a client may register from any URL, as in TorchServe, unless "
    "insecure_management=true; with torchere serve from none",
    "metrics_mode": "torchserve has TorchServe's default, log; that of torchere serve is prometheus, so that "
    "the metrics API answers, and ts_metrics.log and model_metrics.log are not written",
}
# Defaults of TorchServe since 0.11 that differ from those before it; told if the file does not set them.
SINCE_0_11 = {
    "disable_token_authorization": "tokens are on, as in TorchServe since 0.11: clients send a key of "
    "key_file.json in the header Authorization, or start with --disable-token-auth",
    "enable_model_api": "models are not registered or unregistered over the network, as in TorchServe since "
    "0.11: set it to true, or start with --enable-model-api, where clients do that",
}
OTHER_MEANING = {
    "install_py_dep_per_model": "packages go into a folder, or a virtual environment, of the version; a "
    "model whose requirements fail is not registered",
    "allowed_urls": "hosts of this machine or its network must be spelt out in the pattern that matches",
}


def config_findings(path: Path, environ: Mapping[str, str]) -> tuple[ServerSettings, list[MigrationFinding]]:
    """Return the settings of a file, and a finding for each of its lines.

    Raises:
        ConfigurationError: the file can't be read, or is not a properties file.
    """
    # The store and its models have findings of their own, for the store that the caller names.
    configuration = tried(_configured(path, environ), but=("model_store", "load_models"))
    found = [*_whole(path)]
    found += [_line(str(path), finding) for finding in configuration.findings if finding.source != DEFAULTS]
    given = {finding.key for finding in configuration.findings if finding.source != DEFAULTS}
    found += [
        MigrationFinding(str(path), key, "differs", text)
        for key, text in OTHER_DEFAULTS.items()
        if key not in given
    ]
    found += [
        MigrationFinding(str(path), key, "same", text) for key, text in SINCE_0_11.items() if key not in given
    ]
    return configuration.settings, found


def _configured(path: Path, environ: Mapping[str, str]) -> Configuration:
    """Return the configuration of a file as `torchserve` reads it, but for the defaults it does not set."""
    name = "insecure_management"
    return configure(read_properties(path), environ, defaults={name: old_defaults(environ)[name]})


def snapshot_findings(
    path: Path, store: Path | None, environ: Mapping[str, str]
) -> Sequence[MigrationFinding]:
    """Return the findings on restoring a snapshot; `store` None means the model store of the snapshot.

    Raises:
        ConfigurationError: the file can't be read, or is not a properties file.
    """
    configuration = _configured(path, environ)
    problems = _problems(path, configuration)
    return [*_whole(path), *problems, *model_findings(path, configuration.settings, store)]


def _whole(path: Path) -> Iterator[MigrationFinding]:
    """Yield a finding on a snapshot that is cut off."""
    if cut := cut_off(path, read_properties(path)):
        text = f"is not whole: {cut}; the start would be refused: delete it, or start with --ncs"
        yield MigrationFinding(str(path), "snapshot", "unsupported", text)


def _problems(path: Path, configuration: Configuration) -> Iterator[MigrationFinding]:
    for finding in (*configuration.of_level("error"), *configuration.of_level("warning")):
        yield _line(str(path), finding)


def model_findings(path: Path, settings: ServerSettings, store: Path | None) -> Iterator[MigrationFinding]:
    """Yield findings on the archives that a server would load at its start.

    They are in `store`, or, if that is None, in the model store of the settings.
    """
    folder = store or settings.model_store
    never_served = tuple(model for model in settings.snapshot_models if not model.version)
    origin = "missing" if never_served else "load_models"  # a snapshot takes precedence over load_models
    for wanted in startup_models(replace(settings, snapshot_models=never_served), tuple):
        if folder is None or is_remote(wanted.url) or os.path.exists(folder / wanted.url.rstrip("/")):
            continue
        text = f"is not in {folder}: the start goes on, as in TorchServe; /readyz says 503 until it is there"
        yield MigrationFinding(str(path), f"{origin} {wanted.url}", "differs", text)
    for model in settings.snapshot_models:
        if not model.version:
            continue
        item = f"{model.name} {model.version}"
        if folder is not None and not os.path.exists(folder / location_of(model)):
            text = f"{model.archive} is not in {folder}: the start would be refused, as by TorchServe"
            yield MigrationFinding(str(path), item, "unsupported", text)
        else:
            yield MigrationFinding(str(path), item, "same", f"is restored from {model.archive}")


def _line(subject: str, finding: Finding) -> MigrationFinding:
    item = f"{finding.key}={finding.value}" if finding.value else finding.key
    text = finding.message
    if finding.level == "effect" and finding.key in OTHER_MEANING:
        return MigrationFinding(subject, item, "differs", f"{text}; {OTHER_MEANING[finding.key]}")
    return MigrationFinding(subject, item, _verdict(finding), text)


def _verdict(finding: Finding) -> Verdict:
    if finding.level == "effect" or finding.key == "load_models":  # a snapshot overrides it in both servers
        return "same"
    missed = finding.key in MISSED_KEYS and finding.message.startswith("has no effect")
    return "unsupported" if finding.level == "error" or missed else "differs"


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
    return f"{archive.kind}, model {manifest.model_name}, version {manifest.model_version}"


def _contents(archive: Archive, settings: ServerSettings) -> Iterator[_Found]:
    manifest = archive.manifest
    in_cpp = cpp_handler_name(manifest.handler or "", manifest.runtime)
    if manifest.runtime == "LSP" and in_cpp is None:
        is_known = manifest.handler in CPP_HANDLERS
        yield (
            "runtime",
            *(("same", "LSP, served by Python") if is_known else ("unsupported", CPP_ADVICE)),
        )
    yield from _unusable_names(archive)
    handler = manifest.handler or settings.default_handler
    found = _in_cpp(archive, in_cpp) if in_cpp else _handler(archive, handler, settings.default_handler)
    yield found
    if found[1] == "same":
        yield from _entry_point(archive, str(handler))
    yield from _config(archive, manifest)
    if manifest.requirements_file:
        yield _requirements(manifest, settings)
    for entry in archive.entries:
        if entry.name.endswith(".py"):
            brings_packages = bool(manifest.requirements_file) and settings.install_dependencies
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
    if name in BUILT_IN_HANDLERS or name in CPP_HANDLERS:
        return "handler", "same", f"{name}, built in"
    if handler == default and name not in HANDLERS_NOT_SHIPPED:
        return "handler", "same", f"{handler}, by default_service_handler; have it beside the server"
    reason = HANDLERS_NOT_SHIPPED.get(name, "it is neither in the archive nor built in")
    return "handler", "unsupported", f"{handler}: {reason}"


def _handler_file(archive: Archive, handler: str) -> str | None:
    """Return the file of the archive that a handler names; None: the archive has no such file."""
    path = handler.partition(":")[0].removeprefix("./")
    stem = path.removesuffix(".py").rpartition("/")[2]
    files = {entry.name for entry in archive.entries}
    return next((name for name in (path, f"{path}.py", f"{stem}.py") if name in files), None)


def _entry_point(archive: Archive, handler: str) -> Iterator[_Found]:
    """Yield why a handler can't load: its file has no entry point, or a built-in one has no weights."""
    file = _handler_file(archive, handler)
    manifest = archive.manifest
    if file is None:
        files = {entry.name for entry in archive.entries}
        is_built_in = handler.removeprefix("ts.torch_handler.").removesuffix(".py") in BUILT_IN_HANDLERS
        for name in (manifest.serialized_file, manifest.model_file) if is_built_in else ():
            if name and name not in files:
                yield name, "unsupported", "is named by the manifest, and not in the archive: pack it again"
        return
    try:
        tree = ast.parse(archive.read_text(file, MAX_SOURCE_BYTES))
    except (ArchiveError, SyntaxError, ValueError, RecursionError):
        return  # `_source` says so
    function = handler.partition(":")[2] or "handle"
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if len(classes) != 1 and not any(_may_bind(node, function) for node in tree.body):
        found = ", ".join(classes) or "none"
        text = f"has no function {function!r}, and {len(classes)} classes ({found}); expected exactly one"
        yield file, "unsupported", text


def _may_bind(statement: ast.stmt, name: str) -> bool:
    """Whether a statement of a module may bind the name, or define a class on a condition."""
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


def _source(archive: Archive, name: str, brings_packages: bool) -> Iterator[_Found]:
    """Yield what a Python file imports and will not find; no packages, if its requirements bring them."""
    try:
        text = archive.read_text(name, MAX_SOURCE_BYTES)
        missing = missing_imports(text)
        if not brings_packages:
            missing += not_installed(text, {entry.name for entry in archive.entries})
    except ArchiveError as err:
        yield name, "differs", f"not looked into: {err.reason}"
        return
    except (SyntaxError, ValueError, RecursionError) as err:
        yield name, "unsupported", f"does not compile with Python {platform.python_version()}: {_why(err)}"
        return
    for sentence in missing:
        yield name, "unsupported", sentence


def _why(err: Exception) -> str:
    return f"{err.msg} in line {err.lineno}" if isinstance(err, SyntaxError) else str(err)
