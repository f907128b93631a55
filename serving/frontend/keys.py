"""What the frontends need of the token keys, whoever keeps them."""

from __future__ import annotations

from typing import Literal, Protocol

KeyKind = Literal["inference", "management"]


class Keys(Protocol):
    """The keys of a server with token authorisation; `serving/tokens.py` keeps them in a file."""

    def authorize(self, kind: KeyKind, authorization: str | None) -> None:
        """Return when the `Authorization` header brings the live key of that kind.

        Raises:
            Unauthorized: it is missing, wrong or expired.
        """

    def renew(self, wanted: str | None, authorization: str | None) -> None:
        """Replace the key that is wanted, if the header brings the API key.

        Raises:
            Unauthorized: the API key is missing or wrong, or there is no such kind.
        """
