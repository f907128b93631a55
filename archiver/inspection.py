"""Reports the contents of an archive and the code that it may execute; runs nothing in it."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchere.archiver.container.entries import MANIFEST_NAME, Chunks, Entry
from torchere.archiver.errors import ArchiveError, first_names, one_line
from torchere.archiver.manifest import EPOCH_S, created_on
from torchere.archiver.reader import Archive, open_archive
from torchere.archiver.request import BUILT_IN_HANDLERS, handler_files
from torchere.archiver.scan.weights import (
    HEAD_BYTES,
    SHARED_LIBRARY,
    SUFFIXES,
    Weights,
    bytes_to_see,
    classify,
)
from torchere.archiver.workflow import MANIFEST_NAME as WORKFLOW_MANIFEST

_NO_TIME = "  The time is fixed: equal inputs give equal bytes. SOURCE_DATE_EPOCH sets another."
_MAX_ALIGNMENT = 4096  # bytes: a memory page; a larger alignment makes no difference


@dataclass(frozen=True, slots=True)
class Report:
    """One inspected archive.

    `digests_verified` is None when the manifest has no digests, and False when `archive.changed` has names.
    """

    archive: Archive
    manifest: dict[str, Any] | None  # of a model or of a workflow
    digests_verified: bool | None
    config_text: str | None
    weights: tuple[Weights, ...]
    code: tuple[str, ...]  # sentences about code that may run when the archive is served

    def as_json(self) -> str:
        """Return the report as JSON, for programs."""
        report: dict[str, Any] = {
            "archive": str(self.archive.path),
            "kind": self.archive.kind,
            "manifest": self.manifest,
            "entries": [_entry_members(entry) for entry in self.archive.entries],
            "digests": {None: "not present", True: "verified", False: "changed"}[self.digests_verified],
            "changed": sorted(self.archive.changed),
            "config": self.config_text,
            "weights": [
                {
                    "name": found.name,
                    "kind": found.kind,
                    "pickled": found.pickled,
                    "foreign": list(found.foreign),
                }
                for found in self.weights
            ],
            "executes": list(self.code),
        }
        return json.dumps(report, indent=2)

    def as_text(self) -> str:
        """Return the report as text; strings from the archive are escaped: they could control a terminal."""
        manifest = "none" if self.manifest is None else json.dumps(self.manifest, indent=2)
        others = f"changed after packing: {first_names(sorted(self.archive.changed))}"
        verified = {None: "not present", True: "verified (sha256)", False: others}[self.digests_verified]
        parts = [
            f"{self.archive.path}: {self.archive.kind}",
            "",
            "Manifest",
            _indented(manifest),
            *([_NO_TIME] if (self.manifest or {}).get("createdOn") == created_on(EPOCH_S) else []),
            "",
            "Entries",
        ]
        parts += [_entry_line(entry) for entry in self.archive.entries]
        parts += ["", f"Digests: {verified}", "", "May execute"]
        parts += [f"  {one_line(sentence)}" for sentence in self.code]
        if self.config_text is not None:
            name = one_line(str(self.archive.manifest.config_file))
            parts += ["", f"Configuration ({name})", _indented(self.config_text.expandtabs())]
        return "\n".join(parts)


def inspect_archive(path: str | Path) -> Report:
    """Read the whole archive once, verify it and return a report of its contents.

    Raises:
        ArchiveError: the archive can't be used; the text says why.
    """
    archive = open_archive(path)
    manifest = _manifest(archive)
    weights = []
    for entry, chunks in archive.chunks():
        found = _look_at(archive, entry, chunks)
        if found is not None and not _is_handler(archive, found):
            weights.append(found)
    config = archive.manifest.config_file
    has_config = config is not None and any(entry.name == config for entry in archive.entries)
    return Report(
        archive=archive,
        manifest=manifest,
        digests_verified=None if archive.manifest.digests is None else not archive.changed,
        config_text=archive.read_text(config) if config and has_config else None,
        weights=tuple(weights),
        code=tuple(_code(archive, manifest or {}, weights)),
    )


def _manifest(archive: Archive) -> dict[str, Any] | None:
    if archive.has_manifest:
        found: dict[str, Any] = json.loads(archive.manifest.dump())
        return found
    if all(entry.name != WORKFLOW_MANIFEST for entry in archive.entries):
        return None
    try:
        found = json.loads(archive.read_text(WORKFLOW_MANIFEST))
        if not isinstance(found, dict) or not isinstance(found.get("workflow"), dict):
            raise ValueError("expected an object with the object 'workflow'")
    except (ValueError, RecursionError) as error:
        reason = f"the manifest of the workflow can't be used: {error}"
        raise ArchiveError(archive.path, reason, "pack the archive again", entry=WORKFLOW_MANIFEST) from error
    return found


def _look_at(archive: Archive, entry: Entry, chunks: Chunks) -> Weights | None:
    """Read all chunks of the entry, which verifies them, and classify it if it is a weights file."""
    head = b""
    is_weights = (
        os.path.splitext(entry.name)[1].lower() in SUFFIXES or entry.name == archive.manifest.serialized_file
    )
    with tempfile.TemporaryFile() as copy:
        for chunk in chunks:
            head += chunk[: HEAD_BYTES - len(head)]  # the archive decides how short a chunk is
            if is_weights and copy.tell() < bytes_to_see(head):
                copy.write(chunk)
        return classify(entry.name, copy) if is_weights else None


def _is_handler(archive: Archive, found: Weights) -> bool:
    """Return whether a file is the library of a handler in C++, for which the report has another sentence."""
    manifest = archive.manifest
    is_library = manifest.runtime == "LSP" and found.kind == SHARED_LIBRARY
    return is_library and found.name in handler_files(manifest.handler, manifest.runtime)


def _code(archive: Archive, about: dict[str, Any], weights: list[Weights]) -> list[str]:
    names = {entry.name for entry in archive.entries}
    manifest = archive.manifest
    workflow = {} if archive.has_manifest else about.get("workflow", {})
    found = [_handler_sentence(manifest.handler, manifest.runtime, names)]
    if workflow:
        found = [f"models: those that {workflow.get('specFile')} names, from archives of their own"]
    if functions := workflow.get("handler"):
        found.insert(0, _file_sentence("functions", str(functions), names, "Python code"))
    if manifest.model_file:
        found.append(_file_sentence("model file", manifest.model_file, names, "Python code"))
    if manifest.requirements_file:
        what = "packages that are installed if the server is told to (install_py_dep_per_model)"
        found.append(_file_sentence("requirements", manifest.requirements_file, names, what))
    named = {str(functions), manifest.model_file, *handler_files(manifest.handler, manifest.runtime)}
    others = sorted(name for name in names - named if name.endswith((".py", ".pyc")))
    if others:
        found.append(f"other Python files that these may import: {', '.join(others)}")
    for item in weights:
        pickled = "pickled" if item.pickled else "no pickle"
        found.append(f"weights: {item.name} ({item.kind}, {pickled}) {item.risk}")
    return found


def _handler_sentence(handler: str | None, runtime: str | None, names: set[str]) -> str:
    if handler is None:
        return "handler: none named; the server's default handler"
    for file in handler_files(handler, runtime):
        if file in names:
            return f"handler: {handler} ({'machine' if runtime == 'LSP' else 'Python'} code in {file})"
    if handler in BUILT_IN_HANDLERS:
        return f"handler: {handler} (built into the server)"
    return f"handler: {handler} (no such file in the archive: one of the server's own, or missing)"


def _file_sentence(role: str, name: str, names: set[str], what: str) -> str:
    return f"{role}: {name} ({what if name in names else 'missing from the archive'})"


def _alignment(entry: Entry) -> int | None:
    """Return the largest power of two, at most a page, that divides the data's offset; None: no offset."""
    if entry.offset is None:
        return None
    return min(entry.offset & -entry.offset or _MAX_ALIGNMENT, _MAX_ALIGNMENT)


def _entry_members(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "size": entry.size,
        "stored_size": entry.stored_size,
        "method": entry.method,
        "offset": entry.offset,
        "alignment": _alignment(entry),
    }


def _entry_line(entry: Entry) -> str:
    alignment = _alignment(entry)
    aligned = f"aligned to {alignment}" if entry.method == "stored" else ""
    note = "  (manifest)" if entry.name in (MANIFEST_NAME, WORKFLOW_MANIFEST) else ""
    sizes = f"{entry.size:>13,} {entry.stored_size:>13,}"
    return f"  {sizes} {entry.method:<9}{aligned:<16} {one_line(entry.name)}{note}"


def _indented(text: str) -> str:
    return "\n".join(f"  {one_line(line)}" for line in text.splitlines())
