"""Checks whether a TorchServe deployment can be migrated: reads its files and archives, runs no code.

Files are looked up by `os.path`, which raises no error if this user may not search the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchere.archiver.errors import ArchiveError
from torchere.archiver.reader import open_archive
from torchere.serving.commands.archive_check import MigrationFinding, Verdict, archive_findings
from torchere.serving.commands.serve_options import cut_off, newest_snapshot, old_defaults
from torchere.serving.commands.settings_trial import tried
from torchere.serving.config.properties import ConfigurationError, read_properties
from torchere.serving.config.resolve import DEFAULTS, Configuration, Finding, configure
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import ServingError
from torchere.serving.registry.desired import location_of, startup_models
from torchere.serving.registry.workflows import read_workflow
from torchere.serving.store.package import is_archive
from torchere.serving.store.url_rules import is_remote

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
        counts = {verdict: self.count(verdict) for verdict in _VERDICTS}
        return json.dumps({"counts": counts, "findings": list(map(asdict, self.findings))}, indent=2)


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
        settings, found = _config(config, environ)
        findings += found
        findings += _models(config, settings, model_store)
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


def _snapshot(folder: Path, store: Path | None, environ: Mapping[str, str]) -> Iterator[MigrationFinding]:
    """Yield the findings on restoring the newest snapshot; `store` None: the one that the snapshot names."""
    if _listed(folder) is None:
        text = "there is no such folder, as with --ncs; without --ncs name the folder that has the snapshots"
        yield MigrationFinding(str(folder), "snapshots", "differs", text)
        return
    path = newest_snapshot(folder)
    if path is None:
        yield MigrationFinding(str(folder), "snapshots", "same", "there are none; nothing is restored")
        return
    configuration = _configured(path, environ)
    yield from _whole(path)
    for finding in (*configuration.of_level("error"), *configuration.of_level("warning")):
        yield _line(str(path), finding)
    yield from _models(path, configuration.settings, store)


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
        _, spec, _ = read_workflow(open_archive(path), None)
    except ArchiveError as err:
        return MigrationFinding(str(path), "workflow", "unsupported", err.reason)
    except ServingError as err:
        return MigrationFinding(str(path), "workflow", "unsupported", err.full_text)
    ignored = f"; unknown settings are ignored: {', '.join(spec.ignored)}" if spec.ignored else ""
    return MigrationFinding(str(path), "workflow", "same", f"can be registered{ignored}")


# Keys without effect here, whose absence clients or operators would notice; all others are for tuning only.
MISSED_KEYS = frozenset({"keystore", "plugins_path"})
# Keys whose default differs from TorchServe's; reported if the file does not set them.
OTHER_DEFAULTS = {
    "allowed_urls": "with torchserve a client may register from any URL, as in TorchServe, unless "
    "insecure_management=true; with torchere serve from none",
    "metrics_mode": "torchserve has TorchServe's default, log; that of torchere serve is prometheus, so that "
    "the metrics API answers, and ts_metrics.log and model_metrics.log are not written",
}
# Defaults that TorchServe changed in 0.11; reported if the file does not set them.
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


def _config(path: Path, environ: Mapping[str, str]) -> tuple[ServerSettings, list[MigrationFinding]]:
    """Return the settings of a file, and a finding for each of its lines."""
    # The store and its models have findings of their own, for the store that the caller names.
    configuration = tried(_configured(path, environ), but=("model_store", "load_models"))
    lines = [finding for finding in configuration.findings if finding.source != DEFAULTS]
    found = [*_whole(path), *(_line(str(path), line) for line in lines)]
    given = {line.key for line in lines}
    absent: tuple[tuple[Verdict, dict[str, str]], ...] = (("differs", OTHER_DEFAULTS), ("same", SINCE_0_11))
    for verdict, texts in absent:
        found += [
            MigrationFinding(str(path), key, verdict, text) for key, text in texts.items() if key not in given
        ]
    return configuration.settings, found


def _configured(path: Path, environ: Mapping[str, str]) -> Configuration:
    """Return the configuration of a file as `torchserve` reads it, with one of its defaults only."""
    name = "insecure_management"
    return configure(read_properties(path), environ, defaults={name: old_defaults(environ)[name]})


def _whole(path: Path) -> Iterator[MigrationFinding]:
    """Yield a finding if the file is a truncated snapshot."""
    if cut := cut_off(path, read_properties(path)):
        text = f"is not whole: {cut}; the start would be refused: delete it, or start with --ncs"
        yield MigrationFinding(str(path), "snapshot", "unsupported", text)


def _models(path: Path, settings: ServerSettings, store: Path | None) -> Iterator[MigrationFinding]:
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
