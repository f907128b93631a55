"""The server's handle on one worker process: start it, talk to it, learn why it ended."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from torchere.serving.errors import LoadFailed
from torchere.serving.execution.executor import LoadSpec
from torchere.serving.execution.frames import FrameProtocol
from torchere.serving.execution.launch import Launched, Launcher
from torchere.serving.execution.loss import Loss, LossKind, loss_of_exit
from torchere.serving.execution.oom import OomWatch
from torchere.serving.execution.wire import (
    Done,
    Loaded,
    LoadError,
    Partial,
    Ping,
    Pong,
    Run,
    ToWorker,
    WarmUp,
    encode_frame,
    from_worker_decoder,
    load_of,
)
from torchere.serving.telemetry.worker_lines import MAX_LINE_BYTES, new_token, relay
from torchere.serving.turn_writes import TurnWrites
from torchere.serving.types import InferRequest

logger = logging.getLogger("torchere.worker")

ENDING_GRACE_S = 2.0  # to end by itself once its socket is closed
LAST_WORDS_S = 0.5  # for the rest of its output, where a process that it started keeps the pipe open
KILLED_GRACE_S = 10.0  # after SIGKILL: the kernel may take seconds to free much memory, on a GPU, too


class WorkerProcess:
    """One process that hosts one handler. Methods run on the event loop.

    `on_message` gets what it says about batches, and its signs of life. `on_gone` is called when its
    connection ends: nothing reaches it from then on. `lost` completes when the process has ended, too, which
    may be seconds later, and tells why.
    """

    def __init__(
        self,
        spec: LoadSpec,
        executor_id: int,
        gpu_id: int | None,
        launcher: Launcher,
        *,
        on_message: Callable[[Partial | Done | Pong], None],
        on_gone: Callable[[], None],
        oom: OomWatch,
    ) -> None:
        self._spec = spec
        self._launcher = launcher
        self._executor_id = executor_id
        self._gpu_id = gpu_id
        self._loop = asyncio.get_running_loop()
        self._launched: Launched | None = None
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._writes = TurnWrites()
        self._reply: asyncio.Future[None] | None = None  # of the step (load, warm-up) under way
        self._on_message = on_message
        self._on_gone = on_gone
        self._oom = oom
        self._killed: Loss | None = None  # by us, and why
        self._frames = FrameProtocol(self._on_frame, self._on_lost)
        self._log_token = new_token()
        self._output: asyncio.Task[None] | None = None
        self._reaper: asyncio.Task[None] | None = None
        self.lost: asyncio.Future[Loss] = self._loop.create_future()
        self.leaves = False  # it ends by itself, and has begun nothing that was sent behind its last answer

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self._launched.pid if self._launched else 0

    @property
    def reachable(self) -> bool:
        """Whether what is sent may arrive."""
        return self._transport is not None and not self._transport.is_closing()

    async def start(self) -> None:
        """Start the process and connect to it; the handler is not loaded yet.

        Raises:
            LoadFailed: the system would not start one.
        """
        try:
            self._launched = await self._launcher.launch()
            self._transport, _ = await self._loop.create_unix_connection(
                lambda: self._frames, sock=self._launched.connection
            )
            self._writes.begin(self._transport)
        except BaseException as err:  # the start may be given up meanwhile
            if self._launched is not None:
                self._launched.kill()
                self._launched.connection.close()
                self._launched.close()
                self._launched = None  # there is nothing that could be lost
            if isinstance(err, OSError):
                raise self._load_failed(f"the worker process could not be started: {err}") from err
            raise
        self._output = asyncio.ensure_future(self._log_output(self._launched.output))

    async def load(self, timeout_s: float) -> None:
        """Load the handler.

        Raises:
            LoadFailed: it would not load, in time or at all; the process is gone then.
        """
        await self._step(load_of(self._spec, self._gpu_id, self._log_token), timeout_s)

    async def warm_up(self, timeout_s: float) -> None:
        """Run the warm-up rows.

        Raises:
            LoadFailed: as `load`.
        """
        await self._step(WarmUp(), timeout_s)

    async def _step(self, message: ToWorker, timeout_s: float) -> None:
        if self.lost.done():  # since the step before, with nobody waiting
            raise self._load_failed(self.lost.result().cause)
        self._reply = self._loop.create_future()
        self._send(message)
        try:
            await asyncio.wait_for(self._reply, timeout_s)
        except asyncio.TimeoutError:
            cause = f"not loaded within startup_timeout={timeout_s:g} s"
            await self._kill_and_reap(Loss(LossKind.LOAD, cause))
            raise self._load_failed(cause) from None
        except BaseException:
            await self._kill_and_reap(Loss(LossKind.LOAD, "the load failed or was given up"))
            raise
        finally:
            self._reply = None

    def run(self, run_id: int, requests: Sequence[InferRequest]) -> None:
        """Send one batch; the worker runs it after those that were sent before.

        Raises:
            ValueError, MemoryError: the batch is too large to be sent.
        """
        self._send(Run(run_id, tuple(requests)))

    def ping(self) -> None:
        """Ask for a sign of life; the worker gives it when it is through with what was sent before."""
        self._send(Ping())

    @property
    def is_paused(self) -> bool:
        """Whether it has to wait with what it would send."""
        return self._is_paused

    def pause(self) -> bool:
        """Take no more of what it sends, so that it has to wait; False when it is paused already, or gone."""
        if self._is_paused or self._transport is None or self._transport.is_closing():
            return False
        self._transport.pause_reading()
        self._is_paused = True
        return True

    def resume(self) -> None:
        """Take what it sends again."""
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._is_paused = False

    def kill(self, loss: Loss) -> None:
        """End the process at once; `lost` tells when it is gone."""
        self._killed = self._killed or loss
        if self._launched is not None:
            self._launched.kill()

    async def _kill_and_reap(self, loss: Loss) -> None:
        self.kill(loss)
        try:
            await asyncio.wait_for(asyncio.shield(self.lost), KILLED_GRACE_S)
        except asyncio.TimeoutError:  # in a driver that hangs it takes no signal; nobody waits for that
            logger.error("process %d of worker %d does not end by SIGKILL", self.pid, self._executor_id)
            if not self.lost.done():
                self.lost.set_result(loss)

    async def stop(self) -> None:
        """Close its socket, which lets the process end by itself, and wait; kill it if it takes long."""
        self._killed = self._killed or Loss(LossKind.STOPPED, "stopped by the server")
        if self._transport is not None:
            self._transport.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.lost), ENDING_GRACE_S)
        except asyncio.TimeoutError:
            await self._kill_and_reap(Loss(LossKind.STOPPED, "did not stop when asked"))

    def _send(self, message: ToWorker) -> None:
        """Put a message on its way, unless the worker is gone."""
        if self.reachable:
            self._writes.write_promptly(encode_frame(message))

    def _on_frame(self, payload: memoryview) -> None:
        try:
            message = from_worker_decoder.decode(payload)
        except msgspec.MsgspecError as err:
            self.kill(Loss(LossKind.PROTOCOL, f"sent a frame that is not a message: {err}"))
            return
        if isinstance(message, (Done, Partial, Pong)):
            self._on_message(message)
        else:
            self._on_step(message)

    def _on_step(self, message: Loaded | LoadError) -> None:
        if self._reply is not None and not self._reply.done():
            if isinstance(message, Loaded):
                self._reply.set_result(None)
            else:
                self._reply.set_exception(self._load_failed(message.detail, message.out_of_memory))

    def _on_lost(self) -> None:
        self._on_gone()
        if self._frames.fault:
            self.kill(Loss(LossKind.PROTOCOL, self._frames.fault))
        self._reaper = asyncio.ensure_future(self._reap())

    async def _reap(self) -> None:
        """Wait for the process to end (it may have closed its socket only) and tell why it did."""
        if self._launched is None:
            return
        try:
            code = await asyncio.wait_for(asyncio.shield(self._launched.exit_code), ENDING_GRACE_S)
        except asyncio.TimeoutError:
            self.kill(Loss(LossKind.PROTOCOL, "closed its socket without ending"))
            code = await self._launched.exit_code
        loss = self._killed or loss_of_exit(code, code == -signal.SIGKILL and self._oom.claim())
        if self.leaves:  # its log says what the GPU said
            loss = Loss(LossKind.EXIT, "it lost its GPU, and ended")
        await self._read_out()
        if self._reply is not None and not self._reply.done():
            # A worker that is killed while it loads has mostly asked for more memory than there is.
            out_of_memory = code == -signal.SIGKILL and self._killed is None
            self._reply.set_exception(self._load_failed(f"{loss.cause} while it was loading", out_of_memory))
        if not self.lost.done():
            self.lost.set_result(loss)

    def _load_failed(self, detail: str, out_of_memory: bool = False) -> LoadFailed:
        return LoadFailed.of(self._spec.model_name, self._spec.model_version, detail, out_of_memory)

    async def _read_out(self) -> None:
        """Log what it printed last, but do not wait for a child it left behind with the pipe open."""
        if self._output is not None:
            await asyncio.wait({self._output}, timeout=LAST_WORDS_S)
            self._output.cancel()
        if self._launched is not None:
            self._launched.close()

    async def _log_output(self, output: asyncio.StreamReader) -> None:
        """Everything the handler prints or logs becomes a log line that says where it came from."""
        origin = {
            "model": self._spec.model_name,
            "version": self._spec.model_version,
            "executor": self._executor_id,
        }
        rest = b""
        while chunk := await output.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            while len(rest) > MAX_LINE_BYTES:
                lines.append(rest[:MAX_LINE_BYTES])
                rest = rest[MAX_LINE_BYTES:]
            self._relay(lines, origin)
        self._relay([rest] if rest else [], origin)

    def _relay(self, lines: Sequence[bytes], origin: Mapping[str, object]) -> None:
        for line in lines:
            try:
                relay(line.decode(errors="replace"), self._log_token, origin, logger)
            except Exception:  # whatever it is, somebody has to read on: a worker whose pipe is full hangs
                with suppress(Exception):
                    logger.exception("a line of worker %d could not be logged", self._executor_id)
