from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `/closed` a folder that this user may not look into."""
    stat = os.stat

    def refusing(path: str | Path, **options: bool) -> os.stat_result:
        if str(path).startswith("/closed/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refusing)


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets each text file be cut off from now on, as on a full disk."""

    def cut_off(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(Path, "write_text", cut_off)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The proxy of the environment: a socket whose `accept` raises BlockingIOError if no client has come."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name in ("NO_PROXY", "no_proxy", "no_grpc_proxy", "grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        listening.setblocking(False)
        yield listening
