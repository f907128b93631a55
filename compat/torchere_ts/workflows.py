"""The module `workflow_archiver`: packs workflows from Python with torchere's archiver."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from torchere.archiver.errors import PackingError
from torchere.archiver.workflow import WorkflowRequest, check
from torchere.serving.commands.workflow_archiver import pack, workflow_parser
from torchere.serving.errors import InvalidWorkflow

__all__ = [
    "ArgParser",
    "WorkflowArchiverError",
    "WorkflowExportUtils",
    "__version__",
    "generate_workflow_archive",
    "package_workflow",
]
__version__ = "0.2.15"  # version of TorchServe's archiver that has this interface

WorkflowArchiverError = PackingError


class ArgParser:
    """The parser of `torch-workflow-archiver`."""

    @staticmethod
    def workflow_archiver_args_parser() -> argparse.ArgumentParser:
        """Return the parser."""
        return workflow_parser()


class WorkflowExportUtils:
    """The steps of packing that scripts call one by one."""

    @staticmethod
    def validate_inputs(workflow_name: str, export_file_path: str) -> None:
        """Raise WorkflowArchiverError for a name that no workflow may have, or a path of no directory."""
        path = Path(export_file_path)
        check(WorkflowRequest(workflow_name=workflow_name, spec_file=Path(), export_path=path, force=True))

    @staticmethod
    def generate_manifest_json(args: argparse.Namespace) -> str:
        """Return the manifest of a workflow as JSON; `package_workflow` makes its manifest itself."""
        names = {"workflowName": args.workflow_name, "specFile": os.path.basename(args.spec_file)}
        if args.handler:
            names["handler"] = os.path.basename(args.handler)
        return json.dumps({"workflow": names, "archiverVersion": __version__}, indent=2)


def package_workflow(args: argparse.Namespace, manifest: Any = None) -> None:
    """Write the workflow archive of these arguments; its manifest is made from them.

    Raises:
        SystemExit: the workflow can't be packed; TorchServe's archiver ends the process, too.
    """
    try:
        pack(args)
    except InvalidWorkflow as error:
        sys.exit(f"torch-workflow-archiver: {error.message} {error.detail}".rstrip())
    except (PackingError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"torch-workflow-archiver: {error}")


def generate_workflow_archive() -> None:
    """Write the workflow archive that the command line describes."""
    package_workflow(workflow_parser().parse_args())
