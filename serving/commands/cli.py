"""Entry points of the commands `torchere` and `torchserve`; read the arguments and the environment.

A command imports its modules only when it is run, because every import slows down `--help` and the start of a
server. A command's module also defines its arguments.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from torchere.archiver.arguments import Parser, described
from torchere.archiver.errors import plainly
from torchere.serving import __version__
from torchere.serving.commands.serve_options import (
    LOG_FORMAT_VARIABLE,
    OLD_DEFAULTS,
    LaunchRefused,
    add_serve_options,
    plan_from,
    refuse_windows,
    serve_arguments,
)
from torchere.serving.commands.tools import TORCHSERVE_VERSION
from torchere.serving.config.properties import ConfigurationError
from torchere.serving.errors import ServingError

# Name, help line, and module, whose `add_NAME` adds arguments, texts and the `run` function to the parser.
# A `run` may raise LaunchRefused, ConfigurationError or ServingError.
_COMMANDS = (
    ("serve", "serve models in the foreground", "serve"),
    ("join", "run ranks of a model that a server on another machine leads", "join"),
    ("new", "write the files of a new handler", "new_handler"),
    ("archive", "pack a model into a .mar archive", "tools"),
    ("convert", "convert an archive's model to another format", "tools"),
    ("compare", "compare the models of two archives", "compare"),
    ("inspect", "show the contents of an archive", "tools"),
    ("sign", "sign an archive", "sign"),
    ("verify", "verify who signed an archive", "sign"),
    ("predict", "send one request to a model on a running server", "predict"),
    ("bench", "load-test a model on a running server", "bench"),
    ("config", "explain a configuration file", "tools"),
    ("migrate", "check whether a TorchServe deployment can move to torchere", "tools"),
    ("sagemaker", "serve the model folders of a SageMaker container", "sagemaker"),
    ("kserve", "serve the folder that KServe put a model into", "kserve"),
    ("version", "print the versions of torchere, PyTorch and Python", "tools"),
)


_ENDS = "end torchere serve by Ctrl+C or SIGTERM; torchserve --stop ends what torchserve --start began"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}  # of a file to which standard output is sent
_HINTS = {"start": "torchere serve starts a server", "stop": _ENDS, "--stop": _ENDS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `torchere`; return the exit status: 0, or 1 if the command was rejected or failed.

    argparse exits with 2 for wrong usage; Ctrl+C returns 130, as in shells. Some commands have other codes.
    """
    arguments = sys.argv[1:] if argv is None else argv

    def command() -> int:
        options = _parser(arguments).parse_args(arguments)
        return _guarded(options.run, options)

    return _to_the_end(command)


def torchserve_main(argv: Sequence[str] | None = None) -> int:
    """Run `torchserve`, with the flags, texts and exit statuses of TorchServe 0.12."""

    def command() -> int:
        options = torchserve_parser().parse_args(argv)
        if options.version:
            print(f"TorchServe Version is {TORCHSERVE_VERSION}")
            return 0
        return _guarded(_start_or_stop, options)

    return _to_the_end(command)


def _to_the_end(command: Callable[[], int]) -> int:
    """Run a command and return its status.

    It is 130 on Ctrl+C, and 1 when standard output is closed (`| head`) or its disk is full.
    """
    open_standard_streams()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # flush here, so that an error is handled; argparse raises SystemExit
    except BrokenPipeError:
        drop_standard_output()
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        drop_standard_output()
        print(f"The command can't go on: {plainly(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _guarded(action: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run the action and return its status; print a known error as one line and return 1."""
    try:
        return action(options)
    except LaunchRefused as refusal:
        print(refusal)  # to standard output, as TorchServe's launcher does
    except ConfigurationError as err:
        print(err, file=sys.stderr)
    except ServingError as err:
        print(err.full_text, file=sys.stderr)
    return 1


def _start_or_stop(options: argparse.Namespace) -> int:
    refuse_windows()
    return _stop(options) if options.stop else _start(options)


def _start(options: argparse.Namespace) -> int:
    from torchere.serving.commands import torchserve as launcher  # noqa: PLC0415 - psutil is not needed for --help

    pid_file = launcher.pid_file(os.environ)
    with launcher.starts_in_turn(pid_file):
        if not launcher.may_start(pid_file):
            return 1
        options.old_defaults = True
        plan_from(options, os.environ)  # the server repeats this; only here an error sets the exit status
        options.log_files = True  # log collectors made for TorchServe read its log files
        lines = [] if os.environ.get(LOG_FORMAT_VARIABLE) else ["--log-format=torchserve"]
        command = launcher.server_command([OLD_DEFAULTS, *lines, *serve_arguments(options)])
        if options.foreground:
            launcher.become(command, pid_file)
        else:
            launcher.start_in_background(command, pid_file)
    return 0


def _stop(options: argparse.Namespace) -> int:
    from torchere.serving.commands import torchserve as launcher  # noqa: PLC0415 - psutil is not needed for --help

    wait_s = launcher.STOP_WAIT_S if options.foreground else 0.0
    return launcher.stop(launcher.pid_file(os.environ), wait_s)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of `torchere`; only the command in `arguments` has all its arguments."""
    own = Parser(prog="torchere")
    own.hints = _HINTS
    parser = described(
        own,
        "Pack PyTorch models into archives and serve them over REST and gRPC.",
        "torchere serve --model-store store --models net=net.mar",
    )
    parser.add_argument("--version", action="version", version=f"torchere {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    given = next((word for word in arguments if not word.startswith("-")), None)
    if given is None and not {"-h", "--help", "--version"} & set(arguments):
        hint = next((f"; {_HINTS[word]}" for word in arguments if word in _HINTS), "")
        known = ", ".join(name for name, _, _ in _COMMANDS)
        parser.error(f"no command was given; expected one of {known}{hint}")
    for name, text, module in _COMMANDS:
        command = commands.add_parser(name, help=text)
        if name == given:
            getattr(import_module(f"{__package__}.{module}"), f"add_{name}")(command)
    return parser


def torchserve_parser() -> argparse.ArgumentParser:
    """Return the parser of `torchserve`."""
    parser = described(
        Parser(prog="torchserve"),
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


def open_standard_streams() -> None:
    """Open missing standard streams on the null device, and make standard output accept any text.

    The next opened file or socket would reuse a closed descriptor and then receive the standard output, so
    call this before opening any file.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # uses the lowest free descriptor, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if descriptor else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An unpaired surrogate in JSON, or an undecodable file name, must not abort the command.
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_standard_output() -> None:
    """Redirect standard output to the null device, so that the flush at exit does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
