"""A handler that breaks its worker on demand: an instance is the name of a function here.

For the envelope `json` and batch size 1. `ready` breaks nothing. A hang lasts until the server ends the
worker for its `responseTimeout`.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

FOREVER_S = 1000


def segfault():
    """End by a signal of its own."""
    ctypes.string_at(0)


def leave():
    """End with a status."""
    os._exit(7)


def be_killed():
    """End by a signal from outside, as the system's killer sends it."""
    os.kill(os.getpid(), signal.SIGKILL)


def be_stopped():
    """Stay, and do nothing any more."""
    os.kill(os.getpid(), signal.SIGSTOP)


def lack_memory():
    """Ask for more than there is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), hard))
    try:
        bytearray(1 << 32)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def spin():
    """Compute in Python without end."""
    while True:
        pass


def hold_the_gil():
    """Wait in C, with the lock that all threads of the interpreter need."""
    ctypes.PyDLL(None).sleep(FOREVER_S)


def sleep():
    """Wait; the socket is not read, and fills."""
    time.sleep(FOREVER_S)


def chatter():
    """Write lines to its output without end."""
    while True:
        print("x" * 1000, file=sys.stdout)


def mumble():
    """Write empty lines to its output without end."""
    while True:
        print(file=sys.stdout)


def garbage():
    """Write bytes that are no frame to all of its sockets."""
    _write(b"\0\0\0\x08garbage!")


def frames():
    """Send parts of an unknown answer on its data socket, which is the first, without end."""
    from torchere.serving.types import InferResponse  # noqa: PLC0415 - a malicious handler knows them
    from torchere.serving.workers.messages import Partial, encode_frame  # noqa: PLC0415 - as above

    content = bytes(encode_frame(Partial(0, 0, InferResponse(b"")))) * 1000
    for name in sorted(map(int, os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(name)) as line:
            while True:
                line.sendall(content)


def pongs():
    """Send metrics with ever new names on all of its sockets without end, as if for heartbeats."""
    from torchere.handlers.metrics import MetricSample  # noqa: PLC0415 - a malicious handler knows them
    from torchere.serving.workers.messages import Pong, encode_frame  # noqa: PLC0415 - as above

    def pong(size, start):
        numbers = range(start, start + size)
        return Pong(tuple(MetricSample(f"m{number}", 1.0, "", "gauge", (), ()) for number in numbers))

    _flood(bytes(encode_frame(pong(2_000, 0))) + bytes(encode_frame(pong(20_000, 2_000))))


def headers():
    """Send parts of an answer with as many headers as fit into a frame on all of its sockets."""
    _flood(_frame_of(b"\x94\x0c\x00\x00\x94\xc4\x00", b"\x92\xa0\xa0"))


def large_head():
    """Announce a frame of 2 GiB on all of its sockets, and send the beginning."""
    _write(b"\x7f\xff\xff\xff" + bytes(1000))


def _frame_of(begin, item, most_bytes=2**24 - 100):
    """Return a frame that ends with an array of equal items, and lacks the fields after it."""
    count = most_bytes // len(item)
    content = begin + b"\xdd" + count.to_bytes(4, "big") + item * count
    return len(content).to_bytes(4, "big") + content


def _flood(content):
    """Write the content to all sockets again and again, from a thread for each."""
    threads = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            line = socket.socket(fileno=os.dup(int(name)))
            threads.append(threading.Thread(target=_write_on, args=(line, content), daemon=True))
            threads[-1].start()
    time.sleep(FOREVER_S)


def _write_on(line, content):
    with contextlib.suppress(OSError):
        while True:
            line.sendall(content)


def _write(content):
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as line:
                line.sendall(content)
        except OSError:  # no socket
            pass
    time.sleep(FOREVER_S)


class Faults:
    """Does as each request says."""

    def initialize(self, context):
        """There is nothing to load."""

    def handle(self, data, context):
        """One request."""
        if data[0] != "ready":
            globals()[data[0]]()
        return [data[0]]
