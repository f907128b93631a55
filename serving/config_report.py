"""The answer of `torchere config check`: a properties file, line by line, with what each line does."""

from __future__ import annotations

from pathlib import Path

from torchere.serving.configuration import Configuration, Finding


def report(path: Path, configuration: Configuration) -> str:
    """The findings as text, in the order of the file, and how many errors and warnings there are."""
    lines = [str(path)]
    lines += [_line(finding) for finding in configuration.findings]
    errors, warnings = (len(configuration.of_level(level)) for level in ("error", "warning"))
    return "\n".join([*lines, f"{_counted(errors, 'error')}, {_counted(warnings, 'warning')}"])


def _line(finding: Finding) -> str:
    given = f"{finding.key}={finding.value}" if finding.value else finding.key
    prefix = "" if finding.level == "effect" else f"{finding.level}: "
    return f"  {finding.source}: {given}\n      {prefix}{finding.message}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
