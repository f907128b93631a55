"""What becomes of a TorchServe deployment: read its files, run nothing of it, and say it line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchere.serving.migration_archive import archive_findings
from torchere.serving.migration_config import config_findings, model_findings, snapshot_findings
from torchere.serving.migration_finding import MigrationFinding, Verdict
from torchere.serving.properties import ConfigurationError
from torchere.serving.registry.store_folder import is_archive
from torchere.serving.serve_options import newest_snapshot
from torchere.serving.settings import ServerSettings

_VERDICTS: tuple[Verdict, ...] = ("same", "differs", "unsupported")


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """Every finding, file by file."""

    findings: tuple[MigrationFinding, ...]

    def count(self, verdict: Verdict) -> int:
        """How many findings come to this verdict."""
        return sum(finding.verdict == verdict for finding in self.findings)

    def as_text(self) -> str:
        """The report for people."""
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
        """The report for programs."""
        found = [
            {"subject": one.subject, "item": one.item, "verdict": one.verdict, "text": one.text}
            for one in self.findings
        ]
        counts = {verdict: self.count(verdict) for verdict in _VERDICTS}
        return json.dumps({"counts": counts, "findings": found}, indent=2)


def check_migration(
    config: Path | None, model_store: Path | None, snapshots: Path | None, environ: Mapping[str, str]
) -> MigrationReport:
    """Read what is named, and the model store that the configuration names, and report on it.

    Args:
        config: A `config.properties`; None for none.
        model_store: A folder of archives; None for the configuration's.
        snapshots: The folder snapshots are in; the newest is read, as a start would restore it.
        environ: The environment that the server would be started with.

    Raises:
        ConfigurationError: a file or folder that is named can't be read at all, or none is named.
    """
    if config is None and model_store is None and snapshots is None:
        raise ConfigurationError("nothing to check: name --ts-config, --model-store or --snapshots")
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
    return MigrationReport(tuple(findings))


def _snapshot(folder: Path, store: Path | None, environ: Mapping[str, str]) -> Sequence[MigrationFinding]:
    newest = newest_snapshot(folder)
    if newest is None:
        return [MigrationFinding(str(folder), "snapshots", "same", "there are none; nothing is restored")]
    return snapshot_findings(newest, store, environ)


def _store(store: Path, settings: ServerSettings) -> Iterator[MigrationFinding]:
    if not store.is_dir():
        raise ConfigurationError(f"{store}: expected the folder of the model store")
    for path in sorted(store.iterdir()):
        if path.suffix == ".war" and not path.name.startswith("."):
            text = "workflows can't be registered; call its models one after the other"
            yield MigrationFinding(str(path), "workflow", "unsupported", text)
        elif is_archive(path):
            yield from archive_findings(path, settings)
