"""Runs the trials of a model in a forked child process, so that a crash of the model ends as one error line.

A model run on sizes that its author never tried may read beyond the end of a tensor, exit, hang or fill the
memory. A fork takes a tenth of a second and shares the loaded model; a fresh interpreter would import torch
and read the model again, which takes seconds (decision 28). The child computes in a new thread: OpenMP's
threads do not survive a fork, and each thread that starts parallel work has a pool of its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, NoReturn

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.steps import Say, refusing, silent

Work = Callable[[Say, Say], str]
"""Tries a model, and returns the result as text.

Arguments: a callback for the inputs of each run, called before the run, and one for lines to the user.
"""

_FIRST_S = 60.0  # limit of the first run; a longer one is repeated in this process
_LEAST_S, _TIMES = 60.0, 30  # limit of a later run: the larger of `_LEAST_S` and `_TIMES` times the first
_SHARE = 0.9  # share of the available memory that the child may take
_CPP_CAUSE = "what():"  # C++ names the exception that ended the process on a line that begins so
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MEMORY = Path("/proc/meminfo")
_OWN_MEMORY = Path("/proc/self/status")


class ModelEndedProcess(ModelRefused):
    """The model ended the child process, or a run took too long; the text has the inputs of that run."""


@dataclass(slots=True)
class _Run:
    """The current model run of the child process, as its messages report it."""

    number: int = 0  # from 1; 0 before the first one
    inputs: str = "its inputs"
    started_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0  # duration of the first run

    @property
    def limit_s(self) -> float:
        """How long the run may take."""
        return _FIRST_S if self.number <= 1 else max(_LEAST_S, _TIMES * self.first_s)

    def begin(self, inputs: str) -> None:
        """Record that the child begins the next run."""
        now = time.monotonic()
        if self.number == 1:
            self.first_s = now - self.started_s
        self.number, self.inputs, self.started_s = self.number + 1, inputs, now


def isolated(work: Work, say: Say) -> str:
    """Do the work in a child process and return its result.

    On systems other than Linux, the work is done in this process. So is work whose first run takes longer
    than a minute, because the model may wait for its own threads, which do not survive the fork.

    Args:
        work: see `Work`. Its changes to the model and to other objects are lost.
        say: receives the lines for the user.

    Raises:
        ModelRefused: raised by `work`.
        ModelEndedProcess: the child ended without a result, or a run took too long.
    """
    if sys.platform != "linux":
        return work(silent, say)
    run = _Run()
    with tempfile.TemporaryFile() as errors:
        child, messages = forked(lambda messages: _work(work, messages, errors))
        try:
            kind, content = _answer(messages, run, say)
        finally:
            messages.close()
            status = _reaped(child)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if kind == "ended":
        how = _how(status, text)
        raise ModelEndedProcess(f"the model ended the process ({how}) when it was run on {run.inputs}")
    sys.stderr.write(text)
    if kind == "late":
        if run.number <= 1:
            return work(silent, say)
        raise ModelEndedProcess(f"the model did not return within {run.limit_s:.0f} s on {run.inputs}")
    if kind == "refused":
        raise ModelRefused(content)
    return str(content)


def forked(run: Callable[[Connection[Any, Any]], NoReturn]) -> tuple[int, Connection[Any, Any]]:
    """Call `run` in a child process; return the child's id and the connection that receives its messages."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the child would write the buffered text again
    receiving, sending = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 on, about forks with threads
        child = os.fork()
    if child == 0:
        receiving.close()
        run(sending)
    sending.close()
    return child, receiving


def _answer(messages: Connection[Any, Any], run: _Run, say: Say) -> tuple[str, Any]:
    """Pass the child's lines on; return its last message, ("ended", None) without, ("late", None) if late."""
    while True:
        if not messages.poll(max(run.started_s + run.limit_s - time.monotonic(), 0)):
            return "late", None
        try:
            kind, content = json.loads(messages.recv_bytes())
        except EOFError:
            return "ended", None
        if kind == "run":
            run.begin(content)
        elif kind == "say":
            say(content)
        else:
            return kind, content


def _reaped(child: int) -> int:
    """Kill the child unless it ends by itself within a second; return its exit status."""
    until_s = time.monotonic() + 1
    while time.monotonic() < until_s:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _how(status: int, errors: str) -> str:
    code = os.waitstatus_to_exitcode(status)
    lines = [line for line in errors.splitlines() if line.strip()]
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    causes = [line for line in lines if line.strip().startswith(_CPP_CAUSE)]  # before a long stack
    return f"{how}: {(causes or lines)[-1].strip().removeprefix(_CPP_CAUSE).strip()[:200]}" if lines else how


# In the child.


def _work(work: Work, messages: Connection[Any, Any], errors: IO[bytes]) -> NoReturn:
    code = 1
    try:
        end_with_parent()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.disable()
        os.dup2(errors.fileno(), 2)
        _set_limits()
        thread = threading.Thread(target=_report, args=(work, messages))
        thread.start()
        thread.join()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # without the exit handlers of the parent


def end_with_parent() -> None:
    """Let the kernel end this process, which was just forked, when the thread that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _report(work: Work, messages: Connection[Any, Any]) -> None:
    def send(kind: str, content: Any) -> None:
        messages.send_bytes(json.dumps([kind, content]).encode())

    try:
        with refusing("trying the model"):
            made = work(lambda inputs: send("run", inputs), lambda line: send("say", line))
        send("done", made)
    except (ModelRefused, FileNotFoundError) as refusal:
        send("refused", str(refusal))
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _set_limits() -> None:
    """Disable core dumps, and limit the memory: if it ran out, the kernel might kill another process."""
    import resource  # noqa: PLC0415  # Windows has none

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        used, available = _bytes_of(_OWN_MEMORY, "VmData:"), _bytes_of(_MEMORY, "MemAvailable:")
    except (OSError, LookupError):
        return
    limit = used + int(available * _SHARE)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _bytes_of(file: Path, name: str) -> int:
    """Return the size, in bytes, that the line beginning with `name` has in KiB; LookupError without one."""
    lines = [line.split() for line in file.read_text().splitlines() if line.startswith(name)]
    return int(lines[0][1]) * 1024
