"""`ts.model_server` and `ts.arg_parser`: the command `torchserve`, and the parser of its arguments."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from torchere.serving.commands.cli import torchserve_parser

__all__ = ["ArgParser", "main", "start"]


class ArgParser:
    """The parser of `torchserve`."""

    @staticmethod
    def ts_parser() -> argparse.ArgumentParser:
        """Return the parser."""
        return torchserve_parser()

    @staticmethod
    def extract_args(args: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the parsed arguments; those that are unknown are passed over."""
        return torchserve_parser().parse_known_args(args)[0]


def start() -> None:
    """Run `torchserve` with the arguments of this process.

    Raises:
        SystemExit: it failed; the code is its exit status.
    """
    if status := subprocess.run(["torchserve", *sys.argv[1:]], check=False).returncode:
        sys.exit(status)


main = start  # of `python -m ts.model_server`
