"""A room: a worker process that several versions share. Forked by `fork_server.py`.

Each version is a tenant: it works like a worker, with its own sockets, page and lanes, but not its own
process. A tenant does not change process-wide state as a worker does (the working directory, the search path,
plain names of modules), because only archives without Python code of their own share a room.

The server sends each tenant over the room socket, as one message with its three descriptors: `<number>
<log token>`. A tenant ends when the server closes its sockets; the room answers `<number> <exit code>` once
the tenant's memory is freed. The process ends when the server closes the room socket.
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
from torchere.serving.logs.worker_lines import WorkerFormatter
from torchere.serving.workers.process import SWITCH_INTERVAL_S, WorkerMain, begin

logger = logging.getLogger(__name__)

TENANT_DESCRIPTORS = 3  # lanes socket, control socket, page
MAX_TENANT_BYTES = 64  # of the message
_here = threading.local()  # `origin`: the log fields of the thread's version


def origin_of_thread() -> Mapping[str, str]:
    """Return the log fields for the version of the calling thread; empty if it is unknown."""
    return getattr(_here, "origin", {})


class Tenant(WorkerMain):
    """A worker of one version inside a shared process."""

    has_own_process = False

    def live(self) -> int:
        """Serve until the server closes a socket, and free the version; return an exit code."""
        code = 0
        try:
            self.serve()
        except OSError:  # the server has closed the other end
            pass
        except Exception:  # a bug or a bad message: the other tenants continue
            logger.exception("a version in a shared process was lost")
            code = 1
        self._leave()
        return code

    def _leave(self) -> None:
        self.leaving = True
        for lane in list(self._lanes):
            with suppress(OSError):
                lane.data.shutdown(socket.SHUT_RD)  # ends the wait of an idle lane for a batch
        if self._bring_up is not None:
            self._bring_up.join()
        for lane in list(self._lanes):
            if not lane.serves:
                lane.end()
            lane.thread.join()
        self.close_sockets()
        self._lanes.clear()
        if self._page_descriptor >= 0:  # nothing was loaded
            os.close(self._page_descriptor)
        else:
            self.page.close()
            forget_archive(self.spec.archive_dir)

    def enter_thread(self) -> None:
        """Tag log records of the calling thread with this version."""
        _here.origin = {"model": self.spec.model_name, "version": self.spec.model_version}

    def _take_step(self, step: Callable[[], None]) -> bool:
        self.enter_thread()
        try:
            return super()._take_step(step)
        except OSError:  # the server is gone
            return False

    def _load(self, gpu_ids: Sequence[int | None]) -> None:
        super()._load(gpu_ids)
        if not self._models.shares_all:
            # The model keeps state between requests, which must not be lost when another tenant crashes.
            self.needs_own_process = True
            raise self.spec.failed("the model changes itself")

    def _tidy(self, *, thaw: bool = False) -> None:
        # No `gc.freeze`: the fork server has frozen the shared objects, and the objects of tenants must stay
        # collectable.
        gc.collect()


class RoomMain:
    """The tenants of a room. The main thread accepts tenants; each has its own threads."""

    def __init__(self, server: socket.socket, lines: WorkerFormatter) -> None:
        self._server = server
        self._lines = lines
        self._tenants: dict[int, Tenant] = {}
        os.register_at_fork(after_in_child=self._close_all)

    def serve(self) -> None:
        """Accept tenants until the server closes the socket."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._server, MAX_TENANT_BYTES, TENANT_DESCRIPTORS)
            if not message:
                return
            number, self._lines.token = int(message.split()[0]), message.split()[1].decode()
            self._take_in(number, descriptors)

    def _take_in(self, number: int, descriptors: Sequence[int]) -> None:
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
        """Run one tenant in the calling thread, which serves its control socket, and report its end."""
        code = self._tenants[number].live()
        del self._tenants[number]
        gc.collect()
        self._report(number, code)

    def _report(self, number: int, code: int) -> None:
        with suppress(OSError):  # the server is gone
            self._server.send(b"%d %d" % (number, code))

    def _close_all(self) -> None:
        """Close all sockets in a forked child, so that the server sees the ends of the tenants themselves."""
        self._server.close()
        for tenant in self._tenants.values():
            tenant.close_sockets()


def run(server: int) -> None:
    """Run the room on an inherited socket until it closes."""
    lines = begin(origin_of_thread)
    os.set_inheritable(server, False)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with suppress(ConnectionError):  # the server is gone
        RoomMain(socket.socket(fileno=server), lines).serve()
