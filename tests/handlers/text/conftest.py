"""A loaded handler that answers rows, as a worker would have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.resolve import load_entry_point


class Answering:
    """Answers each row of a call as a request of one batch; all have the same headers."""

    def __init__(self, handler: str, context: Context) -> None:
        self.context = context
        self.entry_point: Any = load_entry_point(handler, context)

    def __call__(self, *rows: Any, headers: dict[str, str] | None = None) -> Any:
        requests = [RequestProcessor(headers or {}, f"r{index}") for index in range(len(rows))]
        self.context.begin_batch(requests, None)
        return self.entry_point(list(rows), self.context)


@pytest.fixture
def answering() -> Callable[[str, Context], Answering]:
    return Answering
