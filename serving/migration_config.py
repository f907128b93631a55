"""What becomes of a configuration file, and of the snapshot that a start would restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchere.serving.configuration import Configuration, Finding, configure
from torchere.serving.migration_finding import MigrationFinding, Verdict
from torchere.serving.properties import read_properties
from torchere.serving.registry.allowed_urls import is_remote
from torchere.serving.registry.startup import startup_models
from torchere.serving.settings import ServerSettings

# Keys without effect whose absence clients or operators would notice; other keys without effect only tune.
MISSED_KEYS = frozenset(
    {
        "keystore",
        "plugins_path",
        "ts_header_key_sequence_id",
        "ts_header_key_sequence_start",
        "ts_header_key_sequence_end",
    }
)
# Keys that are not in the file, and whose default here is another than TorchServe's.
OTHER_DEFAULTS = {
    "allowed_urls": "TorchServe fetches archives from any URL unless told otherwise; here only from URLs "
    "that match allowed_urls, and from none without it",
    "metrics_mode": "TorchServe's default is log; here it is prometheus, so that the metrics API answers, "
    "and ts_metrics.log and model_metrics.log are not written",
}
OTHER_MEANING = {
    "install_py_dep_per_model": "packages go into a folder, or a virtual environment, of the version; a "
    "model whose requirements fail is not registered",
    "allowed_urls": "hosts of this machine or its network must be spelt out in the pattern that matches",
}


def config_findings(path: Path, environ: Mapping[str, str]) -> tuple[ServerSettings, list[MigrationFinding]]:
    """The settings a file comes to, and what each of its lines does.

    Raises:
        ConfigurationError: it can't be read, or is no properties file.
    """
    configuration = configure(read_properties(path), environ)
    found = [_line(str(path), finding) for finding in configuration.findings]
    given = {finding.key for finding in configuration.findings}
    found += [
        MigrationFinding(str(path), key, "differs", text)
        for key, text in OTHER_DEFAULTS.items()
        if key not in given
    ]
    return configuration.settings, found


def snapshot_findings(
    path: Path, store: Path | None, environ: Mapping[str, str]
) -> Sequence[MigrationFinding]:
    """What restoring this snapshot would do; `store` None takes the snapshot's own.

    Raises:
        ConfigurationError: it can't be read, or is no properties file.
    """
    configuration = configure(read_properties(path), environ)
    return [*_problems(path, configuration), *model_findings(path, configuration.settings, store)]


def _problems(path: Path, configuration: Configuration) -> Iterator[MigrationFinding]:
    for finding in (*configuration.of_level("error"), *configuration.of_level("warning")):
        yield _line(str(path), finding)


def model_findings(path: Path, settings: ServerSettings, store: Path | None) -> Iterator[MigrationFinding]:
    """Whether the archives that a start would load are there; `store` None takes the settings' own."""
    folder = store or settings.model_store
    never_served = tuple(model for model in settings.snapshot_models if not model.version)
    origin = "missing" if never_served else "load_models"  # there is none beside a snapshot
    for wanted in startup_models(replace(settings, snapshot_models=never_served), tuple):
        if folder is None or is_remote(wanted.url) or (folder / wanted.url.rstrip("/")).exists():
            continue
        text = f"is not in {folder}: the start goes on, as in TorchServe; /readyz says 503 until it is there"
        yield MigrationFinding(str(path), f"{origin} {wanted.url}", "differs", text)
    for model in settings.snapshot_models:
        if not model.version:
            continue
        item = f"{model.name} {model.version}"
        if folder is not None and not (folder / str(model.settings.get("path") or model.archive)).exists():
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
    if finding.level == "effect" or finding.key == "load_models":  # which a snapshot outdoes in both
        return "same"
    missed = finding.key in MISSED_KEYS and finding.message.startswith("has no effect")
    return "unsupported" if finding.level == "error" or missed else "differs"
