"""One gRPC call: what its head says, and its end, with the line it gets in the access log."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from google.protobuf.message import DecodeError

from torchere.serving.errors import ServingError
from torchere.serving.frontend.access_log import access_log
from torchere.serving.frontend.grpc.errors import Table, failure
from torchere.serving.frontend.http2.header_blocks import Metadata
from torchere.serving.frontend.http2.messages import INFLATED_IN_THREAD_BYTES, MessageFailed, Packed, Received
from torchere.serving.frontend.http2.status import StatusCode
from torchere.serving.frontend.http2.stream import Encoded, Stream
from torchere.serving.telemetry.timeline import Timeline
from torchere.serving.types import NO_DEADLINE

logger = logging.getLogger(__name__)


class Method(NamedTuple):
    """What all calls of one method have in common."""

    path: str  # `package.Service/Method`
    table: Table  # what each error ends a call with
    decode: Callable[[Received], Any]
    encode: Callable[[Any], Encoded]

    def code_of(self, error: ServingError) -> str:
        """The name of the code that an error ends a call with."""
        return str(failure(error, self.table).code.name)


class Call:
    """One call. Ended once, with `well` or `badly`; lives on the event loop.

    Attributes:
        started_s: monotonic seconds when its head came.
        deadline_s: monotonic seconds after which the client waits no more, or `NO_DEADLINE`.
        read_s: monotonic seconds when its one message was there; 0: a call with many, or not yet.
        metadata: what the client sent, names in lower case; bytes under names that end in `-bin`.
        timeline: of its prediction; None: it has none yet, or may have many.
    """

    __slots__ = ("_message", "deadline_s", "metadata", "method", "read_s", "started_s", "stream", "timeline")

    def __init__(self, method: Method, stream: Stream) -> None:
        self.method = method
        self.stream = stream
        self.started_s = time.monotonic()
        timeout_s = stream.head.timeout_s
        self.deadline_s = NO_DEADLINE if timeout_s is None else self.started_s + timeout_s
        self.read_s = 0.0
        self.metadata: Metadata = stream.head.metadata
        self.timeline: Timeline | None = None
        self._message: Received | Packed | None = None  # the client's, where a call has one

    def decoded(self, message: Received) -> Any:
        """A message of the client.

        Raises:
            MessageFailed: it is none of this method.
        """
        try:
            return self.method.decode(message)
        except DecodeError as err:
            raise MessageFailed(StatusCode.INTERNAL, "Exception deserializing request!") from err

    def well(self) -> None:
        """It ends well, after the messages that were sent."""
        self.stream.end()
        self._over(StatusCode.OK)

    def well_with(self, message: Any) -> None:
        """It is answered with one message, and ends well.

        Raises:
            MessageFailed: the message is longer than may be.
        """
        self.stream.answer(self.method.encode(message))
        self._over(StatusCode.OK)

    def badly(self, error: Exception) -> None:
        """It ends with an error; a bug is logged, and the client gets INTERNAL."""
        if isinstance(error, MessageFailed):
            self.failed(error.code, str(error))
            return
        if not isinstance(error, ServingError):
            logger.error("call of %s failed unexpectedly", self.method.path, exc_info=error)
            error = ServingError("Internal server error", repr(error))
        ended = failure(error, self.method.table)
        self.failed(ended.code, ended.details)

    def flawed(self, code: StatusCode, message: str) -> None:
        """What the client sends can't be taken."""
        self.badly(MessageFailed(code, message))

    def failed(self, code: StatusCode, details: str) -> None:
        """It ends with a status other than OK."""
        self.stream.end(code, details)
        self._over(code)

    def _over(self, code: StatusCode) -> None:
        if self.timeline is not None:
            self.timeline.finish(code.name)
        if access_log.enabled:
            client = self.stream.connection.client
            line = f"gRPC {self.method.path} HTTP/2.0"
            access_log.add(client, line, code, self.started_s, timeline=self.timeline)


class OneRequest(Call, ABC):
    """The receiving half of a call with one message of the client's."""

    __slots__ = ()
    takes_one: ClassVar[bool] = True

    @abstractmethod
    def begin(self, request: Any) -> None:
        """There is all that the client sends."""

    def message(self, message: Received | Packed) -> None:
        """The client's message."""
        if self._message is None:
            self._message = message
        else:
            self.flawed(StatusCode.INTERNAL, "found several messages, expected one")

    def half_closed(self) -> None:
        """There is no more; begin."""
        message = self._message
        if message is None:
            self.flawed(StatusCode.INTERNAL, "found no message, expected one")
        elif isinstance(message, Packed):
            self._inflate(message)
        else:
            self._begin(message)

    def _begin(self, message: Received) -> None:
        self.read_s = time.monotonic()
        try:
            request = self.decoded(message)
        except MessageFailed as err:
            self.badly(err)
            return
        finally:
            self._message = b""
            self.stream.taken_all()
        self.begin(request)

    def _inflate(self, message: Packed) -> None:
        """Begin once it is inflated: on the way there it counts as what it is, not as what it becomes."""
        try:
            if len(message) > INFLATED_IN_THREAD_BYTES:
                self.stream.holds(len(message))
                inflating = asyncio.get_running_loop().run_in_executor(None, message.inflated)
                inflating.add_done_callback(self._inflated)
                return
            inflated = message.inflated()
        except MessageFailed as err:
            self.badly(err)
        else:
            self._begin(inflated)

    def _inflated(self, inflating: asyncio.Future[bytes]) -> None:
        if inflating.cancelled() or self.stream.ended:
            return  # its client is gone
        try:
            inflated = inflating.result()
        except Exception as err:  # the top of a call: `badly` logs a bug
            self.badly(err)
        else:
            self._begin(inflated)
