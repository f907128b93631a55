"""The standard streams of a command, as shells and services leave them: closed, or read by nobody."""

from __future__ import annotations

import io
import os
import sys


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
