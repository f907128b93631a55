"""Who answers a call: what the transport tells it."""

from __future__ import annotations

from typing import ClassVar, Protocol

from torchere.serving.frontend.http2.messages import Packed, Received
from torchere.serving.frontend.http2.status import StatusCode


class Receiver(Protocol):
    """Who answers one call. Its methods are called on the event loop, and must not raise.

    Attributes:
        takes_one: nothing is answered before the client has sent all; else it may be silent between messages.
    """

    takes_one: ClassVar[bool]

    def message(self, message: Received | Packed) -> None:
        """A message of the client is there."""

    def half_closed(self) -> None:
        """It was the last one."""

    def flawed(self, code: StatusCode, message: str) -> None:
        """A message can't be taken, for the gRPC status `code`; nothing more comes."""

    def gone(self) -> None:
        """The client gave the call up, or its connection is lost."""


class _Over:
    """Receives what still comes of a call that is over."""

    takes_one: ClassVar[bool] = False

    def message(self, message: Received | Packed) -> None:
        """Too late."""

    def half_closed(self) -> None:
        """As it should be."""

    def flawed(self, code: StatusCode, message: str) -> None:
        """Answered already."""

    def gone(self) -> None:
        """Over for both."""


OVER: Receiver = _Over()
