"""`torchere predict`: sends one request to a running server and prints the response as text.

REST requests use `torchere.client`, gRPC requests use `predict_grpc`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchere.archiver.errors import plainly

if TYPE_CHECKING:
    from torchere.client import Tensor
    from torchere.client.management import TensorMetadata

DESCRIPTION = (
    "Send one request to a running server, over REST or gRPC, and print the answer.\n"
    "Status 1: the server answered with an error, or not at all; 2: there is nothing to send."
)
REST_ADDRESS = "http://127.0.0.1:8080"
GRPC_ADDRESS = "127.0.0.1:7070"
_LONGEST_S = 86_400.0  # maximum that the server accepts
NPY_TYPE = "application/x-npy"
_UNNAMED = "input"  # name of the single input if the model's metadata declares none


class UsageError(Exception):
    """The arguments do not describe a valid request; the message has the reason."""


def add_predict_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere predict` to `parser`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="name of the model, or name/version")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--json", metavar="TEXT", help="JSON to send; with --v2, arrays by input name")
    given.add_argument("--image", type=Path, metavar="FILE", help="a picture to send")
    given.add_argument("--file", type=Path, metavar="FILE", help="a file to send as it is")
    given.add_argument(
        "--npy", action="append", metavar="[NAME=]FILE", help="a NumPy array; with --v2 once for each input"
    )
    add("--content-type", metavar="TYPE", help="of --file or --image (default: by the file's name)")
    add(
        "--address",
        metavar="ADDRESS",
        help=f"default: {REST_ADDRESS}, with --grpc {GRPC_ADDRESS}; https://host:port for TLS, with either",
    )
    add("--token", metavar="KEY", help="the inference key of the server, as in its key_file.json")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds (default: %(default)g)")
    add("--v2", action="store_true", help="use the Open Inference Protocol, with --json or --npy")
    add("--grpc", action="store_true", help="use gRPC instead of REST")


def run_predict(options: argparse.Namespace) -> int:
    """Send the request and print the response; return the exit status.

    The status is 1 for an error response or no response, and 2 if no request could be sent.
    """
    try:
        from torchere.client import ClientError  # noqa: PLC0415 - not needed for --help
    except ModuleNotFoundError as err:
        if err.name != "httpx":
            raise
        print("torchere predict needs httpx: pip install 'torchere[client]'", file=sys.stderr)
        return 1
    try:
        if not 0 < options.timeout <= _LONGEST_S:
            raise UsageError(f"found --timeout {options.timeout:g}, expected seconds above 0, a day at most")
        said = _infer(options) if options.v2 else _predict(options)
    except ClientError as err:
        print(err, file=sys.stderr)
        return 1
    except (UsageError, OSError, EOFError, ValueError, TypeError) as err:
        print(f"torchere predict: {plainly(err)}", file=sys.stderr)
        return 2
    print(said)
    return 0


def _predict(options: argparse.Namespace) -> str:
    content_type, body = _body(options)
    model, version = _named(options.model)
    if options.grpc:
        from torchere.serving.commands import predict_grpc  # noqa: PLC0415 - imports grpc

        with predict_grpc.Connection(_address(options), options.token, options.timeout) as connection:
            return body_text(connection.predict(model, version, body), "")
    from torchere.client import Client  # noqa: PLC0415

    with Client(_address(options), token=options.token, timeout_s=options.timeout) as client:
        answer = client.predict(model, body, version=version, content_type=content_type)
        return body_text(answer.body, answer.headers.get("content-type", ""))


def _infer(options: argparse.Namespace) -> str:
    model, version = _named(options.model)
    arrays = _arrays(options)
    if options.grpc:
        from torchere.serving.commands import predict_grpc  # noqa: PLC0415 - imports grpc

        with predict_grpc.Connection(_address(options), options.token, options.timeout) as connection:
            inputs = _tensors(arrays, connection.inputs(model, version))
            return tensors_text(connection.infer(model, version, inputs))
    from torchere.client import Client  # noqa: PLC0415

    with Client(_address(options), token=options.token, timeout_s=options.timeout) as client:
        inputs = _tensors(arrays, client.model_metadata(model, version).inputs)
        return tensors_text(client.infer(model, inputs, version=version).tensors)


def _named(text: str) -> tuple[str, str | None]:
    model, _, version = text.partition("/")
    return model, version or None


def _address(options: argparse.Namespace) -> str:
    default = GRPC_ADDRESS if options.grpc else REST_ADDRESS
    address: str = options.address or default
    return address


def _body(options: argparse.Namespace) -> tuple[str, bytes]:
    from torchere.client.predictions import encode_data  # noqa: PLC0415

    if options.json is not None:
        return "application/json", json.dumps(_parsed(options.json)).encode()
    if options.npy:
        if len(options.npy) > 1 or "=" in options.npy[0]:
            raise UsageError("several or named arrays need --v2")
        return NPY_TYPE, Path(options.npy[0]).read_bytes()
    content_type, body = encode_data(options.image or options.file)
    return options.content_type or content_type, body


def _arrays(options: argparse.Namespace) -> dict[str, Any]:
    """Return the input arrays in the arguments by input name; "" is the name of an unnamed input."""
    if options.json is not None:
        value = _parsed(options.json)
        return value if isinstance(value, dict) else {"": value}
    if not options.npy:
        raise UsageError("--v2 sends arrays; expected --json or --npy")
    import numpy as np  # noqa: PLC0415 - takes a tenth of a second

    arrays = {}
    for text in options.npy:
        name, separator, file = text.rpartition("=")
        try:
            with Path(file).open("rb") as opened:  # np.load would also read .npz and pickles
                array = np.lib.format.read_array(opened, allow_pickle=False)
        except (EOFError, ValueError) as err:
            found = f"no .npy file of numbers or texts ({err})"
            raise UsageError(f"--npy {file}: {found}; expected a file written by numpy.save") from err
        arrays[name if separator else ""] = array
    return arrays


def _tensors(arrays: dict[str, Any], known: tuple[TensorMetadata, ...]) -> list[Tensor]:
    from torchere.client import tensor  # noqa: PLC0415

    datatypes = {one.name: one.datatype for one in known}
    if "" in arrays:
        if len(arrays) > 1 or len(known) > 1:
            names = ", ".join(datatypes) or "by name"
            raise UsageError(f"an array without a name; the model takes {names}")
        arrays = {next(iter(datatypes), _UNNAMED): arrays[""]}
    try:
        return [tensor(name, value, datatypes.get(name)) for name, value in arrays.items()]
    except (TypeError, ValueError) as err:
        wanted = ", ".join(f"{one.name} {one.datatype}" for one in known)
        raise UsageError(f"no arrays for the model's inputs ({wanted}): {err}") from err


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as err:
        raise UsageError(f"--json is no JSON: {err}") from err


_MOST_ROWS = 100  # rows of a table; a longer result is printed as JSON


def body_text(body: bytes, content_type: str) -> str:
    """Format a handler's response: labels and scores as a table, other JSON indented, text unchanged."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return f"{len(body)} bytes of {content_type or 'unknown type'}"
    try:
        value = json.loads(text)
        if _is_scores(value):
            return _table([(name, f"{score:g}") for name, score in value.items()])
        return json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, OverflowError, RecursionError):  # not JSON, or too large or too deep to format
        return text


def tensors_text(tensors: Sequence[Tensor]) -> str:
    """Format each output: a line with name, datatype and shape, then the values."""
    blocks = []
    for one in tensors:
        values: Any = one.numpy()  # NumPy abbreviates long arrays
        if one.datatype == "BYTES":
            values = [element.decode("utf-8", "backslashreplace") for element in values.reshape(-1).tolist()]
        blocks.append(f"{one.name}  {one.datatype} {list(one.shape)}\n{values}")
    return "\n\n".join(blocks) or "no outputs"


def _is_scores(value: object) -> bool:
    return (
        isinstance(value, dict)
        and 0 < len(value) <= _MOST_ROWS
        and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in value.values())
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
