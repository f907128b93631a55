"""Heads that came before: clients repeat the same bytes with each request, and reading them once will do.

Parsing a head takes a parser's callback for each line, and each line is looked at four times after that. The
bytes of a head say all there is to say, so what was made of them is kept by them, for a bounded number of
heads.
"""

from __future__ import annotations

from typing import NamedTuple

from torchere.serving.frontend.keys import KeyKind
from torchere.serving.frontend.rest.codec import Head
from torchere.serving.frontend.rest.open_inference_wire import Wire
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.telemetry.trace_context import TraceContext

HEAD_END = b"\r\n\r\n"
MAX_HEADS = 1024
MAX_HEAD_BYTES = 2048  # of one that is kept


class DirectTarget(NamedTuple):
    """What a request line asks for, and the key it takes."""

    target: Target
    model: str
    key: KeyKind | None


class DirectHead(NamedTuple):
    """All that the head of a plain prediction says."""

    place: DirectTarget
    head: Head
    wire: Wire  # at the paths of the Open Inference Protocol
    headers: tuple[tuple[str, str], ...]  # as the handler gets them
    trace: TraceContext | None
    request_line: bytes
    keep_alive: bool


class KnownHeads:
    """What was made of heads, by their bytes. Used on the event loop only."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, DirectHead] = {}

    def find(self, data: bytes) -> tuple[DirectHead, bytes] | None:
        """The head and the body, when `data` is just one whole request whose head came before."""
        end = data.find(HEAD_END, 0, MAX_HEAD_BYTES) + len(HEAD_END)
        head = self._heads.get(data[:end])
        if head is None or len(data) - end != head.head.length:
            return None
        return head, data[end:]

    def keep(self, data: bytes, head: DirectHead) -> None:
        """Remember what a parser that had nothing before them made of the first bytes of `data`.

        A head in a trace will not come again. One with line ends that are none could end for the parser where
        it does not for us.
        """
        end = data.find(HEAD_END, 0, MAX_HEAD_BYTES) + len(HEAD_END)
        text = data[:end]
        is_exact = text.startswith(head.request_line + b"\r\n") and text.count(b"\n") == text.count(b"\r\n")
        if head.trace is not None or not is_exact:
            return
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        self._heads[text] = head
