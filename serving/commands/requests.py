"""What `torchere predict` and `torchere bench` share: the options of a request, and advice on its error.

The server's texts are TorchServe's, which its clients compare; the lines of advice are for people.
"""

from __future__ import annotations

import argparse
import difflib
import http.client
import json
import os
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchere.client.exchange import JSON
from torchere.client.key_file import VARIABLES, FoundKey, find_key, is_loopback, read_key
from torchere.client.predictions import encode_data

REST_ADDRESS = "http://127.0.0.1:8080"
_LONGEST_S = 86_400.0  # maximum that the server accepts
_WAIT_S = 5.0
_MOST_BYTES = 1 << 20
_MOST_NAMES = 20
_NOT_FOUND = "Model not found"
# OpenSSL has the same code for a wrong host name or an expired certificate, where another CA does not help.
_NO_AUTHORITY = re.compile(r"CERTIFICATE_VERIFY_FAILED.*(issuer|self.signed)")
# The texts of bench, httpx and grpcio for a connection that is closed before an answer.
_CLOSED = re.compile(
    "^the server closed the connection$|^(no|the) connection to .*(Server disconnected without|Socket closed)"
)
_NO_WORKER = "has no worker to serve inference request"


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


def about_key(found: FoundKey | None) -> str:
    """Return the advice for a key that was refused: which one was sent, and how to send another."""
    if found is None:
        return (
            "no key was sent: run this in the folder of the server's key_file.json, name that file by "
            f"--token-file, or set {VARIABLES['inference']}"
        )
    expires = f", which expires at {found.expires}" if found.expires else ""
    return f"the key was that of {found.source}{expires}"


def advice(message: str, address: str | None, model: str, found: FoundKey | None) -> str:
    """Return a line of advice on an error; "" if there is nothing to add.

    Args:
        message: the text of the answer, or the reason why there is none.
        address: the URL of the inference API over REST; None: it is not known.
        model: the requested model, as `name` or `name/version`.
        found: the key that was sent.
    """
    if about_tls := _about_tls(message, address):
        return about_tls
    if address is None:
        return ""
    if message.startswith(_NOT_FOUND):
        names = _get(address, "/v1/models", found).get("models")
        if not isinstance(names, list):
            return ""
        return _models(model.partition("/")[0], sorted(map(str, names)))
    if _NO_WORKER in message:
        reasons = _get(address, f"/readyz/{quote(model)}", None).get("reasons")
        if isinstance(reasons, list) and any("failed" in str(reason) for reason in reasons):
            name = model.partition("/")[0]
            return f"{model} failed: the server's log and its describe say why (GET /models/{name})"
    return ""


def _about_tls(message: str, address: str | None) -> str:
    if _NO_AUTHORITY.search(message):
        return "for a certificate of your own authority, set SSL_CERT_FILE to the file of the authority's"
    if _CLOSED.search(message) and "https://" not in f"{message} {address}":
        return "the port may expect TLS: try it with an --address that begins with https://"
    return ""


def _models(wanted: str, names: list[str]) -> str:
    if not names:
        return "the server has no models"
    shown = ", ".join(ascii(name)[1:-1] for name in names[:_MOST_NAMES])
    others = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    near = difflib.get_close_matches(wanted, names, n=1)
    meant = f"; did you mean {ascii(near[0])[1:-1]}?" if near else ""
    return f"the server has {shown}{others}{meant}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect the answer: urllib would follow it, and send the key to any other server."""

    def redirect_request(self, *_arguments: object) -> None:
        """Return no request."""


def _get(address: str, path: str, found: FoundKey | None) -> dict[str, object]:
    """Return the JSON object that the server answers at a path, a refusal included; {} for other answers."""
    headers = {"Authorization": f"Bearer {found.key}"} if found else {}
    # The environment's proxy must not get the key, and would take such an address for its own machine.
    direct = [urllib.request.ProxyHandler({})] if is_loopback(address) else []
    try:
        request = urllib.request.Request(address.rstrip("/") + path, headers=headers)
        try:
            answer = urllib.request.build_opener(_NoRedirects, *direct).open(request, timeout=_WAIT_S)
        except urllib.error.HTTPError as refusal:
            answer = refusal
        with answer:
            value = json.loads(answer.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        return {}
    return value if isinstance(value, dict) else {}
