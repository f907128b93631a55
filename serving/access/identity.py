"""Who calls: the identity of a client, and the roles that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Role = Literal["inference", "management", "metrics"]
ROLES: tuple[Role, ...] = get_args(Role)

UNIX_CLIENT = "unix"  # the address of all clients of a Unix socket
_IPV4_IN_IPV6 = "::ffff:"  # a listener on "::" sees clients of IPv4 so


@dataclass(frozen=True, slots=True)
class Identity:
    """An authorized client.

    Attributes:
        name: as the operator has named the client; "": the client is anonymous, and its address names it.
        roles: the APIs that it may call.
    """

    name: str
    roles: frozenset[Role]


# For clients with a key that belongs to no identity, such as those of TorchServe's key file.
ANONYMOUS: Mapping[Role, Identity] = {role: Identity("", frozenset({role})) for role in ROLES}


def address_of(peer: object) -> str:
    """Return the client's address without its port; `peer`: as the socket names it."""
    if not isinstance(peer, tuple):
        return UNIX_CLIENT
    return str(peer[0]).removeprefix(_IPV4_IN_IPV6)
