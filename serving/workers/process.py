"""A worker process: the lanes of one version, each with a handler, behind two sockets of the server.

Forked by `fork_server.py`, or started as `python -m torchere.serving.workers.process FD FD FD`; `launch.py`
chooses. It ends when the server closes its control socket.

With one lane, the main thread is the lane, and the process has no other Python thread: what TorchServe's
handlers rely on (signal handlers, forks). Where executors share one copy of the weights, each lane is a
thread and the main thread serves the control socket alone. Each lane waits for batches on a data socket of
its own, so that no batch crosses threads.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import logging
import multiprocessing.process
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from torchere.handlers import ts_alias
from torchere.handlers.shared_models import SharedModels
from torchere.serving.errors import LoadFailed
from torchere.serving.logs.worker_lines import WorkerFormatter
from torchere.serving.process.allocator import keep_freed_memory
from torchere.serving.process.parent import die_with_parent
from torchere.serving.types import InferResponse
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.frames import FrameReader, Parts, send_all
from torchere.serving.workers.host import HandlerHost
from torchere.serving.workers.lanes import LANES_A_MESSAGE, MAX_LANES, LanePage, requests_of
from torchere.serving.workers.messages import (
    AddLanes,
    ControlToWorker,
    Load,
    Loaded,
    LoadError,
    LogLevel,
    Message,
    Partial,
    Ping,
    Pong,
    Run,
    Serving,
    WarmUp,
    control_to_worker,
    data_to_worker,
    encode_frame,
    encode_report,
    raw_bytes,
    run_with_raw,
)

# Added to its score of the kernel's out-of-memory killer: a worker comes back, the server does not.
OOM_SCORE_ADDED = 300
HELD_LOOK_S = 0.005  # between looks of a lane whose parts the server holds back
# CPython lets a thread keep the GIL for 5 ms by default, for which the other lanes would wait.
SWITCH_INTERVAL_S = 0.0005


class Lane:
    """Runs batches, one at a time, in the thread that calls `run`.

    Args:
        number: of its cell in the page.
        data: the socket of its batches; closed by `close`.
        host: its handler.
        process: which it belongs to.
    """

    def __init__(self, number: int, data: socket.socket, host: HandlerHost, process: WorkerMain) -> None:
        self.number = number
        self.data = data
        self.batches = FrameReader(data)
        self.host = host
        self.serves = False
        self._sending = threading.Lock()  # handlers send parts from threads of theirs
        self._process = process
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"lane-{number}", daemon=True)

    def run(self, message: Run) -> None:
        """Run one batch and send its report."""
        process, place, count = self._process, message.place, len(message.requests)
        page = process.page

        def is_unwanted() -> bool:
            return process.leaving or page.all_cancelled(place, count)

        page.mark(self.number, message.run_id, time.monotonic())

        def send_part(index: int, part: InferResponse) -> None:
            while page.is_held(place) and not is_unwanted():
                time.sleep(HELD_LOOK_S)
            page.mark(self.number, message.run_id, time.monotonic())
            self._send([encode_frame(Partial(message.run_id, index, part))])

        report = self.host.run(
            message.requests,
            send_part,
            page.cancelled(place, count),
            is_unwanted,
        )
        self._send(encode_report(message.run_id, report, self.host.has_lost_its_gpu))

    def _send(self, parts: Parts) -> None:
        with self._sending:
            send_all(self.data, parts)

    def next_batch(self) -> Run | None:
        """Wait for its next batch; None: the server has ended the lane, or is gone."""
        try:
            payload = self.batches.next()
            if payload is None:
                return None
            run = data_to_worker.decode(payload)
            if not run.large:
                return run
            raw = self.batches.raw(raw_bytes(run))
        except OSError:  # reset
            return None
        return None if raw is None else run_with_raw(run, raw)

    def close(self) -> None:
        """Close its socket, so that a thread that waits for a batch finds its end."""
        with contextlib.suppress(OSError):
            self.data.shutdown(socket.SHUT_RDWR)
        self.data.close()

    def start(self) -> None:
        """Give it a thread of its own, which does what `call` gives it and then serves batches.

        Raises:
            RuntimeError: the system has no thread left.
        """
        self._thread.start()

    def call(self, command: Callable[[], None]) -> None:
        """Run a command in its thread and wait for it; raises what the command raises."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                command()
            except BaseException as err:  # carried to the caller, whatever it is
                done.put(err)
            else:
                done.put(None)

        self._commands.put(run)
        if (err := done.get()) is not None:
            raise err

    def serve(self) -> None:
        """Have its thread serve batches from now on."""
        self.serves = True
        self._commands.put(None)

    def end(self) -> None:
        """End its thread, which does not serve yet."""
        self._commands.put(None)

    def join(self) -> None:
        """Wait for the end of its thread."""
        self._thread.join()

    def _live(self) -> None:
        self._process.enter_thread()
        while (command := self._commands.get()) is not None:
            command()
            del command
        if self.serves:
            try:
                self._process.serve_lane(self)
            except BaseException:  # a lane that ended alone would be counted on for ever
                logging.getLogger(__name__).exception("a lane broke down, and its process ends")
                os._exit(1)


class WorkerMain:
    """What one worker process holds, and the server's messages to it.

    Args:
        lanes: the socket that brings the data sockets of its lanes.
        control: the socket of everything else.
        page: the descriptor of the shared page; closed here.
        lines: gives its log records their form.
    """

    def __init__(
        self, lanes: socket.socket, control: socket.socket, page: int, lines: WorkerFormatter
    ) -> None:
        self._lanes_socket, self._control = lanes, control
        self._orders = FrameReader(control)
        self._page_descriptor = page
        self._lines = lines
        self._sending_control = threading.Lock()
        self._spec: LoadSpec | None = None
        self._models = SharedModels()
        self._lanes: list[Lane] = []
        self._bring_up: threading.Thread | None = None  # the last step that was taken beside lanes that serve
        self.needs_own_process = False  # what it was to load may not share one with other versions
        self.leaving = False  # no further batch is begun
        self.page: LanePage

    def serve(self) -> None:
        """Answer messages until the server closes a socket."""
        while self._spec is None:  # levels of loggers come before Load
            if not self._obey_next():
                return
        if self._loaded_spec().shares_weights:
            while self._obey_next():
                pass
        else:
            self._serve_alone()

    def _serve_alone(self) -> None:
        """Be the only lane: obey orders, and run batches between them."""
        poll = select.poll()
        lane = self._lanes[0]
        poll.register(lane.data, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        control = self._control.fileno()
        while True:
            if not lane.batches.has_more:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if control in ready:
                    if not self._obey_next():
                        return
                    while self._orders.has_more:
                        if not self._obey_next():
                            return
                    continue
            batch = lane.next_batch()
            if batch is None:
                return
            lane.run(batch)
            if lane.host.has_lost_its_gpu:  # another worker takes the place of this one
                return

    def enter_thread(self) -> None:
        """Prepare the calling thread, which is a lane's from now on."""

    def serve_lane(self, lane: Lane) -> None:
        """Run batches in the thread of one of several lanes, until it is retired or the server is gone."""
        torch.get_num_threads()  # a thread's first use of torch takes the number that was set last anywhere
        torch.set_num_threads(self._loaded_spec().intra_op_threads)
        while not self.leaving:
            batch = lane.next_batch()
            if batch is None:
                self._retire(lane)
                return
            try:
                lane.run(batch)
            except OSError:  # the server is gone
                return
            del batch  # or its tensors stay alive while the lane is idle
            if lane.host.has_lost_its_gpu:
                self.leaving = True
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_RD)  # ends the main thread, and with it the process

    def _retire(self, lane: Lane) -> None:
        if self.leaving:
            return
        self._lanes.remove(lane)
        lane.close()
        del lane.host
        self._tidy(thaw=True)  # or the circles of its handler would stay

    def _obey_next(self) -> bool:
        payload = self._orders.next()
        return payload is not None and self._obey(control_to_worker.decode(payload))

    def _obey(self, message: ControlToWorker) -> bool:
        if isinstance(message, Ping):
            self._send_control(Pong())
        elif isinstance(message, LogLevel):
            logging.getLogger(message.logger or None).setLevel(message.level)
        elif isinstance(message, Load):
            self._spec = spec = _whole_spec(message)
            self.page = LanePage(self._page_descriptor, requests_of(spec.batch_size))
            os.close(self._page_descriptor)
            self._take_process(spec, message.log_token)
            return self._step(lambda: self._load(message.gpu_ids))
        elif isinstance(message, AddLanes):
            return self._step(lambda: self._load(message.gpu_ids))
        elif isinstance(message, WarmUp):
            return self._step(self._warm_up)
        return True

    def _step(self, step: Callable[[], None]) -> bool:
        """Take a step of bringing lanes up; beside lanes that serve, without keeping orders waiting."""
        if not any(lane.serves for lane in self._lanes) or not self._loaded_spec().shares_weights:
            return self._take_step(step)
        self._bring_up = threading.Thread(target=self._take_step, args=(step,), name="bring-up", daemon=True)
        self._bring_up.start()
        return True

    def _take_step(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except LoadFailed as err:
            for lane in [lane for lane in self._lanes if not lane.serves]:
                self._lanes.remove(lane)
                lane.end()
                lane.close()
            self._send_control(LoadError(err.detail, err.out_of_memory, self.needs_own_process))
            return bool(self._lanes)
        self._send_control(Loaded())
        return True

    def _take_process(self, spec: LoadSpec, log_token: str) -> None:
        """Set what belongs to the whole process: it hosts this version and no other."""
        self._lines.token = log_token
        os.chdir(spec.archive_dir)  # handlers open files of their archive by bare name
        # Processes that multiprocessing spawns begin where it was imported: with us, before that.
        multiprocessing.process.ORIGINAL_DIR = spec.archive_dir  # type: ignore[attr-defined]
        search_path = [os.environ.get("PYTHONPATH"), spec.archive_dir]  # for Python processes of the handler
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
        if spec.shares_weights:
            sys.setswitchinterval(SWITCH_INTERVAL_S)

    def _load(self, gpu_ids: Sequence[int | None]) -> None:
        """Load a lane for each GPU. One after the other: the first loads the weights the others share."""
        spec = self._loaded_spec()
        sockets = self._receive_lanes(len(gpu_ids))
        for gpu_id in gpu_ids:
            host = HandlerHost(spec, gpu_id, self._models, alone=not spec.shares_weights)
            self._own_process(host)
            number = min(set(range(MAX_LANES)) - {lane.number for lane in self._lanes})
            lane = Lane(number, sockets.pop(0), host, self)
            self._lanes.append(lane)
            if not spec.shares_weights:
                host.load()
                continue
            try:
                lane.start()
            except RuntimeError as err:  # the system has no thread left
                raise LoadFailed.of(spec.model_name, spec.model_version, str(err)) from err
            lane.call(host.load)

    def _receive_lanes(self, count: int) -> list[socket.socket]:
        """Take the data sockets of as many lanes from the server."""
        descriptors: list[int] = []
        while len(descriptors) < count:
            message, more, _, _ = socket.recv_fds(self._lanes_socket, 1, LANES_A_MESSAGE)
            if not message:
                raise ConnectionResetError("the server is gone")
            descriptors += more
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return [socket.socket(fileno=descriptor) for descriptor in descriptors]

    def close_sockets(self) -> None:
        """Close its sockets: the server must see its end although a child that a handler forked lives on."""
        for lane in list(self._lanes):
            lane.data.close()
        self._lanes_socket.close()
        self._control.close()

    def _own_process(self, host: HandlerHost) -> None:
        host.own_process()

    def _warm_up(self) -> None:
        fresh = [lane for lane in self._lanes if not lane.serves]
        for lane in fresh:
            if self._loaded_spec().shares_weights:
                lane.call(lane.host.warm_up)
                lane.serve()
            else:
                lane.host.warm_up()
                lane.serves = True
            self._send_control(Serving())
        self._tidy()

    def _tidy(self, *, thaw: bool = False) -> None:
        """Spare the collector what is loaded and stays: it need not walk it with every batch.

        Garbage goes first, or it would stay, with all that handlers left in circles. What the fork server has
        frozen stays frozen: a walk over it would copy 37 MiB of pages that the workers share.
        """
        if thaw:
            gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _loaded_spec(self) -> LoadSpec:
        if self._spec is None:
            raise RuntimeError("the server sent something else before Load")
        return self._spec

    def _send_control(self, message: Message) -> None:
        frame = encode_frame(message)
        with self._sending_control:
            self._control.sendall(frame)


def _whole_spec(message: Load) -> LoadSpec:
    if not message.config_file:
        return message.spec
    from torchere.serving.config.bounded_yaml import read_yaml  # noqa: PLC0415 - hardly ever needed

    text = Path(message.spec.archive_dir, message.config_file).read_text(encoding="utf-8")
    return replace(message.spec, model_config=read_yaml(text))


def begin(origin: Callable[[], Mapping[str, str]] = dict) -> WorkerFormatter:
    """Do what every worker process does first; returns what gives its log records their form.

    `origin`: see `WorkerFormatter`.
    """
    die_with_parent()
    _offer_to_oom_killer()
    faulthandler.enable()  # a crash in native code leaves a trace in the log
    to_server = logging.StreamHandler()
    lines = WorkerFormatter(origin)
    to_server.setFormatter(lines)
    logging.basicConfig(level=logging.INFO, handlers=[to_server])
    ts_alias.install()
    return lines


def run(lanes: int, control: int, page: int) -> None:
    """Be the worker at the other end of inherited sockets, until one of them closes."""
    lines = begin()
    sockets = socket.socket(fileno=lanes), socket.socket(fileno=control)
    os.set_inheritable(page, False)
    for each in sockets:
        each.set_inheritable(False)
    worker = WorkerMain(*sockets, page, lines)
    os.register_at_fork(after_in_child=worker.close_sockets)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server is gone; so are we
        worker.serve()


def _offer_to_oom_killer() -> None:
    """Have the kernel end this process rather than the server when memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):  # not on every system
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE_ADDED)))


def main() -> None:
    """Entry point of a fresh interpreter; the arguments are the numbers of the inherited descriptors."""
    keep_freed_memory(os.environ)
    os.environ.pop(
        "PYTHONSAFEPATH", None
    )  # ours alone: processes that the handler starts must not inherit it
    run(*map(int, sys.argv[1:4]))
    if threading.active_count() > 1:  # lanes may be inside native code, where an interpreter can't end them
        leave(0)


def leave(code: int) -> NoReturn:
    """End the process now, after the exit functions of the handler and with its output flushed."""
    with contextlib.suppress(Exception):  # user code, too
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # spawned by a handler, whose file it imports by its plain name
    ts_alias.install()
