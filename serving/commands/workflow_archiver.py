"""`torch-workflow-archiver`: checks a workflow and packs it into a `.war` file."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchere.archiver.arguments import Parser
from torchere.archiver.cli import source_epoch, tidy_when_ended
from torchere.archiver.errors import PackingError
from torchere.archiver.workflow import WorkflowRequest, write_workflow
from torchere.serving.config.workflow_spec import check_functions, read_workflow_spec
from torchere.serving.errors import InvalidWorkflow

logger = logging.getLogger(__name__)


def workflow_parser() -> Parser:
    """Return the parser of `torch-workflow-archiver`."""
    parser = Parser(
        prog="torch-workflow-archiver",
        description="Pack a graph of models and functions into a workflow archive for serving.",
    )
    add = parser.add_argument
    add("--workflow-name", required=True, metavar="NAME", help="name of the workflow and of its file")
    add("--spec-file", required=True, metavar="FILE", type=Path, help="YAML file with 'models' and 'dag'")
    add("--handler", metavar="FILE", type=Path, help="Python file with the functions of the graph")
    add("--extra-files", metavar="LIST", default="", help="further files to pack, comma-separated")
    add(
        "--export-path",
        metavar="DIR",
        type=Path,
        default=Path("."),
        help="where to put the file (default: current directory)",
    )
    add("-f", "--force", action="store_true", help="overwrite an existing file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Pack a workflow; return 0, 1 when it can't be packed, 2 for wrong arguments, or 130 on Ctrl+C."""
    logging.basicConfig(format="%(levelname)s - %(message)s")
    parser = workflow_parser()
    options = parser.parse_args(argv)
    try:
        with tidy_when_ended():
            pack(options)
    except InvalidWorkflow as error:
        print(f"{parser.prog}: {error.full_text}", file=sys.stderr)
        return 1
    except (PackingError, OSError, UnicodeDecodeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def pack(options: argparse.Namespace) -> None:
    """Check the workflow of parsed arguments, and that its handler has every function of the graph; pack it.

    Raises:
        InvalidWorkflow: the specification or the handler is invalid.
        PackingError: a name or the output place is wrong.
        OSError, UnicodeDecodeError: a file can't be read or written.
    """
    request = WorkflowRequest(
        workflow_name=options.workflow_name,
        spec_file=Path(options.spec_file),
        handler=Path(options.handler) if options.handler else None,
        extra_files=[Path(each.strip()) for each in (options.extra_files or "").split(",") if each.strip()],
        export_path=Path(options.export_path or "."),
        force=options.force,
        epoch_s=source_epoch(),
    )
    spec = read_workflow_spec(request.spec_file.read_text("utf-8"))
    handler = request.handler
    if spec.ignored:
        logger.warning("%s: unknown settings are ignored: %s", request.spec_file, ", ".join(spec.ignored))
    source = handler.read_text("utf-8") if handler is not None else ""
    check_functions(spec, handler.name if handler is not None else None, source)
    write_workflow(request)
