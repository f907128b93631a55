"""Tries the files and packages of the settings as a start does; for `config check` and `migrate check`.

Even with valid values, every start or every model may fail, for example if a certificate lacks its key or a
handler is not installed. This module binds no port, and writes and loads nothing. It looks files up by
`os.path`, which raises no error if this user may not search the folder.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import open_archive
from torchere.handlers.built_in import BUILT_IN_HANDLERS, OF_TOOLKITS
from torchere.handlers.errors import MetricsCacheError
from torchere.serving.access.fixed_keys import read_clients
from torchere.serving.access.tls import TlsFiles, read_pair
from torchere.serving.config.resolve import Configuration, Finding, Level
from torchere.serving.config.server_settings import Address, MetricsMode, RendezvousSettings, ServerSettings
from torchere.serving.errors import ServingError
from torchere.serving.store.package import IS_WORKFLOW, StoreFolder, is_workflow
from torchere.serving.store.signing import TrustedKeys
from torchere.serving.store.url_rules import is_remote
from torchere.serving.telemetry.declared import read_metrics_config
from torchere.serving.workers.rendezvous import secret_of
from torchere.serving.workers.sandbox import check_readable, sandbox_of

_Problem = tuple[str, Level, str]  # key, level, and text

_EMPTY_WORKER_MIB = 230  # private memory of a worker without a model, on two cores (docs/hardening.md)


def tried(configuration: Configuration, but: Collection[str] = ()) -> Configuration:
    """Return the configuration with findings on settings that fail on this machine, but for these keys."""
    found: dict[str, Finding] = {}
    for key, level, text in _problems(configuration.settings):
        if key not in but:
            found.setdefault(key, Finding(level, "configuration", key, "", text))
    findings = []
    for finding in configuration.findings:
        problem = found.pop(finding.key, None) if finding.level == "effect" else None
        if problem is None:
            findings.append(finding)
        else:
            findings.append(replace(finding, level=problem.level, message=problem.message))
    return replace(configuration, findings=(*findings, *found.values()))


def _problems(settings: ServerSettings) -> Iterator[_Problem]:
    yield from _folders(settings)
    yield from _files(settings)
    yield from _archives("load_models", settings.load_models, settings.model_store)
    workflow_store = settings.workflow_store or settings.model_store
    yield from _archives("load_workflows", settings.load_workflows, workflow_store)
    yield from _handler(settings)
    yield from _preloaded(settings)
    yield from _rendezvous(settings.rendezvous)
    yield from _memory(settings.sandbox.memory_limit_bytes)
    script = settings.system_metrics_command.split()[:1]
    if script and not os.path.isfile(script[0]):
        yield "system_metrics_cmd", "warning", _absent(Path(script[0]), "the host is not sampled")
    try:
        sandbox = sandbox_of(settings)
        if sandbox is not None:
            check_readable(sandbox)
    except (ServingError, PermissionError) as err:
        yield ("worker_user" if settings.sandbox.user else "worker_sandbox"), "error", _said(err)


def _folders(settings: ServerSettings) -> Iterator[_Problem]:
    store, workflows = settings.model_store, settings.workflow_store
    if store is not None and not os.path.isdir(store):
        yield "model_store", _level(store), _absent(store, "the start is refused; make the folder")
    if workflows is not None and not os.path.isdir(workflows):  # a start checks the option only
        yield "workflow_store", "warning", _absent(workflows, "no workflow can be registered; make it")
    if settings.audit_log is not None:
        audit = settings.audit_log.absolute()  # a start makes its folders, and appends to it
        existing = next(path for path in (audit, *audit.parents) if os.path.exists(path))
        yield from _unwritable("audit_log", settings.audit_log, existing)
    keys = settings.key_file
    is_named = keys != ServerSettings().key_file  # the default is wherever the server is started
    if settings.authorizes_clients and settings.token_keys_file is None and is_named:
        yield from _unwritable("key_file", keys, keys.absolute().parent)


def _unwritable(key: str, file: Path, needed: Path) -> Iterator[_Problem]:
    """Yield the problem of a file that a start can't write; `needed` is the path that must be writable."""
    refused = "the start is refused"
    if os.path.isdir(file):
        yield key, "error", f"{file} is a folder, expected a file; {refused}"
    elif os.access(needed, os.W_OK) and (needed == file.absolute() or os.path.isdir(needed)):
        return
    elif not os.path.isdir(ancestor := next(filter(os.path.exists, file.absolute().parents))):
        yield key, "error", f"{ancestor} is a file, expected a folder; {refused}"
    elif os.path.isdir(file.absolute().parent):
        yield key, "error", f"this user may not write to {needed}; {refused}"
    else:
        yield key, _level(file.absolute().parent), _absent(file.parent, refused)


def _files(settings: ServerSettings) -> Iterator[_Problem]:
    refused = "the start is refused"
    if settings.certificate_file is not None and settings.private_key_file is not None:
        files = TlsFiles(
            settings.certificate_file, settings.private_key_file, settings.client_ca_file, small_keys=True
        )
        names = ("certificate_file", "private_key_file", "client_ca_file")
        pairs = zip(names, (files.certificate, files.private_key, files.client_ca), strict=True)
        missing = [each for key, file in pairs if file is not None for each in _missing(key, file, refused)]
        yield from (missing or _tls(files))
    if settings.token_keys_file is not None:
        yield from _file("token_keys_file", settings.token_keys_file, read_clients, refused)
    if settings.metrics_config is not None:
        yield from _metrics(settings.metrics_config, settings.metrics_mode)
    if settings.require_signed and settings.trusted_signing_keys:  # without them it is an error already
        try:
            TrustedKeys(settings.trusted_signing_keys)
        except ServingError as err:
            yield "trusted_signing_keys", "error", _said(err)


def _missing(key: str, file: Path, otherwise: str) -> list[_Problem]:
    """Return the problem of a file that is not there; an empty list if it is."""
    return [] if os.path.isfile(file) else [(key, _level(file), _absent(file, otherwise))]


def _tls(files: TlsFiles) -> Iterator[_Problem]:
    try:
        pair = read_pair(files)
    except ServingError as err:
        key = "client_ca_file" if "client_ca_file" in err.message else "certificate_file"
        yield key, "error", _said(err)
        return
    if pair.expires_at_s is not None and pair.expires_at_s < time.time():
        yield "certificate_file", "warning", f"{files.certificate} has expired; clients refuse it: renew it"


def _file(key: str, file: Path, read: Callable[[Path], object], otherwise: str) -> Iterator[_Problem]:
    if missing := _missing(key, file, otherwise):
        yield from missing
        return
    try:
        read(file)
    except (ServingError, MetricsCacheError) as err:
        yield key, "error", f"{_said(err)}; {otherwise}"


def _metrics(file: Path, mode: MetricsMode) -> Iterator[_Problem]:
    dropped: list[str] = []

    def read(path: Path) -> None:
        dropped.extend(read_metrics_config(path, mode).dropped)

    yield from _file("metrics_config", file, read, "only metrics that begin with torchere_ are kept")
    if dropped:
        yield "metrics_config", "warning", f"metrics of {file} are dropped: {'; '.join(dropped)}"


def _archives(key: str, items: Sequence[str], store: Path | None) -> Iterator[_Problem]:
    """Yield the archives among these items, the value of `key`, that can't be opened."""
    is_all = [each.lower() for each in items] == ["all"]
    if store is None or not os.path.isdir(store) or is_all:
        return
    for item in items:
        name = item.partition("=")[2] or item
        if is_remote(name) or is_remote(item):
            continue
        try:
            path = StoreFolder(store).find(name, trusted=True)
        except ServingError:
            absent = _absent(store / name.rstrip("/").rpartition("/")[2], "it is not served")
            yield key, "warning", f"{absent} (/readyz says 503)"
            continue
        try:
            archive = open_archive(path)
        except ArchiveError as err:
            yield key, "error", f"{path.name} is not served: {err.reason}"
            continue
        if key == "load_models" and is_workflow(archive):
            yield key, "error", f"{path.name} {IS_WORKFLOW}"


def _handler(settings: ServerSettings) -> Iterator[_Problem]:
    module = (settings.default_handler or "").partition(":")[0]
    key = "default_service_handler"
    if module.startswith("/"):
        yield from _missing(key, Path(module), "archives without a handler do not load")
        return
    top = module.partition(".")[0]
    # A name without a dot, or a file, may be in an archive.
    if top == module or module.endswith(".py") or module in {*BUILT_IN_HANDLERS, *OF_TOOLKITS} or top == "ts":
        return
    if not is_installed(top):
        yield key, "error", f"{_not_installed(top)}, so archives without a handler do not load"


def _preloaded(settings: ServerSettings) -> Iterator[_Problem]:
    """Yield the first of `preload_modules` whose package is missing; nothing is imported."""
    for name in settings.preload_modules:
        top = name.partition(".")[0]
        if not is_installed(top):
            yield "preload_modules", "error", f"{_not_installed(top)}, so workers do not share {name}"
            return


def _rendezvous(rendezvous: RendezvousSettings) -> Iterator[_Problem]:
    file, otherwise = rendezvous.secret_file, "models over several machines do not load"
    if file and (missing := _missing("rendezvous_secret_file", file, otherwise)):
        yield from missing
        return
    try:
        secret_of(rendezvous, needed=not Address(rendezvous.host).is_local)
    except ServingError as err:
        yield "rendezvous_secret_file" if file else "rendezvous_address", "error", _said(err)


def _memory(limit_bytes: int) -> Iterator[_Problem]:
    """Yield a problem if a worker may exceed the limit without a model; the memory varies by machine."""
    needed_bytes = _EMPTY_WORKER_MIB * 2**20
    if 0 < limit_bytes < needed_bytes:
        level: Level = "error" if limit_bytes < needed_bytes / 2 else "warning"
        then = "none starts" if level == "error" else "none may start"
        taken = f"a worker takes some {_EMPTY_WORKER_MIB} MiB before it loads a model"
        yield "worker_memory_limit", level, f"{taken}, so that {then}; set more bytes"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; nothing is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: imported, and without a spec
        return package in sys.modules


def _not_installed(package: str) -> str:
    return f"the package {package} is not installed beside {sys.executable}"


def _level(path: Path) -> Level:
    """Return the level of a missing file: if its folder is missing, too, this may be another machine."""
    return "error" if os.path.isdir(path.absolute().parent) else "warning"


def _absent(path: Path, otherwise: str) -> str:
    return f"there is no {path} on this machine; without it, {otherwise}"


def _said(err: Exception) -> str:
    return err.full_text if isinstance(err, ServingError) else str(err)
