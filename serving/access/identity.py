"""Who calls: the identity of a client, its roles, and the names by which it proves them."""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Role = Literal["inference", "management", "metrics"]
ROLES: tuple[Role, ...] = get_args(Role)

# TorchServe's message, which clients and TorchServe's own tests compare.
REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
_BEARER = re.compile(r"(?i:Bearer)\s+(\S+)", re.ASCII)  # RFC 9110, 11.1: any case of the scheme
UNIX_CLIENT = "unix"  # the address of all clients of a Unix socket
_OF_PROXIES = frozenset({"forwarded", "via", "x-forwarded-for"})  # headers that proxies set
_IPV4_IN_IPV6 = "::ffff:"  # prefix of IPv4 clients on a listener of "::"


@dataclass(frozen=True, slots=True)
class Identity:
    """An authorized client."""

    name: str  # given by the operator; "": the client is anonymous, and its address identifies it
    roles: frozenset[Role]  # the APIs that it may call


# For clients with a key that belongs to no identity, such as those of TorchServe's key file.
ANONYMOUS: Mapping[Role, Identity] = {role: Identity("", frozenset({role})) for role in ROLES}


def address_of(peer: object) -> str:
    """Return the client's address without its port; `peer`: as the socket names it."""
    if not isinstance(peer, tuple):
        return UNIX_CLIENT
    return str(peer[0]).removeprefix(_IPV4_IN_IPV6)


def is_from_this_machine(address: str, headers: Iterable[str]) -> bool:
    """Return whether a call comes from this machine, and has no header that proxies set.

    `headers` are the names of its headers, or of its metadata. Of 127.0.0.0/8 one address counts: proxies
    beside the server, such as Istio's, forward calls of other machines from another address in it.
    """
    is_near = address in (UNIX_CLIENT, "127.0.0.1", "::1")
    return is_near and _OF_PROXIES.isdisjoint(map(str.lower, headers))


def is_before(now_s: float, expires_at_s: float | None) -> bool:
    """Return whether a moment is before an expiry time; None: it never expires."""
    return expires_at_s is None or now_s < expires_at_s


def bearer_key(authorization: str | None) -> bytes:
    """Return the key in a `Bearer` header; b"", which is never a key, for any other header.

    The result is bytes because `hmac.compare_digest` refuses text that is not ASCII.
    """
    match = _BEARER.fullmatch(authorization or "")
    return match.group(1).encode("utf-8", "surrogatepass") if match else b""


def authorization_of(values: Collection[str]) -> str | None:
    """Return the value of a request's `Authorization` headers; None if it has no such header, or two values.

    A proxy may have added its own header to that of the client, and neither may win (RFC 9110, 5.3).
    """
    return next(iter(values)) if len(set(values)) == 1 else None


# Short names of RFC 4514; other types of attributes keep OpenSSL's long name.
_SHORT_NAMES = {
    "commonName": "CN",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}
# Other types that OpenSSL prints by a short name.
_SHORT_IN_OPENSSL = {
    "surname": "SN",
    "givenName": "GN",
    "jurisdictionLocalityName": "jurisdictionL",
    "jurisdictionStateOrProvinceName": "jurisdictionST",
    "jurisdictionCountryName": "jurisdictionC",
}
_NOT_PRINTED = re.compile(r"[^ -~]")  # OpenSSL prints the bytes of these characters, each as two digits
_SPECIAL = re.compile(r'([,+"\\<>;]|^[ #]| $)')
_ALTERNATIVE_NAMES = ("DNS", "URI", "email")


def subjects_of(certificate: Mapping[str, Any] | None, now_s: float) -> tuple[str, ...]:
    r"""Return the names in a client's certificate: its subject, then its alternative names.

    An expired certificate names no client: OpenSSL checks the time in a full handshake only, and a client can
    resume its session for as long as it likes, since each resumption gives it a new ticket.

    The subject has the form of RFC 4514: `CN=ci,O=Example`. If `openssl x509 -subject -nameopt RFC2253`
    prints it otherwise (`CN=J\C3\BCrgen`), both forms are names. Alternative names have their kind in front:
    `DNS:ci.example`, `URI:spiffe://...`.

    Args:
        certificate: as `ssl.SSLObject.getpeercert` returns it; empty or None: the client has shown none.
        now_s: seconds since the epoch.
    """
    if not certificate or now_s > ssl.cert_time_to_seconds(certificate["notAfter"]):
        return ()
    groups = [list(map(_attribute, group)) for group in reversed(certificate.get("subject", ()))]
    subject = ",".join("+".join(group) for group in groups)
    printed = ",".join("+".join(map(_as_printed, group)) for group in groups)
    others = [
        f"{kind}:{value}"
        for kind, value in certificate.get("subjectAltName", ())
        if kind in _ALTERNATIVE_NAMES
    ]
    return tuple(name for name in dict.fromkeys((subject, printed, *others)) if name)


def _attribute(attribute: tuple[str, str]) -> str:
    kind, value = attribute
    # Escaped, so that one name with a comma in it is not taken for two names.
    escaped = _SPECIAL.sub(lambda special: f"\\{special[0]}", value)
    return f"{_SHORT_NAMES.get(kind, kind)}={escaped}"


def _as_printed(attribute: str) -> str:
    """Return `kind=value` as OpenSSL prints it. Backslashes in the value are escaped already."""
    kind, _, value = attribute.partition("=")
    escaped = _NOT_PRINTED.sub(lambda one: "".join(f"\\{byte:02X}" for byte in one[0].encode()), value)
    return f"{_SHORT_IN_OPENSSL.get(kind, kind)}={escaped}"
