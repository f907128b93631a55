"""Memory of processes as PSS, which counts a page that several processes share once. Linux 4.14 or later."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from harness.errors import Failed
from harness.processes import Endpoint


@dataclass(frozen=True, slots=True)
class Memory:
    """PSS in bytes: of a server's whole process tree, and of the process that listens for requests."""

    tree: int
    server: int
    processes: int


def memory_of(endpoint: Endpoint) -> Memory:
    """What a server takes now. A process that ends meanwhile does not count.

    Raises:
        Failed: none of its processes listens on the port for inference.
    """
    root = psutil.Process(endpoint.process.pid)
    found: dict[int, int] = {}
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(OSError):
            found[process.pid] = pss(process.pid)
    return Memory(sum(found.values()), found[_listener(endpoint, sorted(found))], len(found))


def pss(pid: int) -> int:
    """PSS of one process in bytes."""
    return pss_of(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8"))


def pss_of(text: str) -> int:
    """Read /proc/PID/smaps_rollup; a process that has ended, and is not reaped, has no line Pss."""
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024  # the kernel's kB are KiB
    return 0


def _listener(endpoint: Endpoint, pids: list[int]) -> int:
    """The first process that has the socket; children that were forked may have it, too."""
    port = urlsplit(endpoint.url).port
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                    return pid
    raise Failed(f"no process of the server listens on port {port}")
