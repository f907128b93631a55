"""Runs and watches the ranks of a further machine of a rank group, for `torchere join`.

The process dials the leader, unpacks the leader's archive from its own model store, and forks the ranks, as
rank 0 does on its machine. Each rank has its own connection to rank 0 (`machines.py`). This process keeps it
open, too, to tell the leader how the rank ended. When a rank or the leader is gone, all ranks here are ended
and the leader is dialled again: it is the leader's pool that restarts the group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import msgspec
import numpy as np
import torch

from torchere.handlers.loading.devices import kind_of
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import ModelNotFound, ServingError
from torchere.serving.process.signals import live
from torchere.serving.store.package import OpenedArchive, StoredArchive, store_of
from torchere.serving.store.url_rules import is_remote
from torchere.serving.workers.devices import counted_kind, gpu_count
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.machines import Refused, Welcome, dial
from torchere.serving.workers.messages import LoadError, RankLost, encode_frame, spec_of
from torchere.serving.workers.process import settle_in, stand_in
from torchere.serving.workers.rank import prepare_to_fork, serve_rank, use_batch_policy
from torchere.serving.workers.ranks import ENDING_S
from torchere.serving.workers.sandbox import enter, sandbox_of
from torchere.serving.workers.spawn import worker_environment

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # between two attempts to reach the leader, which listens only while it gathers its group
REFUSED_RETRY_S = 5.0  # after a refusal, which an operator has to see to
_LOOK_S = 0.2
_GONE = getattr(select, "POLLRDHUP", select.POLLHUP)


class Member:
    """This machine's part in the groups of one leader. Runs in a process that has no other thread.

    Args:
        settings: the model store, the sandbox and the limits are those of a server.
        host: the leader's host.
        port: the port of the leader's rendezvous.
        secret: see `secret_of`.

    Raises:
        ServingError: the settings are unusable.
    """

    def __init__(self, settings: ServerSettings, host: str, port: int, secret: bytes) -> None:
        self._settings = settings
        self._host = host
        self._port = port
        self._secret = secret
        self._store = store_of(settings)
        self._sandbox = sandbox_of(settings)
        self._environment = worker_environment(settings.env_vars_hidden_from_workers, settings)
        del self._environment["PYTHONSAFEPATH"]  # processes that a handler starts must not inherit it
        self._stored: StoredArchive | None = None  # the last archive, which the next group usually uses, too
        self._said = ""

    def serve(self) -> NoReturn:
        """Take part in one group after the other, until a signal ends the process."""
        try:
            while True:
                time.sleep(self._serve_once())
        finally:
            self._store.close()

    def _serve_once(self) -> float:
        """Take part in one group, if there is one; return the seconds until the next attempt."""
        where = f"{self._host}:{self._port}"
        try:
            connections, welcome = dial(self._host, self._port, self._secret)
        except OSError as err:
            self._say(logging.INFO, f"waiting for the leader at {where}: {err.strerror or err}")
            return RETRY_S
        except Refused as err:
            self._say(logging.ERROR, f"not admitted at {where}: {err}")
            return REFUSED_RETRY_S
        self._say(logging.INFO, f"joined {welcome.load.spec.model_name} at {where} as machine {welcome.at}")
        try:
            self._take_part(connections, welcome)
        finally:
            for connection in connections:
                connection.close()
        self._say(logging.INFO, f"the group at {where} has ended")
        return RETRY_S

    def _say(self, level: int, text: str) -> None:
        """Log the text unless the last attempt ended with the same one."""
        if text != self._said:
            logger.log(level, "%s", text)
        self._said = text

    def _take_part(self, connections: Sequence[socket.socket], welcome: Welcome) -> None:
        try:
            spec = self._spec_of(welcome, len(connections))
        except ServingError as err:
            logger.error("can't load %s: %s", welcome.archive, err.full_text)
            with contextlib.suppress(OSError):
                connections[0].sendall(encode_frame(LoadError(err.full_text, False)))
                connections[0].recv(1)  # the leader reads it, and ends the group
            return
        prepare_to_fork(spec)
        ranks: dict[int, socket.socket] = {}
        try:
            for local, connection in enumerate(connections):
                ranks[self._fork(spec, local, connections)] = connection
            self._watch(ranks, welcome.at * len(connections))
        finally:
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            _end(list(ranks))

    def _spec_of(self, welcome: Welcome, ranks: int) -> LoadSpec:
        """Unpack the leader's archive, and return the spec of its load here.

        Raises:
            ServingError: this machine has another archive, or none, or too few GPUs.
        """
        needed = len(welcome.load.gpu_ids)
        if self._stored is None or self._stored.fingerprint != welcome.fingerprint:
            self._unpack(welcome)
        assert self._stored is not None
        directory = str(self._stored.directory)
        sandbox = self._sandbox and replace(self._sandbox, archive=directory, gpu=bool(needed))
        spec = replace(welcome.load.spec, archive_dir=directory, ranks=ranks, sandbox=sandbox)
        spec = spec_of(msgspec.structs.replace(welcome.load, spec=spec))
        kind = counted_kind(kind_of(spec.model_config))
        if needed and (there := gpu_count(self._settings.max_gpus, kind)) < needed:
            raise ServingError(f"The machine has {there} GPUs, expected {needed}.")
        return replace(spec, gpu_ids=tuple(range(needed)))

    def _unpack(self, welcome: Welcome) -> None:
        if self._stored is not None:
            self._store.remove(self._stored)
            self._stored = None
        opened = self._opened(welcome)
        try:
            stored = self._store.unpack(welcome.archive, opened)
        finally:
            opened.close()
        if stored.fingerprint != welcome.fingerprint:
            self._store.remove(stored)
            raise ServingError(f"{welcome.archive} differs from the leader's.", "Give both the same archive.")
        self._stored = stored

    def _opened(self, welcome: Welcome) -> OpenedArchive:
        try:
            return self._store.open(welcome.archive)
        except ModelNotFound:
            if not is_remote(welcome.url):
                raise
            path = self._store.download(welcome.url).path
            opened = self._store.open(welcome.archive)
            try:
                self._store.check_weights(self._store.config_of(opened.archive))
            except ServingError:
                opened.close()
                self._store.delete(path)
                raise
            return opened

    def _fork(self, spec: LoadSpec, local: int, connections: Sequence[socket.socket]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for signal_number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signal_number, signal.SIG_DFL)
            for at, connection in enumerate(connections):
                if at != local:
                    connection.close()
            live(partial(_be_rank, parent, spec, local, connections[local], self._environment))
        return pid

    def _watch(self, ranks: dict[int, socket.socket], first: int) -> None:
        """Return when a rank or the leader is gone; tell the leader how a rank has ended."""
        poll = select.poll()
        for connection in ranks.values():
            poll.register(connection, _GONE)
        while not poll.poll(_LOOK_S * 1000):
            for number, (pid, connection) in enumerate(ranks.items(), first):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                code = os.waitstatus_to_exitcode(status)
                logger.error("rank %d has ended with status %d", number, code)
                with contextlib.suppress(OSError):
                    connection.sendall(encode_frame(RankLost(number, code)))
                del ranks[pid]
                _kill_group(pid)
                return


def _be_rank(
    parent: int, spec: LoadSpec, local: int, connection: socket.socket, environment: Mapping[str, str]
) -> None:
    """Serve as a rank in a process that was just forked, after the set-up that a worker process has."""
    os.setsid()  # processes that its handler starts are ended with it
    os.environ.clear()
    os.environ.update(environment)
    os.environ["TS_DECODE_INPUT_REQUEST"] = str(spec.decode_input).lower()  # the leader's setting counts
    settle_in()
    if not spec.gpu_ids:
        use_batch_policy()
    torch.seed()  # otherwise all ranks would draw the same random numbers
    np.random.seed()
    stand_in(spec.archive_dir)
    if spec.sandbox is not None:
        try:
            enter(spec.sandbox)
        except OSError as err:
            detail = f"the rank can't enter its sandbox: {err}"
            connection.sendall(encode_frame(LoadError(detail, False)))
            return
    serve_rank(parent, spec, local, connection, local if spec.gpu_ids else None)


def _end(pids: Sequence[int]) -> None:
    """End ranks whose connections are shut down; kill those that are left after `ENDING_S`."""
    limit_s = time.monotonic() + ENDING_S
    left = list(pids)
    while left and time.monotonic() < limit_s:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.01)
    for pid in pids:
        _kill_group(pid)
    for pid in left:
        os.waitpid(pid, 0)


def _kill_group(pid: int) -> None:
    """Kill a rank and the processes that its handler has started, if any are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
