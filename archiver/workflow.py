"""Writes `.war` files: the specification of a workflow, its handler and further files, packed as one zip.

The layout is TorchServe's, with all files at the root and a manifest in `WAR-INF`. As with models, the same
files give the same bytes.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchere.archiver.atomic import staged
from torchere.archiver.container.entries import first_clash, problem_with
from torchere.archiver.container.sinks import open_sink
from torchere.archiver.errors import PackingError
from torchere.archiver.manifest import EPOCH_S, created_on
from torchere.archiver.request import MODEL_NAME_PATTERN, refuse_two_dots

MANIFEST_NAME = "WAR-INF/MANIFEST.json"
FORMAT_VERSION = "0.2.15"  # of TorchServe's archiver of workflows, which defines the format


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRequest:
    """One workflow archive to write."""

    workflow_name: str
    spec_file: Path
    handler: Path | None = None
    extra_files: Sequence[Path] = ()
    export_path: Path = Path(".")
    force: bool = False
    epoch_s: int = EPOCH_S

    @property
    def target(self) -> Path:
        """The file to write."""
        return self.export_path / f"{self.workflow_name}.war"


def write_workflow(request: WorkflowRequest) -> Path:
    """Write the archive and return its path; a failed call leaves nothing behind.

    Raises:
        PackingError: a name or the output path is wrong; nothing was written.
        OSError: a file can't be read or written (`FileNotFoundError` for a missing input).
    """
    check(request)
    target = request.target
    files = _files(request)
    with staged(target) as work, open_sink("default", work, request.workflow_name) as sink:
        for name in sorted(files):
            with open(files[name], "rb") as file:
                sink.add(name, os.fstat(file.fileno()).st_size, file, False)
        manifest = _manifest(request).encode()
        sink.add(MANIFEST_NAME, len(manifest), io.BytesIO(manifest), False)
    return target


def check(request: WorkflowRequest) -> None:
    """Raise PackingError when the name, the output path or a file that is there forbids the archive."""
    pattern = MODEL_NAME_PATTERN.pattern
    if not MODEL_NAME_PATTERN.fullmatch(request.workflow_name):
        raise PackingError(
            "Workflow name contains special characters.\n"
            f"The allowed regular expression filter for workflow name is: ^{pattern}$"
        )
    refuse_two_dots(request.target.name)
    if not request.export_path.is_dir():
        raise PackingError(
            f"Given export-path {request.export_path} is not a directory. "
            "Point to a valid export-path directory."
        )
    if request.target.exists() and not request.force:
        raise PackingError(
            f"{request.target} already exists.\n"
            "Please specify --force/-f option to overwrite the workflow archive output file.\n"
            "See -h/--help for more details."
        )


def _files(request: WorkflowRequest) -> dict[str, Path]:
    """Return the files to pack by their names in the archive."""
    given = [request.spec_file, *([request.handler] if request.handler else []), *request.extra_files]
    files: dict[str, Path] = {}
    for path in given:
        if not path.is_file():
            raise FileNotFoundError(f"File does not exist: {path}")
        if problem := problem_with(path.name):
            raise PackingError(f"{path} can't be packed: {problem}; rename it")
        if files.setdefault(path.name, path) != path:
            raise PackingError(f"{files[path.name]} and {path} would both be {path.name!r}; rename one")
    if clash := first_clash(sorted(files)):
        raise PackingError(f"{clash[0]} and {clash[1]} would be one file on some systems; rename one")
    return files


def _manifest(request: WorkflowRequest) -> str:
    entry = {"workflowName": request.workflow_name, "specFile": request.spec_file.name}
    if request.handler:
        entry["handler"] = request.handler.name
    whole = {
        "createdOn": created_on(request.epoch_s),
        "workflow": entry,
        "archiverVersion": FORMAT_VERSION,
    }
    return json.dumps(whole, indent=2)
