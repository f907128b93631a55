"""The commands of `torchere` that only call other modules, which are slow to import.

A function imports those that it needs: the arguments of `config` and `migrate` need none of the server.
"""
# ruff: noqa: PLC0415 - the docstring has the reason

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from torchere.archiver.arguments import described, explained
from torchere.serving import __version__
from torchere.serving.commands.serve_options import DEFAULT_FILE

TORCHSERVE_VERSION = "0.12.0"  # the release whose behaviour is reproduced


def add_archive(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere archive` to `parser`."""
    from torchere.archiver.model_flags import EXAMPLES, add_archive_arguments

    text = (
        "Pack a model, with or without a handler, into a .mar archive; optionally compile or quantise "
        "it first."
    )
    explained(parser, text, EXAMPLES)
    add_archive_arguments(parser, models=True)
    parser.set_defaults(run=_archive)


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere convert` to `parser`."""
    from torchere.archiver.commands import EXAMPLES, add_convert_arguments

    text = "Convert the model of an archive to another format; the other files stay as they are."
    explained(parser, text, EXAMPLES)
    add_convert_arguments(parser)
    parser.set_defaults(run=_convert)


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere inspect` to `parser`."""
    from torchere.archiver.cli import add_inspect_arguments, run_inspect

    described(
        parser, "Show the contents of an archive, without loading the model.", "torchere inspect net.mar"
    )
    add_inspect_arguments(parser)
    parser.set_defaults(run=run_inspect)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere config check` to `parser`."""
    described(parser, "Work with configuration files.", "torchere config check config.properties")
    check = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "check", help="explain each line of a properties file"
    )
    text = "Explain each line of a properties file, and report errors in it. Status 1: errors."
    described(check, text, "torchere config check --strict config.properties")
    check.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE, help=f"default: {DEFAULT_FILE}")
    check.add_argument("--strict", action="store_true", help="count warnings as errors")
    check.set_defaults(run=_check_config)


def add_migrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere migrate check` to `parser`."""
    described(parser, "Come from TorchServe.", "torchere migrate check --ts-config config.properties")
    check = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "check", help="report what stays the same, differs, or is not supported"
    )
    text = (
        "Read configuration, archives and snapshots of a TorchServe deployment, and report what stays the\n"
        "same, differs, or is not supported. Nothing in them is run.\n"
        "Status 1: something is not supported, or a file can't be read."
    )
    described(check, text, "torchere migrate check --ts-config config.properties --model-store store")
    add = check.add_argument
    add("--ts-config", type=Path, metavar="FILE", help="its config.properties")
    add("--model-store", type=Path, metavar="DIR", help="its archives (default: the file's model_store)")
    text = "its workflow archives (default: the file's workflow_store, else the model store)"
    add("--workflow-store", type=Path, metavar="DIR", help=text)
    add("--snapshots", type=Path, metavar="DIR", help="its snapshots, usually logs/config")
    add("--json", action="store_true", help="print the findings as JSON")
    check.set_defaults(run=_check_migration)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Set up `torchere version`."""
    described(parser, "Print the versions of torchere, PyTorch and Python.", "torchere version")
    parser.set_defaults(run=_version)


def _archive(options: argparse.Namespace) -> int:
    from torchere.archiver.cli import run_model_archive
    from torchere.serving.commands.inputs import prepare_for, read_config
    from torchere.serving.process.allocator import keep_freed_memory

    keep_freed_memory(os.environ)  # so that measurements are as in the server
    return run_model_archive(options, prepare_for, check_config=read_config)


def _convert(options: argparse.Namespace) -> int:
    from torchere.archiver.cli import run_convert
    from torchere.serving.commands.inputs import prepare_for
    from torchere.serving.process.allocator import keep_freed_memory

    keep_freed_memory(os.environ)  # as for `archive`
    return run_convert(options, prepare_for)


def _check_config(options: argparse.Namespace) -> int:
    from torchere.serving.commands.settings_trial import tried
    from torchere.serving.config.properties import read_properties
    from torchere.serving.config.resolve import configure, report

    configuration = tried(configure(read_properties(options.file), os.environ))
    print(report(options.file, configuration))
    failing = configuration.of_level("error") + (configuration.of_level("warning") if options.strict else ())
    return 1 if failing else 0


def _check_migration(options: argparse.Namespace) -> int:
    from torchere.serving.commands.migrate import check_migration

    report = check_migration(
        options.ts_config, options.model_store, options.snapshots, os.environ, options.workflow_store
    )
    print(report.as_json() if options.json else report.as_text())
    return 1 if report.count("unsupported") else 0


def _version(_options: argparse.Namespace) -> int:
    import importlib.metadata  # slow to import, and of this command only

    print(f"torchere {__version__}")
    print(f"answers as TorchServe {TORCHSERVE_VERSION}")
    print(f"PyTorch {importlib.metadata.version('torch')}, Python {platform.python_version()}")
    return 0
