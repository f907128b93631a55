"""A room: a worker process that several versions share. Forked by `fork_server.py`.

Each version is a tenant: a worker in all but the process, with sockets, a page and lanes of its own. What a
worker does to its process (the working directory, the search path, plain names of modules) a tenant leaves
out: only archives without Python of their own come here.

The server sends each tenant over the room socket, as one message with its three descriptors: `<number>
<token of the log>`. A tenant ends when the server closes its sockets; the room answers `<number> <exit code>`
once its memory is free. The process ends when the server closes the room socket.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torchere.handlers.archive_import import forget_archive
from torchere.serving.errors import LoadFailed
from torchere.serving.logs.worker_lines import WorkerFormatter
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.host import HandlerHost
from torchere.serving.workers.process import SWITCH_INTERVAL_S, WorkerMain, begin

logger = logging.getLogger(__name__)

TENANT_DESCRIPTORS = 3  # data socket, control socket, page
MAX_TENANT_BYTES = 64  # of the message
_here = threading.local()  # `origin`: the version that the thread belongs to


def origin_of_thread() -> Mapping[str, str]:
    """What log records of the calling thread say of where they came from; empty where that is not known."""
    return getattr(_here, "origin", {})


class Tenant(WorkerMain):
    """A worker of one version without the process."""

    def live(self) -> int:
        """Serve until the server closes a socket, and free all that was loaded; returns an exit code."""
        code = 0
        try:
            self.serve()
        except OSError:  # the server has closed the other end
            pass
        except Exception:  # a bug or a bad message: the mates go on
            logger.exception("a version in a shared process was lost")
            code = 1
        self._leave()
        return code

    def _leave(self) -> None:
        self.leaving = True
        for lane in list(self._lanes):
            with suppress(OSError):
                lane.data.shutdown(socket.SHUT_RD)  # one that waits for a batch finds the end of the stream
        if self._bring_up is not None:
            self._bring_up.join()
        for lane in list(self._lanes):
            if not lane.serves:
                lane.end()
            lane.join()
        self.close_sockets()
        self._lanes.clear()
        if self._spec is None:
            os.close(self._page_descriptor)
        else:
            self.page.close()
            forget_archive(self._spec.archive_dir)

    def enter_thread(self) -> None:
        """Let log records of the calling thread say which version they belong to."""
        spec = self._loaded_spec()
        _here.origin = {"model": spec.model_name, "version": spec.model_version}

    def _take_process(self, spec: LoadSpec, log_token: str) -> None:
        if not spec.shares_weights or spec.gpu_ids:
            raise RuntimeError("only a version whose lanes share weights on the CPU may share a process")
        self.enter_thread()

    def _own_process(self, host: HandlerHost) -> None:
        pass  # it does not

    def _take_step(self, step: Callable[[], None]) -> bool:
        self.enter_thread()
        try:
            return super()._take_step(step)
        except OSError:  # the server is gone
            return False

    def _load(self, gpu_ids: Sequence[int | None]) -> None:
        super()._load(gpu_ids)
        if not self._models.shares_all:
            # It keeps a state between requests, which must not be lost because a mate crashes.
            self.needs_own_process = True
            spec = self._loaded_spec()
            raise LoadFailed.of(spec.model_name, spec.model_version, "the model changes itself")

    def _tidy(self, *, thaw: bool = False) -> None:
        # Not frozen: the fork server has frozen what is common, and what a tenant leaves must be found.
        gc.collect()


class RoomMain:
    """What a room holds. The main thread takes tenants in; each has threads of its own."""

    def __init__(self, server: socket.socket, lines: WorkerFormatter) -> None:
        self._server = server
        self._lines = lines
        self._tenants: dict[int, Tenant] = {}
        os.register_at_fork(after_in_child=self._close_all)

    def serve(self) -> None:
        """Take tenants in until the server closes the socket."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._server, MAX_TENANT_BYTES, TENANT_DESCRIPTORS)
            if not message:
                return
            number, self._lines.token = int(message.split()[0]), message.split()[1].decode()
            self._take_in(number, descriptors)

    def _take_in(self, number: int, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if len(descriptors) != TENANT_DESCRIPTORS:
            logger.error("a version can't share this process: %s", os.strerror(errno.EMFILE))
            for descriptor in descriptors:
                os.close(descriptor)
            self._report(number, 1)
            return
        lanes, control, page = descriptors
        tenant = Tenant(socket.socket(fileno=lanes), socket.socket(fileno=control), page, self._lines)
        self._tenants[number] = tenant
        try:
            threading.Thread(target=self._host, args=(number,), name=f"tenant-{number}", daemon=True).start()
        except RuntimeError as err:  # the system has no thread left
            logger.error("a version can't share this process: %s", err)
            self._tenants.pop(number).close_sockets()
            os.close(page)
            self._report(number, 1)

    def _host(self, number: int) -> None:
        """Be the thread of one tenant's control socket."""
        code = self._tenants[number].live()
        del self._tenants[number]
        gc.collect()
        self._report(number, code)

    def _report(self, number: int, code: int) -> None:
        with suppress(OSError):  # the server is gone
            self._server.send(b"%d %d" % (number, code))

    def _close_all(self) -> None:
        """In a process that a handler forked: the server must see ends of tenants although it lives."""
        self._server.close()
        for tenant in self._tenants.values():
            tenant.close_sockets()


def run(server: int) -> None:
    """Be the room at the other end of an inherited socket, until it closes."""
    lines = begin(origin_of_thread)
    os.set_inheritable(server, False)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with suppress(ConnectionError):  # the server is gone
        RoomMain(socket.socket(fileno=server), lines).serve()
