"""A process that imports torch once and forks workers: each is up in a fifth of a second.

Started by `spawn.py`; `fork_client.py` describes the protocol. It never runs a model and never uses a GPU, so
it has only its main thread and no CUDA context: neither other threads nor a context survive a fork. It ends
with the server.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial

import numpy as np
import torch

from torchere.archiver.scan.exported_program import INT8_OPERATORS
from torchere.serving.process.allocator import keep_freed_memory
from torchere.serving.process.signals import die_with_parent, live
from torchere.serving.workers import process, room_process
from torchere.serving.workers.fork_client import COMPILER_WORKER, DESCRIPTORS, ROOM

# Exported programs and `torch.compile` need them. They start no thread and ask for no GPU.
COMPILER = ("torch._dynamo", "torch._export.serde.serialize", INT8_OPERATORS)
ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch.cuda.is_available then initialises no CUDA


class ForkServer:
    """Forks workers on request and reports their exit codes. Single-threaded."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        control.setblocking(False)  # not by MSG_DONTWAIT: recv_fds of Python 3.11 ignores its flags
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)

    def say_importing(self, number: int) -> None:
        """Tell the server which module is imported next: its number among the operator's modules."""
        self._send(b"I %d" % number)

    def serve(self) -> None:
        """Answer requests until the server closes the socket."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        gc.freeze()  # garbage collection in a worker must not copy the shared pages
        gc.enable()
        while True:
            self._selector.select()
            self._report_ended()
            if not self._answer():
                return

    def _answer(self) -> bool:
        try:
            kind, descriptors, _, _ = socket.recv_fds(self._control, 1, max(DESCRIPTORS.values()))
        except BlockingIOError:
            return True
        if not kind:
            return False
        if len(descriptors) == DESCRIPTORS[kind]:
            if kind == COMPILER_WORKER:
                import_compiler()
            self._fork(room_process.run if kind == ROOM else process.run, *descriptors)
        else:  # no free descriptors to receive them
            self._send(b"E %d" % errno.EMFILE)
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _fork(self, run: Callable[..., None], *descriptors: int) -> None:
        try:
            pid = os.fork()
        except OSError as err:  # no more processes: the existing workers continue
            self._send(b"E %d" % (err.errno or errno.EAGAIN))
        else:
            if pid == 0:
                live(partial(self._be_worker, run, *descriptors))
            self._send(b"P %d" % pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def _send(self, message: bytes) -> None:
        """Send a message, blocking while the buffer is full; `serve` detects a lost connection."""
        with suppress(ConnectionError):
            while True:
                try:
                    self._control.send(message)
                    return
                except BlockingIOError:
                    select.select([], [self._control], [])

    def _be_worker(self, run: Callable[..., None], *descriptors: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._control.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        os.setsid()
        *its_own, output = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        torch.seed()  # otherwise all workers would draw the same random numbers
        np.random.seed()  # handlers use the global state
        run(*its_own)

    def _report_ended(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._send(b"X %d %d" % (pid, os.waitstatus_to_exitcode(status)))


@cache
def import_compiler() -> None:
    """Import torch's compiler once for all workers: an import in each would take 1.7 s and 70 MB.

    If it fails here, such as for a full temporary folder, the workers that need it import it themselves.
    """
    given = dict(os.environ)
    gc.disable()
    for name in COMPILER:
        try:
            importlib.import_module(name)
        except ImportError:  # another release of torch
            continue
        except Exception as err:
            _tell(f"torch's compiler can't be imported ahead of the workers: {err!r}")
    for name in os.environ.keys() - given.keys():  # as a cache folder, which a handler may want elsewhere
        del os.environ[name]
    _flush()
    gc.freeze()
    gc.enable()


def preload(names: Sequence[str], say_importing: Callable[[int], None] = lambda number: None) -> None:
    """Import the modules that the operator named, and report errors on standard error.

    `say_importing` is called before each import, which may end the process, and once after the last.

    Workers share the imported modules, and need not import them again. Threads and the use of GPUs do not
    survive a fork, so a module must start neither when it is imported. It may compute, but on one thread:
    OpenMP's other threads would be missing in the workers, which would wait for them forever.
    """
    asks, computing = os.environ.get(ASKS_NVML), torch.get_num_threads()
    os.environ[ASKS_NVML] = "1"  # many modules count the GPUs, which otherwise initialises CUDA
    torch.set_num_threads(1)
    for number, name in enumerate(names):
        say_importing(number)
        threads, used = threading.active_count(), _uses_gpu()
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as err:  # a module may raise anything, and a script may exit
            _tell(f"preload_modules: {name} can't be imported ({err!r}); workers import it themselves")
            continue
        if _uses_gpu() > used:
            _tell(f"preload_modules: {name} uses a GPU when imported, and so no worker can; leave it out")
        if threading.active_count() > threads:
            _tell(f"preload_modules: {name} starts threads, which workers do not have; leave it out")
    say_importing(len(names))
    torch.set_num_threads(computing)
    if asks is None:
        del os.environ[ASKS_NVML]
    else:
        os.environ[ASKS_NVML] = asks
    _flush()


def _flush() -> None:
    """Write the modules' buffered output, which workers would otherwise inherit and write again."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _uses_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's has no types


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Run the fork server; the arguments are the inherited control socket, and modules to import.

    The caller has disabled garbage collection before it imports this module.
    """
    die_with_parent()
    keep_freed_memory(os.environ)  # for the workers
    forks = ForkServer(socket.socket(fileno=int(sys.argv[1])))
    preload(sys.argv[2:], forks.say_importing)
    os.environ.pop("PYTHONSAFEPATH", None)  # a handler's processes must not inherit it
    forks.serve()
