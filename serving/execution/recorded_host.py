"""A handler host that writes down what it is about to run, for whoever looks after a crash."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torchere.handlers.shared_models import SharedModels
from torchere.serving.crash_journal import Cell, Journal
from torchere.serving.execution.executor import BatchReport, LoadSpec
from torchere.serving.execution.host import HandlerHost, PartialSink
from torchere.serving.types import InferRequest, ModelKey


class RecordedHost(HandlerHost):
    """As `HandlerHost`; loading, warm-up and each batch are in the journal while they run.

    All batches must run in one thread, as ever; loading may be done in another.
    """

    def __init__(
        self, journal: Journal, spec: LoadSpec, gpu_id: int | None, shared_models: SharedModels
    ) -> None:
        super().__init__(spec, gpu_id, shared_models)
        self._journal = journal
        name = str(ModelKey(spec.model_name, spec.model_version))
        self._number = journal.number_of(name)
        weakref.finalize(self, journal.give_up, name)
        self._cell: Cell | None = None

    def load(self) -> None:
        """See `HandlerHost.load`."""
        with self._recorded():
            super().load()

    def warm_up(self) -> None:
        """See `HandlerHost.warm_up`."""
        with self._recorded():
            super().warm_up()

    def run(
        self, requests: Sequence[InferRequest], send_partial: PartialSink | None, gone: Sequence[int] = ()
    ) -> BatchReport:
        """See `HandlerHost.run`."""
        cell = self._cell or self._opened()
        if cell is None:
            return super().run(requests, send_partial, gone)
        cell.begin(self._number)
        try:
            return super().run(requests, send_partial, gone)
        finally:
            cell.end()

    def _opened(self) -> Cell | None:
        """The cell of the thread that runs the batches; None when the journal has none left."""
        self._cell = self._journal.open_cell(threading.get_ident())
        if self._cell is not None:
            weakref.finalize(self, self._journal.close_cell, self._cell)
        return self._cell

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        cell = self._journal.open_cell(threading.get_ident())
        if cell is None:
            yield
            return
        cell.begin(self._number)
        try:
            yield
        finally:
            self._journal.close_cell(cell)
