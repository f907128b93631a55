"""Header blocks: read from HPACK (RFC 7541) with the `hpack` library, written without its tables."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, MutableSequence, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from hpack import Decoder, HPACKError
from hpack.exceptions import OversizedHeaderListError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from torchere.serving.frontend.http2.frames import ConnectionBroken, ErrorCode
from torchere.serving.frontend.http2.messages import StatusCode
from torchere.serving.frontend.known_heads import Known

MAX_HEADER_LIST_BYTES = 16_384  # as counted by RFC 7541, 4.1; gRPC's own servers accept as much
READ_HEADER_LIST_BYTES = 2 * MAX_HEADER_LIST_BYTES  # up to this, a list over the limit fails only its call
MAX_TABLE_SIZE_UPDATES = 2  # at the beginning of a block
_ENTRY_BYTES = 32  # counted for each header in addition to its name and value
MAX_MESSAGE_BYTES = 6_000  # of a status, percent-encoded, with its details: clients accept 8 KiB of headers
# Together with letters, digits and `-._`: all of printable ASCII except the percent sign.
_UNESCAPED = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}~"
_CUT_ESCAPE = re.compile(rb"%.?\Z")
_KNOWN_BYTES = 65_536  # memory of each of a connection's two caches of heads; enough for about fifteen heads
_KNOWN_HEAD_BYTES = 4096  # longer header lists and blocks are not remembered
_FIELD_BYTES = 256  # memory of a field's Python objects, in addition to twice its bytes in the header list
_MAX_TIMEOUT_DIGITS = 8
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

# Flags of HPACK (RFC 7541, 6) in the first byte of a field, and of a string.
_INDEXED, _INCREMENTAL, _TABLE_SIZE, _HUFFMAN = 0x80, 0x40, 0x20, 0x80
_UPDATE_MASK, _UPDATE_VALUE = 0xE0, 0x1F
_STATIC = HeaderTable.STATIC_TABLE
_STATIC_ENTRIES = len(_STATIC)
_TIMEOUT = b"grpc-timeout"
_TIMEOUT_HUFFMAN = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(_TIMEOUT)
# The two encodings of the name in a literal field, after the byte which says that the name is a string.
_TIMEOUT_NAMES = (
    bytes((len(_TIMEOUT),)) + _TIMEOUT,
    bytes((_HUFFMAN | len(_TIMEOUT_HUFFMAN),)) + _TIMEOUT_HUFFMAN,
)

Field = tuple[bytes, bytes]
Metadata = tuple[tuple[str, str | bytes], ...]
# Headers that belong to the transport, not to the application.
_NOT_METADATA = frozenset({"te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"})


class RequestHead(NamedTuple):
    """The request headers of a call, except for its time-out. Calls with equal headers share one."""

    method: str
    path: str
    content_type: str
    encoding: str  # of messages that are compressed
    metadata: Metadata
    flaw: str = ""  # the error that ends this call, and no other
    flaw_code: StatusCode = StatusCode.INTERNAL


Request = tuple[RequestHead, float | None]  # and the call's time-out in seconds; None: it has none


class HeaderReader:
    """Decodes the header blocks of one connection, in their order: each may refer to those before it.

    Decoding a block takes some 25 us, and a client's calls are alike. So heads are cached twice: by the bytes
    of the block, while the table that it refers to is unchanged; and by the fields of the block except
    `grpc-timeout`, for clients whose calls differ only in their deadline. Both caches limit their memory,
    because any client can fill them, and they stay while the connection is idle.
    """

    __slots__ = ("_blocks", "_decoder", "_heads")

    def __init__(self) -> None:
        self._decoder = Decoder(READ_HEADER_LIST_BYTES)
        self._blocks: Known[bytes, Request] = Known(_KNOWN_BYTES)
        # With the memory of each head, because a block that refers to the head may be kept longer.
        self._heads: Known[tuple[Field, ...], tuple[RequestHead, int]] = Known(_KNOWN_BYTES)

    def read(self, block: bytes) -> Request:
        """Decode the header block of one call: its request headers or its trailers.

        Raises:
            ConnectionBroken: the block is not HPACK, or is too long. Later blocks can't be decoded either.
        """
        return self._blocks.get(block) or self._indexed(block) or self._decoded(block)

    def _indexed(self, block: bytes) -> Request | None:
        """Read a block of references to a known head's fields, with at most one literal: the time-out.

        Returns:
            The request; None for any other block, even an invalid one, which leaves the table unchanged.
        """
        table = self._decoder.header_table
        try:
            fields, timeout, last_used = _references(block, table.dynamic_entries)
        except (IndexError, ValueError, HPACKError):
            return None
        known = self._heads.get(fields)
        timeout_s = None if timeout is None else _timeout_s(timeout.decode("latin-1"))
        if known is None or (timeout is None) != (timeout_s is None):
            return None
        head, memory_bytes = known
        request = (head, timeout_s)
        if timeout is None or last_used is None:
            self._blocks.keep(block, request, memory_bytes)
            return request
        table.add(_TIMEOUT, timeout)
        self._blocks.clear()
        if last_used - _STATIC_ENTRIES > len(table.dynamic_entries):  # the time-out evicted it
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, f"HPACK: no entry {last_used}")
        return request

    def _decoded(self, block: bytes) -> Request:
        """Decode any block."""
        if len(block) > READ_HEADER_LIST_BYTES:  # a longer block of a short list only takes time
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, f"a header block of {len(block)} bytes")
        _check_table_sizes(block)
        table = self._decoder.header_table
        before = (table.maxsize, *table.dynamic_entries)
        try:
            fields = self._decoder.decode(block, raw=True)
            found = [(_text(name), _text(value)) for name, value in fields]
        except OversizedHeaderListError as err:
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, str(err)) from err
        except (HPACKError, IndexError, ValueError) as err:  # ValueError: a number too long for `str`
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, f"HPACK: {err}") from err
        head, timeout_s = request_head(found)
        size = sum([len(name) + len(value) + _ENTRY_BYTES for name, value in found])
        if size > MAX_HEADER_LIST_BYTES:
            head = head._replace(
                flaw=f"SERVER: Received metadata larger than max ({size} vs. {MAX_HEADER_LIST_BYTES})",
                flaw_code=StatusCode.RESOURCE_EXHAUSTED,
            )
        request = (head, timeout_s)
        memory_bytes = 2 * size + _FIELD_BYTES * (len(found) + 1) + len(block)
        is_short = max(size, len(block)) <= _KNOWN_HEAD_BYTES
        if (table.maxsize, *table.dynamic_entries) != before:
            self._blocks.clear()
            _own_entries(table.dynamic_entries)
        elif is_short:
            self._blocks.keep(block, request, memory_bytes)
        if is_short and not head.flaw:
            listed = tuple([(name, value) for name, value in fields if name != _TIMEOUT])
            self._heads.keep(listed, (head, memory_bytes), memory_bytes)
        return request


def _check_table_sizes(block: bytes) -> None:
    """Refuse a block that begins with more table size updates than RFC 7541, 4.2, allows.

    The library takes 2 us for each; after a field it refuses updates itself.
    """
    at = updates = 0
    while at < len(block) and block[at] & _UPDATE_MASK == _TABLE_SIZE:
        updates += 1
        if updates > MAX_TABLE_SIZE_UPDATES:
            raise ConnectionBroken(ErrorCode.COMPRESSION_ERROR, "HPACK: too many table size updates")
        is_long = block[at] & _UPDATE_VALUE == _UPDATE_VALUE
        at += 1
        while is_long and at < len(block):
            is_long = bool(block[at] & 0x80)
            at += 1


def _own_entries(entries: MutableSequence[Field]) -> None:
    """Replace the library's views by bytes: a view keeps its whole block alive, and is slower to compare."""
    for place, (name, value) in enumerate(list(entries)):
        if not (isinstance(name, bytes) and isinstance(value, bytes)):
            entries[place] = (bytes(name), bytes(value))


def _references(block: bytes, dynamic: Sequence[Field]) -> tuple[tuple[Field, ...], bytes | None, int | None]:
    """Look up the fields of a block of indexed fields and at most one literal time-out. Pure.

    It and the functions below raise IndexError, ValueError or HPACKError for an invalid or any other block.

    Returns:
        The fields without the time-out; the time-out; and, if the block adds the time-out to the table, the
        greatest index that is used after it (0: none), else None.
    """
    fields: list[Field] = []
    timeout: bytes | None = None
    last_used: int | None = None
    at, end = 0, len(block)
    first_dynamic = _STATIC_ENTRIES + 1  # greater by one after a time-out that is added
    while at < end:
        first = block[at]
        if first > _INDEXED:  # 0x80 is index 0, which does not exist
            index, at = (first & 0x7F, at + 1) if first < 0xFF else _integer(block, at, 0x7F)
            if index <= _STATIC_ENTRIES:
                fields.append(_STATIC[index - 1])
                continue
            if index < first_dynamic:
                raise ValueError("the time-out twice")
            if last_used is not None:
                last_used = max(last_used, index)
            field = dynamic[index - first_dynamic]
            if field[0] != _TIMEOUT:
                fields.append(field)
                continue
            found = field[1]
        else:
            found, at = _timeout_literal(block, at, dynamic)
            if first & _INCREMENTAL:
                last_used, first_dynamic = 0, first_dynamic + 1
        if timeout is not None:
            raise ValueError("the time-out twice")
        timeout = found
    return tuple(fields), timeout, last_used


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return an HPACK integer with at most one byte after its prefix, and the offset of the next byte."""
    value = block[at] & mask
    if value < mask:
        return value, at + 1
    more = block[at + 1]
    if more & 0x80:
        raise ValueError("a long integer")
    return value + more, at + 2


def _timeout_literal(block: bytes, at: int, dynamic: Sequence[Field]) -> tuple[bytes, int]:
    """Return the value of a literal `grpc-timeout`, and the offset of the next byte."""
    first = block[at]
    if first & (_INDEXED | _INCREMENTAL | _TABLE_SIZE) in (_INDEXED, _TABLE_SIZE):
        raise ValueError("no literal")
    index, at = _integer(block, at, 0x3F if first & _INCREMENTAL else 0x0F)
    if index > _STATIC_ENTRIES:
        if dynamic[index - _STATIC_ENTRIES - 1][0] == _TIMEOUT:
            return _string(block, at)
    elif not index:
        for name in _TIMEOUT_NAMES:
            if block.startswith(name, at):
                return _string(block, at + len(name))
    raise ValueError("another literal")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Return a short HPACK string, and the offset of the next byte."""
    length, start = _integer(block, at, 0x7F)
    text = block[start : start + length]
    if len(text) != length:
        raise ValueError("incomplete")
    return (bytes(decode_huffman(text)) if block[at] & _HUFFMAN else text), start + length


def _text(text: bytes | str) -> str:
    # Bytes that are not UTF-8 are an error of one call, and must not end other calls of its connection.
    return text if isinstance(text, str) else text.decode(errors="replace")


def request_head(headers: Iterable[tuple[str, str]]) -> Request:
    """Convert the header fields of a call to a `Request`. Pure."""
    special: dict[str, str] = {}
    metadata: list[tuple[str, str | bytes]] = []
    flaw = ""
    for name, value in headers:
        if name[:1] == ":":
            flaw = flaw or ("a pseudo-header comes late or twice" if metadata or name in special else "")
            special[name] = value
        elif name in _NOT_METADATA:
            special[name] = value
        elif name.endswith("-bin"):
            try:
                metadata += [(name, part) for part in _binary(value)]
            except ValueError:  # binascii.Error, or another one for text that is not ASCII
                flaw = flaw or f"metadata {name[:100]}: not base64"
        else:
            metadata.append((name, value))
    timeout_s = None
    if "grpc-timeout" in special:
        timeout_s = _timeout_s(special["grpc-timeout"])
        if timeout_s is None:
            flaw = (
                flaw or f"grpc-timeout: found {special['grpc-timeout'][:100]!r}, expected digits and a unit"
            )
    found = RequestHead(
        special.get(":method", ""),
        special.get(":path", ""),
        special.get("content-type", ""),
        special.get("grpc-encoding", "identity"),
        tuple(metadata),
        flaw,
    )
    return found, timeout_s


def _timeout_s(text: str) -> float | None:
    digits, unit = text[:-1], _UNIT_S.get(text[-1:])
    if unit is None or not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_TIMEOUT_DIGITS):
        return None
    return int(digits) * unit


def _binary(value: str) -> list[bytes]:
    # Senders may omit the padding, and join values of one name by commas.
    return [base64.b64decode(part + "=" * (-len(part) % 4), validate=True) for part in value.split(",")]


def _encoded(text: bytes) -> bytes:
    """Encode a string of HPACK without Huffman coding."""
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


def _literal(name: bytes, value: bytes) -> bytes:
    """Encode a header without adding it to a table: responses are short, and encoding stays stateless."""
    return b"\0" + _encoded(name) + _encoded(value)


_STATUS_200 = b"\x88"  # in HPACK's static table
HEAD_BLOCK = _STATUS_200 + _literal(b"content-type", b"application/grpc")
OK_BLOCK = _literal(b"grpc-status", b"0")
_ENCODINGS = _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")


def status_block(code: int, message: str, details: bytes = b"") -> bytes:
    """Encode the trailers of a call that ends with a status.

    Args:
        code: of gRPC.
        message: is cut if it is longer than `MAX_MESSAGE_BYTES`.
        details: a `google.rpc.Status` with the same message; left out if both together would be too long.
    """
    encoded = _percent_encoded(message[: MAX_MESSAGE_BYTES + 1])  # a megabyte would take 5 ms and more
    if len(encoded) > MAX_MESSAGE_BYTES:  # cut where a character ends
        kept = unquote_to_bytes(_CUT_ESCAPE.sub(b"", encoded[:MAX_MESSAGE_BYTES]))
        encoded = _percent_encoded(kept.decode(errors="ignore")) + b"..."
    block = _literal(b"grpc-status", b"%d" % code)
    if encoded:
        block += _literal(b"grpc-message", encoded)
    if details:
        text = base64.b64encode(details).rstrip(b"=")
        if len(encoded) + len(text) <= MAX_MESSAGE_BYTES:
            block += _literal(b"grpc-status-details-bin", text)
    return block


def _percent_encoded(text: str) -> bytes:
    # Half a surrogate pair, as in file names that are not UTF-8, can't be sent.
    return quote(text, safe=_UNESCAPED, errors="replace").encode()


def refusal_block(status: int, code: int, message: str, details: bytes = b"") -> bytes:
    """Encode the only header block (Trailers-Only) of a call that is answered without a message."""
    shown = _STATUS_200 if status == 200 else _literal(b":status", b"%d" % status)
    content_type = _literal(b"content-type", b"application/grpc")
    return shown + content_type + _ENCODINGS + status_block(code, message, details)
