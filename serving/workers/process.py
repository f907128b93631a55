"""A worker process: the executors of one version (lanes), each with a handler of its own.

Forked by `fork_server.py`, or started as `python -m torchere.serving.workers.process FD FD FD`; `launch.py`
chooses. It ends when the server closes its control socket.

With one lane, the main thread is the lane, and the process has no other Python thread: TorchServe's handlers
rely on that (signal handlers, forks). If executors share one copy of the weights, each lane is a thread, and
the main thread serves the control socket only. Each lane waits for batches on its own data socket, so that no
batch is passed between threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
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
from concurrent.futures import Future

import torch

from torchere.handlers.loading.devices import kind_of
from torchere.handlers.loading.weights import SharedModels
from torchere.handlers.ts_compat import alias as ts_alias
from torchere.handlers.ts_compat.main import hide_launcher
from torchere.serving.errors import LoadFailed
from torchere.serving.logs.levels import set_level
from torchere.serving.logs.worker_lines import WorkerFormatter, print_whole_lines
from torchere.serving.process.allocator import keep_freed_memory, settle_loaded
from torchere.serving.process.signals import die_with_parent, leave
from torchere.serving.types import InferResponse
from torchere.serving.workers.concurrent_lane import ConcurrentLane
from torchere.serving.workers.devices import show_devices
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.frames import FrameReader, Parts, send_all
from torchere.serving.workers.host import HandlerHost
from torchere.serving.workers.lanes import (
    MAX_LANES,
    LanePage,
    next_run,
    receive_lanes,
    report_without_room,
)
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
    Run,
    Serving,
    WarmUp,
    control_to_worker,
    encode_frame,
    encode_report,
    pong_of,
    spec_of,
)
from torchere.serving.workers.oom import offer_to_oom_killer
from torchere.serving.workers.ranks import GroupHost
from torchere.serving.workers.sandbox import enter

HELD_LOOK_S = 0.005  # polling interval of a lane whose parts the server holds back
# By default CPython lets a thread keep the GIL for 5 ms, while the other lanes wait.
SWITCH_INTERVAL_S = 0.0005


class Lane:
    """Runs batches of its data socket, one at a time, in the thread that calls `run`.

    `number` is the index of its cell in the page. `thread` runs the commands of `call` and, after `serve`,
    batches; the only lane of a process has the main thread instead.
    """

    def __init__(self, number: int, data: socket.socket, host: HandlerHost, process: WorkerMain) -> None:
        self.number = number
        self.data = data
        self.batches = FrameReader(data)
        self.host = host
        self.serves = False
        self._threads = process.spec.intra_op_threads
        self._sending = threading.Lock()  # handlers may send parts from their own threads
        self._process = process
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._live, name=f"lane-{number}", daemon=True)

    def run(self, message: Run) -> None:
        """Run one batch and send its report."""
        process, page = self._process, self._process.page
        place, count = message.place, len(message.requests)

        def is_unwanted() -> bool:  # the context keeps it, so it must not refer to the request's values
            return process.leaving or page.all_cancelled(place, count)

        self._begin(message)
        self.take_share()

        def send_part(index: int, part: InferResponse) -> None:
            while page.is_held(place) and not is_unwanted():
                time.sleep(HELD_LOOK_S)
            self._begin(message)
            self.send([encode_frame(Partial(message.run_id, index, part))])

        if message.large:
            report = report_without_room(message)
        else:
            report = self.host.run(message.requests, send_part, page.cancelled(place, count), is_unwanted)
        self.send(encode_report(message.run_id, report, self.host.end_cause, page.to_server))

    def take_share(self) -> None:
        """Use as many intra-op threads as the page says, unless the handler has set a number itself."""
        threads = self._process.page.threads
        if threads not in (0, self._threads) and torch.get_num_threads() == self._threads:
            torch.set_num_threads(threads)
            self._threads = threads

    def send(self, parts: Parts) -> None:
        """Send a message to the server; any thread may call it."""
        with self._sending:
            send_all(self.data, parts)

    def next_batch(self) -> Run | None:
        """Wait for the next batch and return it; None: the server has ended the lane, or is gone."""
        return next_run(self.batches, self._process.page, self._begin)

    def _begin(self, message: Run) -> None:
        self._process.page.mark(self.number, message.run_id, time.monotonic())

    def close(self) -> None:
        """Close the data socket, which ends the wait of a thread for a batch."""
        with contextlib.suppress(OSError):
            self.data.shutdown(socket.SHUT_RDWR)
        self.data.close()

    def call(self, command: Callable[[], None]) -> None:
        """Run a command in the lane's thread and wait for it; re-raise its exception."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                command()
            except BaseException as err:  # any exception is passed to the caller
                done.set_exception(err)
            else:
                done.set_result(None)

        self._commands.put(run)
        done.result()

    def serve(self) -> None:
        """Let the lane's thread serve batches from now on."""
        self.serves = True
        self._commands.put(None)

    def end(self) -> None:
        """End the lane's thread, which must not serve yet."""
        self._commands.put(None)

    def _live(self) -> None:
        self._process.enter_thread()
        while (command := self._commands.get()) is not None:
            command()
            del command
        if self.serves:
            try:
                self._process.serve_lane(self)
            except BaseException:  # if only the lane ended, the server would keep sending it batches
                logging.getLogger(__name__).exception("a lane broke down, and its process ends")
                os._exit(1)


class WorkerMain:
    """The state of one worker process, and its handling of the server's messages.

    Args:
        lanes: the socket from which it receives the data sockets of its lanes.
        control: the socket for all control messages.
        page: the descriptor of the shared page; closed here.
        lines: the formatter of its log records.
    """

    has_own_process = True  # other versions have no lanes in it

    def __init__(
        self, lanes: socket.socket, control: socket.socket, page: int, lines: WorkerFormatter
    ) -> None:
        for descriptor in (lanes.fileno(), control.fileno(), page):
            os.set_inheritable(descriptor, False)
        self._lanes_socket, self._control = lanes, control
        self._orders = FrameReader(control)
        self._page_descriptor = page
        self._lines = lines
        self._sending_control = threading.Lock()
        self.spec: LoadSpec  # this and `page` are set by the first load
        self._models = SharedModels()
        self._lanes: list[Lane] = []
        self._group: GroupHost | None = None  # if the worker has several processes
        self._bring_up: threading.Thread | None = None  # the last step that ran while lanes served
        self.needs_own_process = False  # the version must not share a process with others
        self.leaving = False  # no further batch is begun
        self.page: LanePage

    def serve(self) -> None:
        """Answer messages until the server closes a socket."""
        while not self._lanes:  # LogLevel messages may arrive before Load
            if not self._obey_next():
                return
        if self.spec.shares_weights:
            while self._obey_next():
                pass
        elif self.spec.at_once > 1:
            lane = self._lanes[0]
            while not lane.serves:
                if not self._obey_next():
                    return
            ConcurrentLane(lane, self.page, self._control, self._obey_waiting).serve()
        else:
            self._serve_alone()
        if self._group is not None:
            self._group.close()

    def _obey_waiting(self) -> bool:
        while (goes_on := self._obey_next()) and self._orders.has_more:
            pass
        return goes_on

    def _serve_alone(self) -> None:
        """Serve as the only lane: handle control messages, and run batches between them."""
        poll = select.poll()
        lane = self._lanes[0]
        poll.register(lane.data, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        control = self._control.fileno()
        while True:
            if not lane.batches.has_more:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if control in ready:
                    if not self._obey_waiting():
                        return
                    continue
            batch = lane.next_batch()
            if batch is None:
                return
            lane.run(batch)
            del batch  # otherwise its values stay in memory together with those of the next one
            if lane.host.end_cause:  # the server starts another worker instead
                return

    def enter_thread(self) -> None:
        """Prepare the calling thread to be a lane."""

    def serve_lane(self, lane: Lane) -> None:
        """Run batches in a lane's own thread, until the lane is retired or the server is gone."""
        torch.get_num_threads()  # a thread's first use of torch takes over the number last set in any thread
        torch.set_num_threads(self.spec.intra_op_threads)
        while not self.leaving:
            batch = lane.next_batch()
            if batch is None:
                self._retire(lane)
                return
            try:
                lane.run(batch)
            except OSError:  # the server is gone
                return
            del batch  # otherwise its tensors stay alive while the lane is idle
            if lane.host.end_cause:
                self.leaving = True
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_RD)  # ends the main thread, and with it the process

    def _retire(self, lane: Lane) -> None:
        if self.leaving:
            return
        self._lanes.remove(lane)
        lane.close()
        del lane.host
        self._tidy(thaw=True)  # otherwise reference cycles of its handler would stay

    def _obey_next(self) -> bool:
        payload = self._orders.next()
        return payload is not None and self._obey(control_to_worker.decode(payload))

    def _obey(self, message: ControlToWorker) -> bool:
        if isinstance(message, Ping):
            if self._group is None:
                hosts = [getattr(lane, "host", None) for lane in list(self._lanes)]  # a retired lane has none
                self._send_control(pong_of([each for host in hosts if host for each in host.drain_metrics()]))
            else:
                self._group.ping()
        elif isinstance(message, LogLevel):
            set_level(message.logger, message.level)
            if self._group is not None:
                self._group.tell(message)
        elif isinstance(message, Load):
            self.spec = spec_of(message)
            self.page = LanePage(self._page_descriptor, self.spec.most_requests)
            os.close(self._page_descriptor)
            self._page_descriptor = -1
            return self._step(lambda: self._load_first(message.gpu_ids, message.log_token))
        elif isinstance(message, AddLanes):
            return self._step(lambda: self._load(message.gpu_ids))
        elif isinstance(message, WarmUp):
            return self._step(self._warm_up)
        return True

    def _step(self, step: Callable[[], None]) -> bool:
        """Run a load or warm-up step; while lanes serve, in a thread, so that messages are not delayed."""
        if not any(lane.serves for lane in self._lanes) or not self.spec.shares_weights:
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

    def _take_process(self, log_token: str) -> None:
        """Apply the process-wide settings of this version, which the process hosts alone."""
        self._lines.token = log_token
        stand_in(self.spec.archive_dir)
        if self.spec.shares_weights:
            sys.setswitchinterval(SWITCH_INTERVAL_S)

    def _load_first(self, gpu_ids: Sequence[int | None], log_token: str) -> None:
        """Take the process for its version, enter the sandbox, and load the first lanes."""
        spec, failed = self.spec, "the unpacked archive can't be used (does something delete it?)"
        try:
            if self.has_own_process:
                self._take_process(log_token)
            if spec.sandbox is not None:
                failed = "the worker can't enter its sandbox"
                enter(spec.sandbox)
        except OSError as err:
            raise spec.failed(f"{failed}: {err}") from err
        self._load(gpu_ids)

    def _load(self, gpu_ids: Sequence[int | None]) -> None:
        """Load a lane for each GPU in turn: the first one loads the weights that the others share."""
        spec = self.spec
        sockets = receive_lanes(self._lanes_socket, len(gpu_ids), spec)
        for gpu_id in gpu_ids:
            host = self._host_of(spec, gpu_id)
            if self.has_own_process:
                host.own_process()
            number = min(set(range(MAX_LANES)) - {lane.number for lane in self._lanes})
            lane = Lane(number, sockets.pop(0), host, self)
            self._lanes.append(lane)
            if not spec.shares_weights:
                host.load()
                continue
            try:
                lane.thread.start()
            except RuntimeError as err:  # the system has no thread left
                raise spec.failed(str(err)) from err
            lane.call(host.load)

    def _host_of(self, spec: LoadSpec, gpu_id: int | None) -> HandlerHost:
        if spec.is_group:
            self._group = GroupHost(spec, gpu_id, self._models, self._send_control)
            return self._group
        if spec.devices > 1:
            show_devices(spec, gpu_id, kind_of(spec.model_config))
            gpu_id = None if gpu_id is None else 0
        return HandlerHost(spec, gpu_id, self._models)

    def close_sockets(self) -> None:
        """Close all sockets in a forked child, so that the server sees the end of the worker itself."""
        for lane in list(self._lanes):
            lane.data.close()
        self._lanes_socket.close()
        self._control.close()

    def _warm_up(self) -> None:
        fresh = [lane for lane in self._lanes if not lane.serves]
        for lane in fresh:
            if self.spec.shares_weights:
                lane.call(lane.host.warm_up)
                lane.serve()
            else:
                lane.host.warm_up()
                lane.serves = True
            self._send_control(Serving())
        self._tidy()

    def _tidy(self, *, thaw: bool = False) -> None:
        settle_loaded(thaw=thaw)

    def _send_control(self, message: Message) -> None:
        frame = encode_frame(message)
        with self._sending_control:
            self._control.sendall(frame)


def stand_in(archive_dir: str) -> None:
    """Make an archive's folder the current one, also for multiprocessing, and add it to `PYTHONPATH`."""
    os.chdir(archive_dir)  # handlers open files of their archive by bare name
    # multiprocessing starts its processes in the directory that was the current one when it was imported.
    multiprocessing.process.ORIGINAL_DIR = archive_dir  # type: ignore[attr-defined]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), archive_dir]))


def settle_in() -> None:
    """Prepare a process that will run a handler."""
    die_with_parent()
    print_whole_lines()
    offer_to_oom_killer()
    hide_launcher()
    faulthandler.enable()  # logs a traceback at a crash in native code
    ts_alias.install()


def begin(origin: Callable[[], Mapping[str, str]] = dict) -> WorkerFormatter:
    """Do the common set-up of a worker process; return the formatter, with `origin`, of its log records."""
    settle_in()
    lines, to_server = WorkerFormatter(origin), logging.StreamHandler()
    to_server.setFormatter(lines)
    logging.basicConfig(level=logging.INFO, handlers=[to_server])
    logging.captureWarnings(True)  # as records: the server drops those that another worker has just sent
    return lines


def run(lanes: int, control: int, page: int) -> None:
    """Run the worker on inherited sockets until one of them closes."""
    lines = begin()
    worker = WorkerMain(socket.socket(fileno=lanes), socket.socket(fileno=control), page, lines)
    os.register_at_fork(after_in_child=worker.close_sockets)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server is gone, so the worker ends
        worker.serve()


def main() -> None:
    """Run a worker in a fresh interpreter; the arguments are the numbers of the inherited descriptors."""
    keep_freed_memory(os.environ)
    # The variable is for this process only: processes that the handler starts must not inherit it.
    os.environ.pop("PYTHONSAFEPATH", None)
    run(*map(int, sys.argv[1:4]))
    if threading.active_count() > 1:  # the interpreter can't end lanes inside native code
        leave(0)


if __name__ == "__main__":
    main()
