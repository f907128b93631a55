"""The options of `torchere predict` and `torchere bench`: which server is called, with which key and body."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchere.client.exchange import JSON
from torchere.client.key_file import VARIABLES, FoundKey, find_key, read_key
from torchere.client.predictions import encode_data

REST_ADDRESS = "http://127.0.0.1:8080"
_LONGEST_S = 86_400.0  # maximum that the server accepts


def add_server_arguments(parser: argparse.ArgumentParser, address: str = f"default: {REST_ADDRESS}") -> None:
    """Add the model, the address, the key, the time limit and the headers of a request."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="name of the model, or name/version")
    add("--address", metavar="ADDRESS", help=address)
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="key_file.json of the server, or a file with its inference key alone (default: the "
        f"{VARIABLES['inference']} environment variable, or ./key_file.json for a server on this machine)",
    )
    add("--timeout", type=_timeout, default=60.0, metavar="S", help="seconds (default: %(default)g)")
    add(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="HTTP header to send; may be repeated",
    )
    add("--content-type", metavar="TYPE", help="of --file or --image (default: by the file's name)")


def add_body_arguments(
    parser: argparse.ArgumentParser, *, required: bool, by_inputs: str = ""
) -> argparse._MutuallyExclusiveGroup:
    """Add the ways to give the body of a request, and return their group.

    `by_inputs`: more help on `--json`, of a command that takes tensors by the names of inputs.
    """
    given = parser.add_mutually_exclusive_group(required=required)
    given.add_argument("--json", metavar="TEXT", help=f"JSON to send{by_inputs}")
    given.add_argument("--text", metavar="TEXT", help="a text to send")
    given.add_argument("--image", type=Path, metavar="FILE", help="a picture to send")
    none = "" if required else "; without any of these the body is empty"
    given.add_argument("--file", type=Path, metavar="FILE", help=f"a file to send as it is{none}")
    return given


def body_of(options: argparse.Namespace) -> tuple[str, bytes]:
    """Return the content type and the bytes of the body; both are empty if none is given.

    Raises:
        ValueError: the JSON is malformed.
        OSError: a file can't be read.
    """
    if options.json is not None:
        return JSON, json.dumps(parsed(options.json)).encode()
    if options.text is not None:
        return encode_data(options.text)
    file = options.image or options.file
    if file is None:
        return "", b""
    guessed, body = encode_data(file)
    return options.content_type or guessed, body


def headers_of(lines: Sequence[str]) -> dict[str, str]:
    """Return the headers of lines as `NAME: VALUE`.

    Raises:
        ValueError: a line has no name or no colon.
    """
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"the header is {line!r}; expected 'Name: value'")
        headers[name.strip()] = value.strip()
    return headers


def key_of(options: argparse.Namespace, address: str) -> FoundKey | None:
    """Return the key to send; None if no key is found.

    Raises:
        OSError, ValueError: the file can't be read, or holds no key.
    """
    return read_key(options.token_file) if options.token_file else find_key(address)


def about_key(found: FoundKey | None) -> str:
    """Return the advice for a key that was refused: which one was sent, and how to send another."""
    if found is None:
        return (
            "no key was sent: run this in the folder of the server's key_file.json, name that file by "
            f"--token-file, or set {VARIABLES['inference']}"
        )
    expires = f", which expires at {found.expires}" if found.expires else ""
    return f"the key was that of {found.source}{expires}"


def parsed(text: str, *, arrays: bool = False) -> Any:
    """Return the value of `--json`.

    Args:
        text: the option's value; if it is the name of a file, the error suggests a correction.
        arrays: the value is sent as arrays (`--v2`), which `--file` can't give.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as err:
        file = text.removeprefix("@")
        # Unlike Path.is_file, this raises nothing for a text that is too long for a path.
        if os.path.isfile(file):
            quoted = shlex.quote(file)
            meant = f'--json "$(cat {quoted})"' if arrays else f"--file {quoted}"
            found = f"found the name of a file, expected JSON; did you mean {meant}?"
            raise ValueError(f"--json {text}: {found}") from err
        raise ValueError(f"--json is no JSON: {err}") from err


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected seconds above 0, a day at most")
    return seconds
