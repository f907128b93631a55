"""Header lists: read from HPACK (RFC 7541) with the `hpack` library, written without its tables."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from hpack import Decoder, HPACKError
from hpack.exceptions import OversizedHeaderListError

from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode
from torchere.serving.frontend.http2.status import StatusCode

MAX_HEADER_LIST_BYTES = 16_384  # as counted by RFC 7541, 4.1; gRPC's own servers take as much
READ_HEADER_LIST_BYTES = 2 * MAX_HEADER_LIST_BYTES  # what is longer than allowed costs its call, up to here
_ENTRY_BYTES = 32  # that each header counts for beside its name and value
MAX_MESSAGE_BYTES = 6_000  # of a status, percent-encoded: clients take 8 KiB of headers
# With letters, digits and `-._`, all of ASCII that shows but the percent sign.
_UNESCAPED = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}~"
_CUT_ESCAPE = re.compile(rb"%.?\Z")
_KNOWN_BLOCKS = 64
_KNOWN_BLOCK_BYTES = 1024  # longer ones are not remembered
_MAX_TIMEOUT_DIGITS = 8
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

Metadata = tuple[tuple[str, str | bytes], ...]
# Of the transport, and not of the caller.
_NOT_METADATA = frozenset({"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"})


class RequestHead(NamedTuple):
    """What the headers of a call say."""

    method: str
    path: str
    content_type: str
    encoding: str  # of messages that say that they are compressed
    timeout_s: float | None
    metadata: Metadata
    flaw: str = ""  # what is wrong with it, for the call alone
    flaw_code: StatusCode = StatusCode.INTERNAL


class HeadReader:
    """The headers of one connection, in their order: each block may rest on those before it.

    A client's calls are alike, so once their headers are in HPACK's table the same few bytes come with each
    call. A block that leaves the table as it found it is read once and remembered until the table changes.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(READ_HEADER_LIST_BYTES)
        self._known: dict[bytes, RequestHead] = {}

    def read(self, block: bytes) -> RequestHead:
        """The head of one call.

        Raises:
            ConnectionBroken: it can't be read, or is too long. Nothing after it could be read either.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        if len(block) > READ_HEADER_LIST_BYTES:  # what makes a shorter list is made to cost time
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, f"a header block of {len(block)} bytes")
        table = self._decoder.header_table
        before = (table.maxsize, *table.dynamic_entries)
        try:
            found = [(_read(name), _read(value)) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError as err:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, str(err)) from err
        except (HPACKError, IndexError, ValueError) as err:  # the last for numbers that `str` refuses
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, f"HPACK: {err}") from err
        head = request_head(found)
        size = sum([len(name) + len(value) + _ENTRY_BYTES for name, value in found])
        if size > MAX_HEADER_LIST_BYTES:
            head = head._replace(
                flaw=f"SERVER: Received metadata larger than max ({size} vs. {MAX_HEADER_LIST_BYTES})",
                flaw_code=StatusCode.RESOURCE_EXHAUSTED,
            )
        if (table.maxsize, *table.dynamic_entries) != before or len(self._known) >= _KNOWN_BLOCKS:
            self._known.clear()
        elif len(block) <= _KNOWN_BLOCK_BYTES:
            self._known[block] = head
        return head


def _read(text: bytes | str) -> str:
    # What is no UTF-8 is the trouble of one call, and must not end all others of its connection.
    return text if isinstance(text, str) else text.decode(errors="replace")


def request_head(headers: Iterable[tuple[str, str]]) -> RequestHead:
    """Sort the headers of a call. Pure."""
    pseudo: dict[str, str] = {}
    metadata: list[tuple[str, str | bytes]] = []
    flaw = ""
    for name, value in headers:
        if name[:1] == ":":
            flaw = flaw or ("a pseudo-header comes late or twice" if metadata or name in pseudo else "")
            pseudo[name] = value
        elif name in _NOT_METADATA:
            pseudo[name] = value
        elif name.endswith("-bin"):
            try:
                metadata += [(name, part) for part in _binary(value)]
            except ValueError:  # binascii.Error is one, and there are others for what is not ASCII
                flaw = flaw or f"metadata {name[:100]}: not base64"
        else:
            metadata.append((name, value))
    timeout_s = None
    if "grpc-timeout" in pseudo:
        timeout_s = _timeout_s(pseudo["grpc-timeout"])
        if timeout_s is None:
            flaw = flaw or f"grpc-timeout: found {pseudo['grpc-timeout'][:100]!r}, expected digits and a unit"
    return RequestHead(
        pseudo.get(":method", ""),
        pseudo.get(":path", ""),
        pseudo.get("content-type", ""),
        pseudo.get("grpc-encoding", "identity"),
        timeout_s,
        tuple(metadata),
        flaw,
    )


def _timeout_s(text: str) -> float | None:
    digits, unit = text[:-1], _UNIT_S.get(text[-1:])
    if unit is None or not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_TIMEOUT_DIGITS):
        return None
    return int(digits) * unit


def _binary(value: str) -> list[bytes]:
    # Senders may leave out the padding, and join values of one name by commas.
    return [base64.b64decode(part + "=" * (-len(part) % 4), validate=True) for part in value.split(",")]


def _text(text: bytes) -> bytes:
    """A string of HPACK, not Huffman-coded."""
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    length -= 0x7F
    number = bytearray((0x7F,))
    while length >= 0x80:
        number.append(length & 0x7F | 0x80)
        length >>= 7
    number.append(length)
    return bytes(number) + text


def _line(name: bytes, value: bytes) -> bytes:
    """A header that enters no table: what this end sends is short, and reading it stays free of state."""
    return b"\0" + _text(name) + _text(value)


_STATUS_200 = b"\x88"  # in HPACK's static table
HEAD_BLOCK = _STATUS_200 + _line(b"content-type", b"application/grpc")
OK_BLOCK = _line(b"grpc-status", b"0")
_ENCODINGS = _line(b"grpc-accept-encoding", b"identity,deflate,gzip")


def status_block(code: int, message: str) -> bytes:
    """The trailers of a call that ends with a status."""
    encoded = _percent_encoded(message)
    if len(encoded) > MAX_MESSAGE_BYTES:  # cut where a character ends
        kept = unquote_to_bytes(_CUT_ESCAPE.sub(b"", encoded[:MAX_MESSAGE_BYTES]))
        encoded = _percent_encoded(kept.decode(errors="ignore")) + b"..."
    return _line(b"grpc-status", b"%d" % code) + (_line(b"grpc-message", encoded) if encoded else b"")


def _percent_encoded(text: str) -> bytes:
    # Half a surrogate, as in names of files that are no UTF-8, can't be sent.
    return quote(text, safe=_UNESCAPED, errors="replace").encode()


def refusal_block(status: int, code: int, message: str) -> bytes:
    """The only headers of a call that is answered without a message."""
    shown = _STATUS_200 if status == 200 else _line(b":status", b"%d" % status)
    return shown + _line(b"content-type", b"application/grpc") + _ENCODINGS + status_block(code, message)
