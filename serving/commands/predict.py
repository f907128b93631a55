"""`torchere predict`: sends one request to a running server and prints the response as text.

REST requests use `torchere.client`, gRPC requests use `predict_grpc`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchere.archiver.arguments import described
from torchere.archiver.errors import plainly
from torchere.client.key_file import FoundKey
from torchere.serving.commands.requests import (
    REST_ADDRESS,
    about_key,
    add_body_arguments,
    add_server_arguments,
    advice,
    body_of,
    headers_of,
    key_of,
    parsed,
)

if TYPE_CHECKING:
    from torchere.client import Client, ClientError, Tensor
    from torchere.client.management import TensorMetadata
    from torchere.serving.commands.predict_grpc import Connection

GRPC_ADDRESS = "127.0.0.1:7070"
_UNNAMED = "input"  # name of the single input if the model's metadata declares none


def add_predict(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `torchere predict` to `parser`."""
    text = (
        "Send one request to a running server, over REST or gRPC, and print the answer.\n"
        "Status 1: the server answered with an error, or not at all; 2: there is nothing to send."
    )
    described(parser, text, "torchere predict net --image cat.png")
    add_server_arguments(
        parser,
        f"default: {REST_ADDRESS}, with --grpc {GRPC_ADDRESS}; https://host:port for TLS, with either",
    )
    given = add_body_arguments(parser, required=True, by_inputs="; with --v2, arrays by input name")
    given.add_argument(
        "--npy", action="append", metavar="[NAME=]FILE", help="a NumPy array; with --v2 once for each input"
    )
    given.add_argument(
        "--zeros",
        action="append",
        metavar="[NAME=]SHAPE",
        help="zeros of a shape such as 1x3x224x224, by the Open Inference Protocol; once for each input",
    )
    add = parser.add_argument
    add("--v2", action="store_true", help="use the Open Inference Protocol, with --json, --npy or --zeros")
    add("--grpc", action="store_true", help="use gRPC instead of REST")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Send the request and print the response; return the exit status of the description."""
    try:
        from torchere.client import Client, ClientError, Unauthorized  # noqa: F401, PLC0415 - httpx
    except ModuleNotFoundError as err:
        if err.name != "httpx":
            raise
        print("torchere predict needs httpx: pip install 'torchere[client]'", file=sys.stderr)
        return 1
    found = None
    try:
        found = key_of(options, _address(options))
        said = _infer(options, found) if options.v2 or options.zeros else _predict(options, found)
    except ClientError as err:
        print(err, file=sys.stderr)
        more = about_key(found) if isinstance(err, Unauthorized) else _advice(err, options, found)
        if more:
            print(f"torchere predict: {more}", file=sys.stderr)
        return 1
    except (OSError, ValueError, TypeError) as err:
        print(f"torchere predict: {plainly(err)}", file=sys.stderr)
        return 2
    except MemoryError as err:  # raised by any copy: Linux provides the memory of zeros at their first use
        reason = ": ".join(filter(None, ("the request or its answer does not fit into memory", str(err))))
        print(f"torchere predict: {reason}", file=sys.stderr)
        return 2
    print(said)
    return 0


def _advice(err: ClientError, options: argparse.Namespace, found: FoundKey | None) -> str:
    """Return the advice for an error. With `--grpc` and `--address` the server's REST address is unknown."""
    address = (None if options.address else REST_ADDRESS) if options.grpc else _address(options)
    return advice(err.message, address, options.model, found)


def _predict(options: argparse.Namespace, found: FoundKey | None) -> str:
    content_type, body = _body(options)
    model, _, version = options.model.partition("/")
    with _client(options, found) as client:
        answer = client.predict(model, body, version=version, content_type=content_type)
        return body_text(answer.body, answer.headers.get("content-type", ""))


def _infer(options: argparse.Namespace, found: FoundKey | None) -> str:
    model, _, version = options.model.partition("/")
    arrays = _arrays(options)
    with _client(options, found) as client:
        inputs = _tensors(arrays, client.model_metadata(model, version).inputs)
        return tensors_text(client.infer(model, inputs, version=version).tensors)


def _client(options: argparse.Namespace, found: FoundKey | None) -> Client | Connection:
    key = found.key if found else None
    if not options.grpc:
        from torchere.client import Client  # noqa: PLC0415 - imports httpx

        headers = headers_of(options.header)
        return Client(_address(options), token=key or "", timeout_s=options.timeout, headers=headers)
    from torchere.serving.commands.predict_grpc import Connection  # noqa: PLC0415 - imports grpc

    if options.header:
        raise ValueError("--header is for REST; leave it or --grpc out")
    return Connection(_address(options), key, options.timeout)


def _address(options: argparse.Namespace) -> str:
    default = GRPC_ADDRESS if options.grpc else REST_ADDRESS
    return str(options.address or default)


def _body(options: argparse.Namespace) -> tuple[str, bytes]:
    if not options.npy:
        return body_of(options)
    if len(options.npy) > 1 or "=" in options.npy[0]:
        raise ValueError("several or named arrays need --v2")
    return "application/x-npy", Path(options.npy[0]).read_bytes()


def _arrays(options: argparse.Namespace) -> dict[str, Any]:
    """Return the input arrays in the arguments by input name; "" is the name of an unnamed input."""
    if options.json is not None:
        value = parsed(options.json, arrays=True)
        return value if isinstance(value, dict) else {"": value}
    if not options.npy and not options.zeros:
        raise ValueError("--v2 sends arrays; expected --json, --npy or --zeros")
    import numpy as np  # noqa: PLC0415 - takes a tenth of a second

    arrays: dict[str, Any] = {}
    for text in options.zeros or ():
        name, _, shape = text.rpartition("=")
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape):
            raise ValueError(f"--zeros {text}: found {shape!r}, expected a shape such as 1x3x224x224")
        try:
            arrays[name] = np.zeros([int(size) for size in shape.split("x")])
        except ValueError as err:
            raise ValueError(f"--zeros {text}: no array of this shape can be made: {err}") from err
    for text in options.npy or ():
        name, _, file = text.rpartition("=")
        try:
            with Path(file).open("rb") as opened:  # np.load would also read .npz and pickles
                arrays[name] = np.lib.format.read_array(opened, allow_pickle=False)
        except (EOFError, ValueError) as err:
            found = f"no .npy file of numbers or texts ({err})"
            raise ValueError(f"--npy {file}: {found}; expected a file written by numpy.save") from err
    return arrays


def _tensors(arrays: dict[str, Any], known: tuple[TensorMetadata, ...]) -> list[Tensor]:
    from torchere.client import tensor  # noqa: PLC0415

    datatypes = {one.name: one.datatype for one in known}
    if "" in arrays:
        if len(arrays) > 1 or len(known) > 1:
            names = ", ".join(datatypes) or "by name"
            raise ValueError(f"an array without a name; the model takes {names}")
        arrays = {next(iter(datatypes), _UNNAMED): arrays[""]}
    try:
        return [tensor(name, value, datatypes.get(name)) for name, value in arrays.items()]
    except (TypeError, ValueError) as err:
        wanted = ", ".join(f"{one.name} {one.datatype}" for one in known)
        raise ValueError(f"no arrays for the model's inputs ({wanted}): {err}") from err


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
