"""HTTP/1.1 on a connection: uvicorn's, with predictions answered on the spot, and an end to what idles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from torchere.serving.frontend.rest.body_receiver import BodyReceiver
from torchere.serving.frontend.rest.call import ANSWERED
from torchere.serving.frontend.rest.codec import read_head
from torchere.serving.frontend.rest.direct import DirectCall
from torchere.serving.frontend.rest.direct_predictions import DirectPredictions
from torchere.serving.frontend.rest.errors import INVALID_HTTP, STALLED_BODY, LastWords
from torchere.serving.frontend.rest.joined_writes import JoinedWrites
from torchere.serving.frontend.rest.request_reader import Flow, RequestReader
from torchere.serving.frontend.unread import Unread, untaken_bytes
from torchere.serving.silence import Silence
from torchere.serving.telemetry.access_lines import Client

LINGER_S = 0.25  # of idle connections after the end of the listener; many round trips in one data centre
HEAD_TIMEOUT_S = 60.0  # a connection that has begun a head and not ended it by then is closed
BODY_TIMEOUT_S = 60.0  # likewise one that has begun a body, if nothing more of it comes for so long


class Protocol(RequestReader):
    """One connection. Used by the event loop only.

    A request is read to the end of its head before uvicorn hears of it: plain predictions are answered here
    (`direct.py`), all others are told to uvicorn from their beginning.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _direct: DirectCall | None = None  # the last one
    _shared: DirectPredictions | None = None  # of a listener that answers predictions
    _refused: Callable[[Client, int], None] | None = None  # the listener's, for what is no request
    _idle: Silence | None = None  # since the last direct answer, or what came of a request behind its answer
    _upload: Silence | None = None  # of a client that has not sent its body at once
    _unread: Unread[tuple[int, int]] | None = None  # by a client that has not taken an answer at once
    _times_full: int = 0  # that the socket's buffer was

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected, and has `HEAD_TIMEOUT_S` for its first head."""
        super().connection_made(transport)
        self.flow = Flow(transport)
        self._writes = JoinedWrites(transport, self.loop)
        self.transport = self._writes  # type: ignore[assignment]
        self._shared = getattr(self.app, "direct", None)
        self._refused = getattr(self.app, "refused", None)
        self._mind_the_head()

    def data_received(self, data: bytes) -> None:
        """Bytes came in. A head that comes whole, as nearly all do, needs no timer."""
        if self._between and self._shared is not None and self._run_known(self._shared, data):
            return
        self.read(data)

    def read(self, data: bytes, start: int = 0) -> None:
        """Parse what is there of one request. What follows waits until it is answered."""
        super().read(data, start)
        direct = self._present_direct()
        missing = direct.missing if direct is not None else None
        if not (self._between or self._in_head):
            self._mind_the_body()
        if missing is not None and not self.transport.is_closing():
            BodyReceiver(self.transport, missing, self._mind_the_body, self._body_is_whole)
        if self._in_head or self._head_timer is not None:
            self._mind_the_head()

    def _run_known(self, shared: DirectPredictions, data: bytes) -> bool:
        """Answer a request whose head came before, without the parser; False when it is something else."""
        found = shared.heads.find(data)
        if found is None or not self._may_be_direct():
            return False
        self._unset_keepalive_if_required()
        self._in_head = False
        if self._head_timer is not None:
            self._mind_the_head()
        self._direct = direct = shared.call(self, found[0])
        self.cycle = direct  # type: ignore[assignment]
        self._end_if_draining()
        direct.body = found[1]
        direct.run()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, from either side."""
        self._in_head = False
        self._mind_the_head()
        for silence in (self._idle, self._upload):
            if silence is not None:
                silence.stop()
        if self._unread is not None:
            self._unread.stop()
        self._idle = self._upload = self._unread = self._ahead = None  # they hold this
        if self._direct is not None:
            self._direct.ended()
        self._unset_keepalive_if_required()  # uvicorn leaves its timer behind a reset
        super().connection_lost(exc)
        self.cycle = self._direct = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        """The socket's buffer is full."""
        super().pause_writing()
        self._times_full += 1
        if self._unread is None:
            self._unread = Unread(self._held_back, lambda _: self.transport.abort())
        self._unread.watch()

    def _held_back(self) -> tuple[int, int] | None:
        untaken = untaken_bytes(self.transport) if self.flow.write_paused else None
        return None if untaken is None else (self._times_full, untaken)

    def on_headers_complete(self) -> None:
        """The head is complete; the answer may begin."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # it is read again, see `_stay_with_http`
        direct = self._direct_call()
        if direct is None:
            self.tell_uvicorn()
            self.cycle.keep_alive = self._stays()
        else:
            self._direct = self.cycle = direct  # type: ignore[assignment]
        self._end_if_draining()
        self._in_head = self._head_begun = False
        self._first = b""

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body_bytes += len(body)
        direct = self._present_direct()
        if direct is not None:
            direct.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there as a whole."""
        if self._in_head:
            return  # and will be read again
        self._between = True
        if self._upload is not None:
            self._upload.over()
        direct = self._present_direct()
        if direct is not None:
            direct.run_late()
            return
        super().on_message_complete()
        if self.cycle.response_complete:  # before its body was whole, which ended uvicorn's timer
            self._mind_the_idle()

    def _body_is_whole(self) -> None:
        # The parser saw the beginning of the body only: the next request gets one like it.
        self.renew_parser()
        self.on_message_complete()

    def write_whole(self, head: bytes, body: bytes = b"") -> None:
        """Send what is complete: nothing comes that would be worth waiting for."""
        self._writes.write_whole(head, body)

    def on_direct_complete(self) -> None:
        """As `on_response_complete`, after a direct call: a timer for each answer would cost too much."""
        self.server_state.total_requests += 1
        if self._writes.is_closing():
            return
        if self._ahead is not None:
            self.go_on()
        if self._idle is None:
            self._mind_the_idle()
        else:
            self._idle.watch()

    def _mind_the_idle(self) -> None:
        if self._idle is None:
            self._idle = Silence(self.timeout_keep_alive, self._idle_too_long)
        self._idle.watch()

    def _idle_too_long(self) -> None:
        # uvicorn has a timer of its own after an answer of its own.
        if not self._is_busy() and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()

    def drain(self) -> None:
        """From now on an answer ends the connection; the client hears it in the answer's head."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """The listener is closed: answer what is in, then close.

        An idle connection stays for a moment. A request may be on its way, and closing under it would lose
        it: the client can't know whether it was run, so it may not send it again.
        """
        self.drain()
        self.loop.call_later(LINGER_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._is_busy() and not self.transport.is_closing():
            self.transport.close()

    def _is_busy(self) -> bool:
        return self._head_begun or self._ahead is not None or self.is_unanswered()

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task that answers a request, and have the server wait for it when it stops."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def refuse(self) -> None:
        """Answer what is no HTTP, or too much of it, and close."""
        self._end(INVALID_HTTP)

    def _end(self, last_words: LastWords) -> None:
        if self.transport.is_closing():
            return
        if self._in_head or not self._has_begun():
            self.transport.write(last_words.text)
            self._count(last_words.status)
        self.transport.close()

    def _count(self, status: int) -> None:
        """An answer went out in place of the one to the present request."""
        direct = self._present_direct()
        if self._in_head:
            if self._refused is not None:
                self._refused(self.client, status)
        elif direct is not None:
            direct.ended(status)
        else:
            scope: Any = self.scope
            scope[ANSWERED] = status

    def _has_begun(self) -> bool:
        """Whether the client has something of the present answer, into which nothing else may be written."""
        started = self._present_direct() is None and self.cycle.response_started
        return started or self.cycle.response_complete

    def _direct_call(self) -> DirectCall | None:
        """The present request as a prediction to be answered here; None when it is something else."""
        shared = self._shared
        if shared is None or not self._may_be_direct() or self.parser.get_http_version() != "1.1":
            return None
        parser = self.parser
        read = shared.read(parser.get_method(), self.url, self.spelled_headers, parser.should_keep_alive())
        if read is None:
            return None
        if self._first:
            shared.heads.keep(self._first, read)
        return shared.begin(self, read)

    def _stays(self) -> bool:
        """Whether the connection outlives the request; uvicorn thinks that none of HTTP/1.0 does."""
        # RFC 9112, 6.1: a proxy of HTTP/1.0 may see another end of a body in chunks
        if self.parser.get_http_version() == "1.0" and not read_head(self.spelled_headers).plain:
            return False
        return bool(self.parser.should_keep_alive())

    def _may_be_direct(self) -> bool:
        """Whether nothing is before the present request, and it can be answered."""
        before = self.cycle
        is_first = (before is None or before.response_complete) and self._ahead is None
        return is_first and not self.flow.write_paused and not self.transport.is_closing()

    def _end_if_draining(self) -> None:
        if getattr(self.server_state, "draining", False):
            self.cycle.keep_alive = False

    def _present_direct(self) -> DirectCall | None:
        cycle: object = self.cycle
        return self._direct if cycle is self._direct else None

    def _mind_the_head(self) -> None:
        if not self._in_head and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif self._in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _mind_the_body(self) -> None:
        """Bytes of a body came, and there are more to come."""
        if self._upload is None:
            self._upload = Silence(BODY_TIMEOUT_S, self._body_stalled)
        self._upload.watch()

    def _body_stalled(self) -> None:
        if self.flow.read_paused:  # it is us who take nothing
            self._mind_the_body()
        else:
            self._end(STALLED_BODY)
