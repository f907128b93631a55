"""What the frontends need of the token keys, whoever keeps them, and which request needs which key."""

from __future__ import annotations

from typing import Literal, Protocol

KeyKind = Literal["inference", "management"]


class Keys(Protocol):
    """The keys of a server with token authorisation; `serving/tokens.py` keeps them in a file."""

    def check(self, kind: KeyKind, authorization: str | None) -> None:
        """Return when the `Authorization` header brings the live key of that kind.

        Raises:
            Unauthorized: it is missing, wrong or expired.
        """

    def regenerate(self, kind: str, authorization: str | None) -> None:
        """Replace the key of that kind, if the header brings the API key.

        Raises:
            Unauthorized: the API key is missing or wrong, or there is no such kind.
        """
