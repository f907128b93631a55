"""Bodies that travel compressed: `Content-Encoding` of requests, `Accept-Encoding` for answers.

Codings are those of RFC 9110, 8.4.1, that Triton knows, too: `gzip` (also called `x-gzip`) and `deflate`.
"""

from __future__ import annotations

import zlib
from typing import Literal, TypeAlias

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.rest.errors import InflatesTooFar, UnknownCoding

Coding: TypeAlias = Literal["gzip", "deflate"]

KNOWN = "gzip, deflate"
_CODINGS: dict[str, Coding] = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_WINDOW: dict[Coding, int] = {"gzip": 31, "deflate": 15}  # zlib's wbits; 15: inside zlib's own frame
_BARE = -15  # deflate without that frame, as some clients send it (RFC 9110, 8.4.1.2)
_LEVEL = 1  # tensors hardly get smaller at a higher one, and several times slower
# zlib lets go of the GIL; from these sizes on the loop would wait longer than a thread costs. 1 KiB may
# inflate to 1 MiB.
INFLATED_IN_THREAD_BYTES = 1024
DEFLATED_IN_THREAD_BYTES = 16_384


def request_coding(value: bytes) -> Coding | None:
    """The coding that a `Content-Encoding` names; None: the body comes as it is.

    Raises:
        UnknownCoding: another one, or several on top of one another.
    """
    name = value.decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return None
    coding = _CODINGS.get(name)
    if coding is None:
        raise UnknownCoding(f"Content-Encoding: found {name[:80]!a}, expected one of {KNOWN}, identity")
    return coding


def answer_coding(accepted: bytes) -> Coding | None:
    """The coding that an `Accept-Encoding` asks for; None: none.

    Only a client that names a single coding asks for it, as tritonclient's `response_compression_algorithm`
    does. Those that list all they can read (requests, httpx, browsers) get the answer as it is: packing a
    tensor takes ten times as long as answering with it.
    """
    names = []
    for item in accepted.decode("latin-1").lower().split(","):
        name, _, weight = item.partition(";")
        if name.strip() and not _is_zero(weight):
            names.append(name.strip())
    return _CODINGS.get(names[0]) if len(names) == 1 else None


def inflate(body: bytes | memoryview, coding: Coding, max_bytes: int) -> bytes:
    """A compressed body as it was before.

    Raises:
        InflatesTooFar: it has more than `max_bytes` then; found out with no more than those in memory.
        InvalidRequest: it is broken.
    """
    try:
        return _inflate(body, _WINDOW[coding], max_bytes)
    except zlib.error as err:
        if coding == "deflate":
            try:
                return _inflate(body, _BARE, max_bytes)
            except zlib.error:
                pass  # what zlib said of the form that the standard wants is told
        raise InvalidRequest(f"Content-Encoding: found a body that is no {coding} ({err})") from err


def deflate(body: bytes, coding: Coding) -> bytes:
    """A body compressed."""
    packer = zlib.compressobj(_LEVEL, wbits=_WINDOW[coding])
    return packer.compress(body) + packer.flush()


def _inflate(body: bytes | memoryview, window: int, max_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(window)
    found = unpacker.decompress(body, max_bytes + 1)
    if len(found) > max_bytes:
        raise InflatesTooFar(f"the body inflates to more than max_request_size={max_bytes} bytes")
    if not unpacker.eof:
        raise zlib.error(f"it ends too early, after {len(body)} bytes")
    if unpacker.unused_data:
        raise zlib.error(f"{len(unpacker.unused_data)} bytes stand behind its end")
    return found


def _is_zero(weight: str) -> bool:
    name, _, value = weight.partition("=")
    return name.strip() == "q" and not value.strip().strip("0.")
