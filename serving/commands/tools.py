"""The `torchere` commands other than `serve`: their arguments and run functions.

Each `add_...` function imports the modules of its command, and is called for that command only.
"""
# ruff: noqa: PLC0415 - the docstring has the reason

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchere.archiver.arguments import described, explained
from torchere.serving import __version__
from torchere.serving.commands.serve_options import DEFAULT_FILE, add_serve_options

TORCHSERVE_VERSION = "0.12.0"  # the release whose behaviour is reproduced


def add_archive(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere archive` to `parser`."""
    from torchere.archiver.cli import run_model_archive
    from torchere.archiver.model_flags import EXAMPLES, add_archive_arguments
    from torchere.serving.commands.inputs import prepare_for, read_config

    text = (
        "Pack a model, with or without a handler, into a .mar archive; optionally compile or quantise "
        "it first."
    )
    explained(parser, text, EXAMPLES)
    add_archive_arguments(parser, models=True)
    run = partial(run_model_archive, prepare_for=prepare_for, check_config=read_config)
    parser.set_defaults(run=_as_served(run))


def add_new(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere new handler` to `parser`."""
    from torchere.serving.commands.new_handler import add_new_handler_arguments

    described(parser, "Begin something new.", "torchere new handler my_model")
    handler = parser.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "handler", help="write a handler, a test of it, a model-config.yaml and a Makefile that packs it"
    )
    text = (
        "Write a folder with a handler of your own, and all that it needs to be tested, packed and served:\n"
        "handler.py, model.py, test_handler.py, model-config.yaml, Makefile."
    )
    described(handler, text, "torchere new handler my_model && cd my_model && make test && make serve")
    add_new_handler_arguments(handler)


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere convert` to `parser`."""
    from torchere.archiver.cli import run_convert
    from torchere.archiver.commands import EXAMPLES, add_convert_arguments
    from torchere.serving.commands.inputs import prepare_for

    text = "Convert the model of an archive to another format; the other files stay as they are."
    explained(parser, text, EXAMPLES)
    add_convert_arguments(parser)
    parser.set_defaults(run=_as_served(partial(run_convert, prepare_for=prepare_for)))


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere compare` to `parser`."""
    from torchere.serving.commands.compare import add_compare_arguments, run_compare

    text = "Run the models of two archives on the same inputs; compare outputs, times, sizes and memory."
    described(parser, text, "torchere compare fp32.mar int8.mar --data photographs --picture int8.svg")
    add_compare_arguments(parser)
    parser.set_defaults(run=_as_served(run_compare))


def _as_served(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap a command that measures models, so that it uses the allocator settings of the server."""

    def settled(options: argparse.Namespace) -> int:
        from torchere.serving.process.allocator import keep_freed_memory

        keep_freed_memory(os.environ)
        return run(options)

    return settled


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere inspect` to `parser`."""
    from torchere.archiver.cli import add_inspect_arguments, run_inspect

    described(
        parser, "Show the contents of an archive, without loading the model.", "torchere inspect net.mar"
    )
    add_inspect_arguments(parser)
    parser.set_defaults(run=run_inspect)


def add_join(parser: argparse.ArgumentParser) -> None:
    """Set up `torchere join`."""
    from torchere.serving.commands.join import JOIN_EXAMPLE, add_join_arguments, run_join

    text = "Run the ranks of this machine for a model that a server on another machine leads."
    described(parser, text, JOIN_EXAMPLE)
    add_join_arguments(parser)
    parser.set_defaults(run=run_join)


def add_sign(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere sign` to `parser`."""
    from torchere.serving.commands.sign import SIGN_EXAMPLES, add_sign_arguments, run_sign

    text = "Sign an archive (OpenSSF Model Signing), and print the path of the signature."
    explained(parser, text, SIGN_EXAMPLES)
    add_sign_arguments(parser)
    parser.set_defaults(run=run_sign)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere verify` to `parser`."""
    from torchere.serving.commands.sign import VERIFY_EXAMPLES, add_verify_arguments, run_verify

    text = (
        "Verify the signature of an archive, as a server with require_signed=true does. Status 1: not valid."
    )
    explained(parser, text, VERIFY_EXAMPLES)
    add_verify_arguments(parser)
    parser.set_defaults(run=run_verify)


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere predict` to `parser`."""
    from torchere.serving.commands.predict import DESCRIPTION, add_predict_arguments, run_predict

    described(parser, DESCRIPTION, "torchere predict net --image cat.png")
    add_predict_arguments(parser)
    parser.set_defaults(run=run_predict)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere bench` to `parser`."""
    from torchere.serving.commands.bench import add_bench_arguments, run_bench

    text = "Load-test a model on a running server and print throughput, latencies and errors."
    described(parser, text, "torchere bench mlp --clients 32 --seconds 5 --file input.json")
    add_bench_arguments(parser)
    parser.set_defaults(run=run_bench)


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


def add_sagemaker(parser: argparse.ArgumentParser) -> None:
    """Set up `torchere sagemaker`."""
    from torchere.serving.commands.sagemaker import run_sagemaker

    described(
        parser,
        "Serve the model folders of a SageMaker container, as its variables ask for. See docs/sagemaker.md.",
        "torchere sagemaker",
    )
    parser.set_defaults(run=run_sagemaker)


def add_kserve(parser: argparse.ArgumentParser) -> None:
    """Set up `torchere kserve`."""
    from torchere.serving.commands.kserve import run_kserve

    described(
        parser,
        "Serve the folder that KServe's storage initializer filled: config/ and model-store/ of TorchServe,\n"
        "archives, or one bare model, which is packed first. See docs/kserve.md.",
        "torchere kserve --model-name=net --model-dir=/mnt/models",
    )
    parser.add_argument("--model-name", "--model_name", required=True, metavar="NAME", help="of a bare model")
    parser.add_argument(
        "--model-dir", "--model_dir", default="/mnt/models", metavar="DIR", help="default: /mnt/models"
    )
    add_serve_options(parser, "default: that of the archives in --model-dir")
    parser.set_defaults(run=run_kserve)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Set up `torchere version`."""
    described(parser, "Print the versions of torchere, PyTorch and Python.", "torchere version")
    parser.set_defaults(run=_version)


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
