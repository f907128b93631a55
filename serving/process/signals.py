"""How a process ends: by signals, also during its start, when its parent dies, or by itself."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a server; without SIGHUP if it is ignored (inherited from nohup)."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class SignalsKept:
    """Keeps the first signal that ends a server, until `let_go`; the second one ends the process at once.

    KeyboardInterrupt is lost wherever Python drops exceptions (in callbacks of the import system, for one),
    and the first process of a container never gets a signal that it has no handler for. Enter this context in
    the main thread; in other threads, which get no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._first = 0
        self._before: dict[int, Any] = {}  # handlers as `signal.signal` takes and gives them

    def __enter__(self) -> SignalsKept:
        if threading.current_thread() is threading.main_thread():
            for number in ending_signals():
                self._before[number] = signal.signal(number, self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()

    def let_go(self) -> int:
        """Restore the previous handlers; return the number of the signal that came, 0 for none."""
        while self._before:
            signal.signal(*self._before.popitem())
        return self._first

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._first = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)


PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies, however it dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def live(work: Callable[[], None]) -> NoReturn:
    """Do the work of a process that was just forked, and end it; never return to the frames of its parent."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as err:
        code = err.code if isinstance(err.code, int) else 1
    except KeyboardInterrupt:  # an exit code would count as the process's own fault
        code = -signal.SIGINT
    except BaseException:  # the top of a process
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """End the process now, after running exit functions and flushing its output.

    A negative code is the number of the signal to end by, as `subprocess` has it.
    """
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)  # a second one ends it at once
    with contextlib.suppress(Exception):  # exit functions may be user code
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    if code < 0:
        signal.raise_signal(-code)
    os._exit(code)
