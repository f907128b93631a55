"""The commands `torchere` and `torchserve`. The only reader of the arguments and of the environment.

Modules that take long to import (torch, fastapi, grpc) are not needed to say how a command is used, so
nothing here imports them before a server really starts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchere.archiver.cli import (
    add_archive_arguments,
    add_inspect_arguments,
    run_convert,
    run_inspect,
    run_model_archive,
)
from torchere.archiver.convert import add_convert_arguments
from torchere.archiver.model_flags import EXAMPLES
from torchere.serving import __version__
from torchere.serving import predict as predict_verb
from torchere.serving.bench import add_bench_arguments, run_bench
from torchere.serving.compare import add_compare_arguments, run_compare
from torchere.serving.config_report import report
from torchere.serving.configuration import configure
from torchere.serving.errors import ServingError
from torchere.serving.properties import ConfigurationError, read_properties
from torchere.serving.serve_options import (
    DEFAULT_FILE,
    LOG_FORMAT_VARIABLE,
    LOG_FORMATS,
    LaunchRefused,
    Plan,
    add_serve_options,
    log_format,
    plan_from,
    serve_arguments,
)
from torchere.serving.telemetry.log_files import Log4jFormatter, add_log_files
from torchere.serving.telemetry.logging import LEVELS
from torchere.serving.telemetry.logging import configure as configure_logging

TORCHSERVE_VERSION = "0.12.0"  # the release whose behaviour is answered

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # has no public name

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `torchere`; the exit status is 0, 1 (refused or failed) or 2 (wrong usage, raised by argparse)."""
    options = _parser().parse_args(argv)
    return _guarded(options.run, options)


def torchserve_main(argv: Sequence[str] | None = None) -> int:
    """Run `torchserve`, with the flags, texts and exit statuses of TorchServe 0.12."""
    options = _torchserve_parser().parse_args(argv)
    if options.version:
        print(f"TorchServe Version is {TORCHSERVE_VERSION}")
        return 0
    return _guarded(_stop if options.stop else _start, options)


def _guarded(action: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The status of the action; its refusals as a line and status 1."""
    try:
        return action(options)
    except LaunchRefused as refusal:
        print(refusal)  # standard output, as TorchServe's launcher does
    except ConfigurationError as err:
        print(err, file=sys.stderr)
    except ServingError as err:
        print(" ".join(filter(None, (err.message, err.detail))), file=sys.stderr)
    return 1


def _start(options: argparse.Namespace) -> int:
    from torchere.serving import launcher  # noqa: PLC0415 - psutil is not needed for --help

    pid_file = launcher.pid_file(os.environ)
    if not launcher.may_start(pid_file):
        return 1
    plan_from(options, os.environ)  # the server does it again; here a mistake still has its exit status
    options.log_files = True  # what collects TorchServe's logs looks for its files
    command = launcher.server_command(serve_arguments(options))
    if options.foreground:
        launcher.become(command, pid_file)
    else:
        launcher.start_in_background(command, pid_file)
    return 0


def _stop(options: argparse.Namespace) -> int:
    from torchere.serving import launcher  # noqa: PLC0415 - psutil is not needed for --help

    wait_s = launcher.STOP_WAIT_S if options.foreground else 0.0
    return launcher.stop(launcher.pid_file(os.environ), wait_s)


def _serve(options: argparse.Namespace) -> int:
    from torchere.serving import vitals  # noqa: PLC0415 - asyncio is not needed for --help

    journal = vitals.open_journal(options.supervised) if options.supervised else None
    plan = plan_from(options, os.environ, journal.models if journal is not None else "")
    wanted = options.log_format or log_format(os.environ)
    as_json = not sys.stdout.isatty() if wanted == "auto" else wanted == "json"
    if plan.settings.supervise and journal is None:
        command = vitals.supervised_command([sys.executable, *sys.orig_argv[1:]], as_json)
        os.execv(command[0], command)
    lines = Log4jFormatter() if wanted == "torchserve" else None
    configure_logging(options.log_level, as_json, sys.stdout, lines=lines)
    if plan.settings.log_files:
        add_log_files(plan.log_directory)
    _log_account(plan, options)
    from torchere.serving.preparation import preparation  # noqa: PLC0415 - not needed for --help

    with preparation(plan.settings) as prepared:
        from torchere.serving.server import serve  # noqa: PLC0415 - imports torch, fastapi and grpc

        if journal is None:
            return serve(plan.settings, prepared=prepared)
        return serve(replace(plan.settings, isolated=journal.history.isolated), journal, prepared)


def _log_account(plan: Plan, options: argparse.Namespace) -> None:
    origin = plan.config_file or "no configuration file"
    logger.info("Config file: %s", origin)
    for finding in plan.configuration.of_level("warning"):
        logger.warning("%s, %s", origin, finding)
    if plan.settings.snapshot_models:
        count = len(plan.settings.snapshot_models)
        origin = "the supervisor" if options.supervised else origin
        logger.warning("%s: restoring its snapshot of %d models; start without it by --ncs", origin, count)
    if options.log_config:
        logger.warning("--log-config has no effect: torchere serve has --log-level and --log-format")


def _check_config(options: argparse.Namespace) -> int:
    configuration = configure(read_properties(options.file), os.environ)
    print(report(options.file, configuration))
    failing = configuration.of_level("error") + (configuration.of_level("warning") if options.strict else ())
    return 1 if failing else 0


def _check_migration(options: argparse.Namespace) -> int:
    from torchere.serving.migration import check_migration  # noqa: PLC0415 - imports the handlers

    report = check_migration(options.ts_config, options.model_store, options.snapshots, os.environ)
    print(report.as_json() if options.json else report.as_text())
    return 1 if report.count("unsupported") else 0


def _version(_options: argparse.Namespace) -> int:
    print(f"torchere {__version__}")
    print(f"answers as TorchServe {TORCHSERVE_VERSION}")
    print(f"PyTorch {importlib.metadata.version('torch')}, Python {platform.python_version()}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _described(
        argparse.ArgumentParser(prog="torchere"),
        "Pack PyTorch models into archives and serve them over REST and gRPC.",
        "torchere serve --model-store store --models net=net.mar",
    )
    parser.add_argument("--version", action="version", version=f"torchere {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_archiver(commands)
    _add_predict(commands)
    _add_bench(commands)
    _add_config(commands)
    _add_migrate(commands)
    version = commands.add_parser("version", help="print versions")
    _described(version, "Print the versions of torchere, PyTorch and Python.", "torchere version")
    version.set_defaults(run=_version)
    return parser


def _add_serve(commands: _Commands) -> None:
    serve = commands.add_parser("serve", help="serve models in the foreground")
    example = "torchere serve --model-store store --models all --ts-config config.properties"
    _described(serve, "Serve models in the foreground, until SIGTERM or Ctrl+C.", example)
    add_serve_options(serve)
    serve.add_argument("--log-level", default="INFO", type=str.upper, choices=LEVELS, help="default: INFO")
    serve.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        help=f"default: {LOG_FORMAT_VARIABLE} of the environment, or auto: text on a terminal, JSON lines "
        "otherwise; torchserve: the lines of its console, metrics among them with metrics_mode=log",
    )
    serve.add_argument("--supervised", help=argparse.SUPPRESS)  # given by the supervisor
    serve.add_argument("--process-name", help=argparse.SUPPRESS)  # only there to be found in the arguments
    serve.set_defaults(run=_serve)


def _add_archiver(commands: _Commands) -> None:
    archive = commands.add_parser("archive", help="pack a model into a .mar archive")
    text = "Pack a model, with or without a handler, into a .mar archive; compile or quantise it first."
    _described(archive, text, "")
    archive.epilog = EXAMPLES
    add_archive_arguments(archive, models=True)
    archive.set_defaults(run=run_model_archive)
    convert = commands.add_parser("convert", help="bring an archive's model into another format")
    text = "Bring the model of an archive into another format; all else in it stays."
    _described(convert, text, "torchere convert old.mar --to export --dynamic-batch 1:64 -o new.mar")
    add_convert_arguments(convert)
    convert.set_defaults(run=run_convert)
    compare = commands.add_parser("compare", help="compare the models of two archives")
    text = "Run the models of two archives on the same inputs: answers, times, sizes, memory."
    _described(compare, text, "torchere compare fp32.mar int8.mar --data photographs --picture int8.svg")
    add_compare_arguments(compare)
    compare.set_defaults(run=run_compare)
    inspect = commands.add_parser("inspect", help="show what is in an archive")
    _described(inspect, "Show what is in an archive, without loading the model.", "torchere inspect net.mar")
    add_inspect_arguments(inspect)
    inspect.set_defaults(run=run_inspect)


def _add_predict(commands: _Commands) -> None:
    predict = commands.add_parser("predict", help="ask a model of a running server")
    _described(predict, predict_verb.DESCRIPTION, "torchere predict net --image cat.png")
    predict_verb.add_predict_arguments(predict)
    predict.set_defaults(run=predict_verb.run_predict)


def _add_bench(commands: _Commands) -> None:
    bench = commands.add_parser("bench", help="measure a model of a running server")
    text = "Put load on a model of a running server, and print throughput, latencies and errors."
    _described(bench, text, "torchere bench mlp --clients 32 --seconds 5 --body input.json")
    add_bench_arguments(bench)
    bench.set_defaults(run=run_bench)


def _add_config(commands: _Commands) -> None:
    config = commands.add_parser("config", help="explain a configuration file")
    _described(config, "Work with configuration files.", "torchere config check config.properties")
    check = config.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "check", help="say what each line of a properties file does"
    )
    text = "Say what each line of a properties file does, and what is wrong with it. Status 1: errors."
    _described(check, text, "torchere config check --strict config.properties")
    check.add_argument("file", nargs="?", type=Path, default=DEFAULT_FILE, help=f"default: {DEFAULT_FILE}")
    check.add_argument("--strict", action="store_true", help="count warnings as errors")
    check.set_defaults(run=_check_config)


def _add_migrate(commands: _Commands) -> None:
    migrate = commands.add_parser("migrate", help="say what becomes of a TorchServe deployment")
    _described(migrate, "Come from TorchServe.", "torchere migrate check --ts-config config.properties")
    check = migrate.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "check", help="say what stays the same, what differs and what is not supported"
    )
    text = (
        "Read configuration, archives and snapshots of a TorchServe deployment, and say what stays the\n"
        "same, what differs and what is not supported. Nothing in them is run.\n"
        "Status 1: something is not supported, or a file can't be read."
    )
    _described(check, text, "torchere migrate check --ts-config config.properties --model-store store")
    add = check.add_argument
    add("--ts-config", type=Path, metavar="FILE", help="its config.properties")
    add("--model-store", type=Path, metavar="DIR", help="its archives (default: the file's model_store)")
    add("--snapshots", type=Path, metavar="DIR", help="its snapshots, usually logs/config")
    add("--json", action="store_true", help="print the findings as JSON")
    check.set_defaults(run=_check_migration)


def _torchserve_parser() -> argparse.ArgumentParser:
    parser = _described(
        argparse.ArgumentParser(prog="torchserve"),
        "TorchServe's command line, answered by torchere. Without --stop or --version it starts the server.",
        "torchserve --start --ncs --model-store store --models net=net.mar",
    )
    verb = parser.add_mutually_exclusive_group()
    verb.add_argument("-v", "--version", action="store_true", help="print the version answered for")
    verb.add_argument("--start", action="store_true", help="start the server, in the background")
    verb.add_argument("--stop", action="store_true", help="stop the server")
    parser.add_argument(
        "--foreground", action="store_true", help="start in the foreground; with --stop, wait for the end"
    )
    add_serve_options(parser)
    return parser


def _described(parser: argparse.ArgumentParser, description: str, example: str) -> argparse.ArgumentParser:
    parser.description, parser.epilog = description, f"example: {example}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # an example on one line can be copied
    return parser
