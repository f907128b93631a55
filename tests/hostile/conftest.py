"""Floods: one client spends 1 MB/s on making the server work, and another one is answered all the same.

Each test file starts one server and has a table of attacks. An attack is the bytes of one request. `flood`
sends it again and again on CONNECTIONS connections, at RATE_BYTES a second in all, and makes control requests
on a connection of its own meanwhile. The test prints the figures and asserts bounds: the slowest
control request in a hundred takes `CONTROL_S`, and memory grows within the sum of the limits and 256 MiB.
`TORCHERE_FLOOD_S=30` floods for longer.

A new attack is a row in the table. It must exceed a bound on the code before its hole was closed.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from floods import CONTROL_EVERY_S, FLOOD_S, PATIENCE_S, Figures, Flood, rss_bytes, timed
from servers import pack, start_server, store

__all__ = ["pack", "start_server", "store"]


@pytest.fixture
def flood(capsys: pytest.CaptureFixture[str]) -> Callable[[Any, str, bytes, str], Figures]:
    """`flood(server, name, request, control)`: figures of one attack; control requests POST to `control`."""

    def run(server: Any, name: str, request: bytes, control: str) -> Figures:
        figures = Figures()
        process = psutil.Process(server.process.pid)
        client = http.client.HTTPConnection(server.rest["inference"], timeout=PATIENCE_S)
        before = rss_bytes(process)
        attack = Flood(server.rest["inference"], request)
        attack.begin()
        end_s = time.monotonic() + FLOOD_S
        try:
            while time.monotonic() < end_s:
                with timed(figures, process):
                    client.request("POST", control, b"x")
                    answer = client.getresponse()
                    answer.read()
                assert answer.status == 200
                figures.grown_bytes = max(figures.grown_bytes, rss_bytes(process) - before)
                time.sleep(CONTROL_EVERY_S)
        finally:
            attack.end()
            client.close()
        figures.answers = attack.answers
        with capsys.disabled():
            print(f"\n{name}: {figures}")
        return figures

    return run
