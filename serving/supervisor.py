"""A small parent process that starts a server, and starts it again when it crashed.

    python -m torchere.serving.supervisor text|json [NAME TO BE FOUND BY] -- COMMAND OF THE SERVER ...

Whoever sees this process sees the server: signals are handed on once each, its exit status is the server's,
and the server dies with it. The server runs in a process group of its own, so that what a terminal or a
launcher sends to the group comes here only. Standard library only: it is small, with nothing to crash on;
and it waits for nobody who reads its log.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from torchere.serving.crash_journal import Crash, Journal, ServerState, anonymous_file
from torchere.serving.crash_policy import (
    ENDING_SIGNALS,
    STABLE_S,
    AfterExit,
    after_exit,
    cause_of,
    learn,
    to_blame,
)
from torchere.serving.execution.restart import restart_delay_s
from torchere.serving.start_signals import ending_signals
from torchere.serving.telemetry.outlet import Outlet, may_stand_still

HUNG_AFTER_S = 60.0  # a serving event loop that stands still for longer is ended
KILL_GRACE_S = 5.0  # for a hung server to write its trace
GIVE_UP_S = 300.0  # after the first crash of a row
LOGGER = "torchere.serving.supervisor"  # under which its lines are found
LAST_LINES_S = 2.0  # for the reader of standard output, at the end
_TICK_S = 1.0
MAX_TRACE_BYTES = 64 << 10  # that are logged


class Supervisor:
    """Runs one server after the other until one ends on purpose, or they crash for too long.

    Args:
        command: Of the server; `--supervised=JOURNAL,TRACE,PID` is added: two numbers of open files, and our
            process id.
        as_json: Whether log lines are JSON objects.
    """

    def __init__(self, command: Sequence[str], as_json: bool) -> None:
        self._as_json = as_json
        self._outlet = _outlet()
        self._journal = Journal.create()
        self._trace = anonymous_file("torchere-trace")
        self._command = [*command, f"--supervised={self._journal.descriptor},{self._trace},{os.getpid()}"]
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._handled = (*ending_signals(), signal.SIGQUIT, signal.SIGCHLD, signal.SIGTSTP)
        for number in self._handled:
            signal.signal(number, lambda number, frame: None)  # the pipe tells
        self._pid = 0
        self._served_s: float | None = None  # since when the last server said that it serves
        self._told_to_end = False

    def run(self) -> int:
        """Supervise; returns the exit status of the last server, negative the number of a signal.

        Raises:
            OSError: the system would not start even the first one.
        """
        code, losses, first_loss_s, has_served = 0, 0, 0.0, False
        while True:
            try:
                self._start()
            except OSError as err:  # no process or memory left, of which the one before may have died
                if losses == 0:
                    raise
                self._log("ERROR", f"the system does not start the server: {err.strerror}")
            else:
                code, hung_s = self._wait()
                state = self._journal.state
                if after_exit(code, state, self._told_to_end, has_served) is AfterExit.END:
                    return code
                has_served = has_served or state is ServerState.SERVING
                self._record(code, hung_s)
            ended_s = time.monotonic()
            if losses == 0 or (self._served_s is not None and ended_s - self._served_s >= STABLE_S):
                losses, first_loss_s = 0, ended_s
            losses += 1
            delay_s = restart_delay_s(losses, first_loss_s, ended_s, GIVE_UP_S)
            if delay_s is None:
                self._log("ERROR", f"the server crashed {losses} times in a row: giving up")
                return code
            self._log("WARNING", f"starting the server again in {delay_s:g} s")
            if not self._pause(delay_s):
                return code

    def _start(self) -> None:
        self._served_s = None
        self._journal.clear()
        os.ftruncate(self._trace, 0)
        os.lseek(self._trace, 0, os.SEEK_SET)
        self._pid = os.posix_spawn(
            self._command[0], self._command, os.environ, setpgroup=0, setsigdef=self._handled
        )

    def _wait(self) -> tuple[int, float]:
        """Wait for the server's end: its exit status, and for how long it had hung when we ended it."""
        hung_s = silent_s = 0.0
        beats = -1
        while True:
            began_s = time.monotonic()
            self._listen(_TICK_S)
            ended = self._reap()
            if self._served_s is None and self._journal.state is ServerState.SERVING:
                self._served_s = began_s
            if ended is not None:
                return ended, hung_s
            if self._journal.state is not ServerState.SERVING or self._journal.beats != beats:
                beats, silent_s = self._journal.beats, 0.0
                continue
            # While we stood still (Ctrl+Z, a container that was paused), so did the server.
            silent_s += min(_TICK_S, time.monotonic() - began_s)
            if silent_s > HUNG_AFTER_S + KILL_GRACE_S:
                os.kill(self._pid, signal.SIGKILL)
            elif silent_s > HUNG_AFTER_S and not hung_s:
                hung_s = HUNG_AFTER_S
                os.kill(self._pid, signal.SIGABRT)  # which writes a trace

    def _reap(self) -> int | None:
        """Collect children that ended; the server's exit status when it is among them.

        Others are those that a first process of a container inherits.
        """
        ended = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if pid == self._pid:
                ended = os.waitstatus_to_exitcode(status)

    def _listen(self, timeout_s: float) -> None:
        """Wait for signals, and hand on those that are meant for the server."""
        if not select.select([self._woken], [], [], timeout_s)[0]:
            return
        for number in os.read(self._woken, 4096):
            if number in ENDING_SIGNALS:
                self._told_to_end = True
                self._send(number)
            elif number == signal.SIGQUIT:
                self._send(number)  # it says what its threads do, and goes on
            elif number == signal.SIGTSTP:
                self._send(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
                self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self._pid:
            try:
                os.kill(self._pid, number)
            except ProcessLookupError:
                return  # it has just ended

    def _pause(self, delay_s: float) -> bool:
        """Wait; False when a signal ends it all meanwhile."""
        self._pid = 0
        until_s = time.monotonic() + delay_s
        while not self._told_to_end and (left_s := until_s - time.monotonic()) > 0:
            self._listen(left_s)
        return not self._told_to_end

    def _record(self, code: int, hung_s: float) -> None:
        """Log a crash, and write down what the next server is to know of it."""
        trace = os.pread(self._trace, MAX_TRACE_BYTES, 0).decode(errors="replace")
        cause = cause_of(code, hung_s)
        running = self._journal.running()
        models = to_blame(code, trace, running)
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        before = self._journal.history
        self._journal.history = after = learn(before, Crash(now, cause, models))
        at = f", which ran {', '.join(models)}" if models else ""
        self._log("ERROR", f"the server crashed: {cause}{at}", trace)
        for version in sorted(set(after.isolated) - set(before.isolated)):
            self._log("WARNING", f"{version} runs in processes from now on: {after.isolated[version]}")

    def _log(self, level: str, message: str, trace: str = "") -> None:
        now = datetime.now(timezone.utc).replace(tzinfo=None)
        moment = f"{now.isoformat(timespec='microseconds' if self._as_json else 'milliseconds')}Z"
        if self._as_json:
            fields = {"time": moment, "level": level, "logger": LOGGER, "message": message}
            line = json.dumps({**fields, "exception": trace} if trace else fields)
        else:
            line = f"{moment} {level:<7} {LOGGER}: {message}"
            line += "".join(f"\n  | {part}" for part in trace.splitlines())
        try:
            if self._outlet is None:
                print(line, flush=True)
            else:
                self._outlet.put(f"{line}\n")
        except OSError:
            return  # nobody reads any more; the server is more important than its log

    def say_last(self) -> None:
        """Wait for the reader of the log, but not for ever."""
        if self._outlet is not None:
            self._outlet.flush(LAST_LINES_S)


def _outlet() -> Outlet | None:
    """The way to standard output where somebody has to read it; None for a file, or nothing at all."""
    descriptor = may_stand_still(sys.stdout) if sys.stdout is not None else None
    if descriptor is None:
        return None
    return Outlet(descriptor, sys.stdout.encoding, say_lost=lambda lines: "", failed=lambda: None)


def end_like(code: int) -> int:
    """End this process as its server did: by the same signal, where there was one.

    Returns:
        The exit status to use where no signal works (for the first process of a container).
    """
    if code >= 0:
        return code
    if -code in ENDING_SIGNALS:
        signal.signal(-code, signal.SIG_DFL)
    if -code in (*ENDING_SIGNALS, signal.SIGKILL):
        os.kill(os.getpid(), -code)
    return 128 - code


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit status."""
    command = arguments[arguments.index("--") + 1 :] if "--" in arguments else ()
    if not command:
        print("usage: python -m torchere.serving.supervisor text|json [NAME] -- COMMAND ...", file=sys.stderr)
        return 2
    supervisor = Supervisor(command, arguments[0] == "json")
    code = supervisor.run()
    supervisor.say_last()
    return end_like(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
