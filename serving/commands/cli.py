"""The commands `torchere` and `torchserve`. The only reader of the arguments and of the environment.

A command imports what it needs only when it is the one that was given: the start of a server pays for every
module, and whoever asks for help waits for them. What the commands take is in `cli_serve.py` and
`cli_tools.py`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from torchere.serving import __version__
from torchere.serving.commands import tools as cli_tools
from torchere.serving.commands.serve import add_serve
from torchere.serving.commands.serve_options import (
    LaunchRefused,
    add_serve_options,
    plan_from,
    serve_arguments,
)
from torchere.serving.commands.texts import described
from torchere.serving.config.properties import ConfigurationError
from torchere.serving.errors import ServingError

# Name, what it is for in a line, and what gives its parser arguments, texts and the function that runs it.
_COMMANDS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None]], ...] = (
    ("serve", "serve models in the foreground", add_serve),
    ("archive", "pack a model into a .mar archive", cli_tools.add_archive),
    ("convert", "bring an archive's model into another format", cli_tools.add_convert),
    ("compare", "compare the models of two archives", cli_tools.add_compare),
    ("inspect", "show what is in an archive", cli_tools.add_inspect),
    ("predict", "ask a model of a running server", cli_tools.add_predict),
    ("bench", "measure a model of a running server", cli_tools.add_bench),
    ("config", "explain a configuration file", cli_tools.add_config),
    ("migrate", "say what becomes of a TorchServe deployment", cli_tools.add_migrate),
    ("version", "print versions", cli_tools.add_version),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `torchere`; the exit status is 0, 1 (refused or failed) or 2 (wrong usage, raised by argparse).

    130 is Ctrl+C, as shells have it.
    """
    arguments = sys.argv[1:] if argv is None else argv

    def command() -> int:
        options = _parser(arguments).parse_args(arguments)
        return _guarded(options.run, options)

    return _to_the_end(command)


def torchserve_main(argv: Sequence[str] | None = None) -> int:
    """Run `torchserve`, with the flags, texts and exit statuses of TorchServe 0.12."""

    def command() -> int:
        options = _torchserve_parser().parse_args(argv)
        if options.version:
            print(f"TorchServe Version is {cli_tools.TORCHSERVE_VERSION}")
            return 0
        return _guarded(_stop if options.stop else _start, options)

    return _to_the_end(command)


def _to_the_end(command: Callable[[], int]) -> int:
    """The status of the command, also when somebody stops it, or reads no further (`| head`)."""
    open_standard_streams()
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # while it can still be told; argparse ends by SystemExit
    except BrokenPipeError:
        drop_standard_output()
        return 1
    except KeyboardInterrupt:
        return 130


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
    from torchere.serving.commands import torchserve as launcher  # noqa: PLC0415 - psutil is not needed for --help

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
    from torchere.serving.commands import torchserve as launcher  # noqa: PLC0415 - psutil is not needed for --help

    wait_s = launcher.STOP_WAIT_S if options.foreground else 0.0
    return launcher.stop(launcher.pid_file(os.environ), wait_s)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of `torchere`: of its commands only the one that the arguments begin with is made whole."""
    parser = described(
        argparse.ArgumentParser(prog="torchere"),
        "Pack PyTorch models into archives and serve them over REST and gRPC.",
        "torchere serve --model-store store --models net=net.mar",
    )
    parser.add_argument("--version", action="version", version=f"torchere {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    given = next((word for word in arguments if not word.startswith("-")), None)
    for name, text, fill in _COMMANDS:
        command = commands.add_parser(name, help=text)
        if name == given:
            fill(command)
    return parser


def _torchserve_parser() -> argparse.ArgumentParser:
    parser = described(
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


def open_standard_streams() -> None:
    """Give the process the streams it was started without, and let every text be written.

    A closed descriptor would become the next file or socket that is opened, and be written to as if it were
    standard output. Call it before anything is opened.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "w" if descriptor else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Half of a surrogate pair in JSON, or a name of a file that is no text, is no reason to break off.
        sys.stdout.reconfigure(errors="backslashreplace")


def drop_standard_output() -> None:
    """Send what is still to be written nowhere: at its end the interpreter would try it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
