"""A worker process: one handler, one socket, one batch at a time.

Forked by `fork_server.py`, or started as `python -m torchere.serving.execution.worker FD`; `launch.py` has
the choice. It ends when the socket closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import multiprocessing.process
import os
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

from torchere.handlers import ts_alias
from torchere.handlers.shared_models import SharedModels
from torchere.serving.errors import LoadFailed
from torchere.serving.execution.allocator import keep_freed_memory
from torchere.serving.execution.executor import LoadSpec
from torchere.serving.execution.frames import FrameReader
from torchere.serving.execution.host import HandlerHost
from torchere.serving.execution.parent import die_with_parent
from torchere.serving.execution.wire import (
    FromWorker,
    Load,
    Loaded,
    LoadError,
    Partial,
    Ping,
    Pong,
    Run,
    ToWorker,
    WarmUp,
    encode_frame,
    encode_report,
    to_worker_decoder,
)
from torchere.serving.telemetry.worker_lines import WorkerFormatter
from torchere.serving.types import InferResponse


class Worker:
    """Answers the messages of one server, in the thread that calls `serve`.

    `lines` gives its log records their form.
    """

    def __init__(self, connection: socket.socket, lines: WorkerFormatter) -> None:
        self._connection = connection
        self._lines = lines
        self._frames = FrameReader(connection)
        self._sending = threading.Lock()  # handlers send parts of answers from threads of theirs
        self._host: HandlerHost | None = None

    def serve(self) -> None:
        """Answer messages until the server closes the socket."""
        while (message := self._receive()) is not None:
            if not self._answer(message):
                return

    def _answer(self, message: ToWorker) -> bool:
        if isinstance(message, Run):
            self._run(message)
            return not self._loaded().has_lost_its_gpu  # another worker takes the place of this one
        if isinstance(message, Ping):
            self._send(Pong())
            return True
        try:
            if isinstance(message, Load):
                self._load(message)
            elif isinstance(message, WarmUp):
                self._loaded().warm_up()
                gc.collect()
                gc.freeze()  # what is loaded stays: the collector need not walk it with every batch
        except LoadFailed as err:
            self._send(LoadError(err.detail, err.out_of_memory))
            return False
        self._send(Loaded())
        return True

    def _load(self, message: Load) -> None:
        self._lines.token = message.log_token
        model_dir = message.spec.archive_dir
        os.chdir(model_dir)  # handlers open files of their archive by bare name
        # Processes that multiprocessing spawns begin where it was imported: with us, before that.
        multiprocessing.process.ORIGINAL_DIR = model_dir  # type: ignore[attr-defined]
        search_path = [os.environ.get("PYTHONPATH"), model_dir]  # for Python processes the handler starts
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
        self._host = HandlerHost(_whole_spec(message), message.gpu_id, SharedModels())
        self._host.own_process()
        self._host.load()

    def _run(self, message: Run) -> None:
        def send_partial(index: int, part: InferResponse) -> None:
            self._send(Partial(message.run_id, index, part))

        host = self._loaded()
        report = host.run(message.requests, send_partial)
        with self._sending:
            self._connection.sendall(encode_report(message.run_id, report, host.has_lost_its_gpu))

    def _loaded(self) -> HandlerHost:
        if self._host is None:
            raise RuntimeError("the server sent work before Load")
        return self._host

    def _send(self, message: FromWorker) -> None:
        frame = encode_frame(message)
        with self._sending:
            self._connection.sendall(frame)

    def _receive(self) -> ToWorker | None:
        payload = self._frames.next()
        return None if payload is None else to_worker_decoder.decode(payload)


def _whole_spec(message: Load) -> LoadSpec:
    if not message.config_file:
        return message.spec
    from torchere.serving.bounded_yaml import read_yaml  # noqa: PLC0415 - hardly ever needed

    text = Path(message.spec.archive_dir, message.config_file).read_text(encoding="utf-8")
    return replace(message.spec, model_config=read_yaml(text))


def run(descriptor: int) -> None:
    """Be the worker at the other end of an inherited socket, until it closes."""
    die_with_parent()
    faulthandler.enable()  # a crash in native code leaves a trace in the log
    to_server = logging.StreamHandler()
    lines = WorkerFormatter()
    to_server.setFormatter(lines)
    logging.basicConfig(level=logging.INFO, handlers=[to_server])
    ts_alias.install()
    connection = socket.socket(fileno=descriptor)
    # Or the server would not see it close as long as a process lives that the handler has started.
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server is gone; so are we
        Worker(connection, lines).serve()


def main() -> None:
    """Entry point of a fresh interpreter; the only argument is the number of the inherited socket."""
    keep_freed_memory(os.environ)
    os.environ.pop("PYTHONSAFEPATH", None)  # ours alone: what the handler starts must not inherit it
    run(int(sys.argv[1]))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # spawned by a handler, whose file it imports by its plain name
    ts_alias.install()
