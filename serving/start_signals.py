"""Signals that come while a server's modules are imported, before it listens to them itself."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class SignalsKept:
    """Keeps the first signal that ends a server, until `let_go`; the second one ends the process at once.

    Ctrl+C as an exception is lost wherever Python drops those (callbacks of the import system, for one), an
    end while torch's libraries are mapped may crash, and one by signal leaves what is unpacked already. Enter
    it in the main thread; in another one, which gets no signals, nothing is kept.
    """

    def __init__(self) -> None:
        self._first = 0
        self._before: dict[int, Any] = {}  # handlers as `signal.signal` takes and gives them

    def __enter__(self) -> SignalsKept:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                    self._before[number] = signal.signal(number, self._keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()

    def let_go(self) -> int:
        """Back to the handlers from before; the number of the signal that came, 0 for none."""
        while self._before:
            signal.signal(*self._before.popitem())
        return self._first

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._first = number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
