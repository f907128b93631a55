"""Checks for addresses in use, and error messages for addresses that can't be bound."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterable, Iterator

from torchere.serving.config.server_settings import Address
from torchere.serving.errors import ServingError

_CONNECT_TIMEOUT_S = 1.0  # for probing whether another server listens on a socket file


def refuse_taken(addresses: Iterable[Address]) -> None:
    """Raise an error if another process listens on one of the addresses. Blocks.

    Call it before this process changes files that a running server uses: its key file and its socket file.
    Most other problems with an address are reported when it is bound.

    Raises:
        ServingError: an address is in use.
    """
    for address in addresses:
        with said_plainly(address):
            if address.unix_path is not None:
                _probe_unix(address.unix_path)
            elif address.port != 0:
                _probe_tcp(address)


_ADVICE = (
    "Set another in the file that --ts-config names: inference_address, management_address or "
    "metrics_address (as http://127.0.0.1:9000), grpc_inference_port or grpc_management_port."
)


@contextlib.contextmanager
def said_plainly(address: Address) -> Iterator[None]:
    """Convert an OSError or a UnicodeError about an address to a ServingError with advice."""
    try:
        yield
    except UnicodeError as err:  # a label of the host name is empty, or longer than 63 characters
        raise ServingError(f"Cannot listen on {address}: {err}.", "Correct the host in the address.") from err
    except OSError as err:
        advice = _ADVICE
        if err.errno == errno.EADDRINUSE:
            advice = f"Is another server running there? {advice}"
        if err.errno in (errno.EMFILE, errno.ENFILE):
            advice = "Raise the limit of open files (ulimit -n)."
        # asyncio's own text repeats the address, so it is not used. getaddrinfo's error numbers are below 0.
        said = os.strerror(err.errno) if err.errno and err.errno > 0 else err.strerror or err
        raise ServingError(f"Cannot listen on {address}: {said}.", advice) from err


def _probe_unix(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        if probe.connect_ex(path) == 0:  # the socket file of a killed server refuses connections
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _probe_tcp(address: Address) -> None:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, False)
                probe.bind(place)
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            raise
