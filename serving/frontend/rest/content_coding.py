"""Compression of bodies: `Content-Encoding` of requests, `Accept-Encoding` for responses.

It supports those codings of RFC 9110, 8.4.1, that Triton supports too: `gzip` (alias `x-gzip`) and `deflate`.
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
_BARE = -15  # raw deflate without zlib's frame, as some clients send it (RFC 9110, 8.4.1.2)
_LEVEL = 1  # higher levels hardly shrink tensors more, and take several times as long
# zlib releases the GIL. Above these sizes the loop would be blocked for longer than a thread costs: 1 KiB may
# inflate to 1 MiB.
INFLATED_IN_THREAD_BYTES = 1024
DEFLATED_IN_THREAD_BYTES = 16_384


def request_coding(value: bytes) -> Coding | None:
    """Return the coding that a `Content-Encoding` names; None: the body is not compressed.

    Raises:
        UnknownCoding: the coding is not supported, or there are several.
    """
    name = value.decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return None
    coding = _CODINGS.get(name)
    if coding is None:
        raise UnknownCoding(f"Content-Encoding: found {name[:80]!a}, expected one of {KNOWN}, identity")
    return coding


def answer_coding(accepted: bytes) -> Coding | None:
    """Return the coding to use for an `Accept-Encoding`; None: do not compress.

    Responses are compressed only for clients that name a single coding, as tritonclient does with
    `response_compression_algorithm`. Clients that list all codings they support (requests, httpx, browsers)
    get uncompressed responses: compressing a tensor takes ten times as long as answering with it.
    """
    names = []
    for item in accepted.decode("latin-1").lower().split(","):
        name, _, weight = item.partition(";")
        if name.strip() and not _is_zero(weight):
            names.append(name.strip())
    return _CODINGS.get(names[0]) if len(names) == 1 else None


def inflate(body: bytes | memoryview, coding: Coding, max_bytes: int) -> bytes:
    """Decompress a body.

    Raises:
        InflatesTooFar: the result would exceed `max_bytes`; decompression stops there, to bound the memory.
        InvalidRequest: the body is malformed.
    """
    try:
        return _inflate(body, _WINDOW[coding], max_bytes)
    except zlib.error as err:
        if coding == "deflate":
            try:
                return _inflate(body, _BARE, max_bytes)
            except zlib.error:
                pass  # report the error of the standard form, not of the raw one
        raise InvalidRequest(f"Content-Encoding: found a body that is no {coding} ({err})") from err


def deflate(body: bytes, coding: Coding) -> bytes:
    """Compress a body."""
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
