import asyncio
import time
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from torchere.serving.errors import Cancelled
from torchere.serving.frontend.alignment import TENSOR_ALIGNMENT
from torchere.serving.frontend.rest.bodies import (
    MAX_LINE_BYTES,
    Chunks,
    WholeBody,
    read_body,
)
from torchere.serving.frontend.rest.errors import BadMessage, BodyTooLong


class Incoming:
    """Hands out chunks one by one; `left` are those that nobody asked for."""

    def __init__(self, *chunks: bytes, ends: bool = True) -> None:
        self.left = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        if ends:
            self.left[-1]["more_body"] = False
        else:
            self.left.append({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        return self.left.pop(0)


def read(incoming: Incoming, announced: int = 0, limit: int = 10) -> bytes:
    headers = [(b"content-length", b"%d" % announced)] if announced else []
    request = Request({"type": "http", "headers": headers}, incoming.receive)
    return asyncio.run(read_body(request, limit))


def test_a_body_of_one_chunk_is_that_chunk():
    assert read(Incoming(b"0123456789"), announced=10) == b"0123456789"


def test_a_body_of_many_chunks_is_joined():
    assert read(Incoming(*[b"a"] * 10, b"")) == b"a" * 10


@pytest.mark.parametrize("chunks", [[], [b"a"]])
def test_a_message_that_says_nothing_is_an_empty_last_one(chunks):
    incoming = Incoming(*chunks, b"")
    incoming.left[-1] = {"type": "http.request"}
    assert read(incoming) == b"".join(chunks)


def test_a_body_that_announces_too_much_is_refused_unread():
    incoming = Incoming(b"a")
    with pytest.raises(BodyTooLong):
        read(incoming, announced=11)
    assert len(incoming.left) == 1


def test_a_body_without_an_announcement_is_refused_once_it_is_too_long():
    incoming = Incoming(*[b"aaaa"] * 10)
    with pytest.raises(BodyTooLong):
        read(incoming)
    assert len(incoming.left) == 7


@pytest.mark.parametrize("chunks", [[b"a" * 11], [b"a" * 10, b"a"]])
def test_one_byte_too_many_is_too_many(chunks):
    with pytest.raises(BodyTooLong):
        read(Incoming(*chunks))


@pytest.mark.parametrize("chunks", [[], [b"a"]])
def test_a_client_that_goes_away_is_told_from_one_that_is_done(chunks):
    with pytest.raises(Cancelled):
        read(Incoming(*chunks, ends=False))


@pytest.mark.parametrize("length", [1, 15, 16, 70_001])
def test_a_large_body_ends_where_a_tensor_may_end(length: int) -> None:
    whole = WholeBody(length)

    assert len(whole.view) == length
    assert (np.frombuffer(whole.view, np.uint8).ctypes.data + length) % TENSOR_ALIGNMENT == 0


def test_a_whole_body_takes_in_piece_after_piece():
    whole = WholeBody(6)
    whole.add(b"abc")
    assert len(whole.room) == 3
    whole.room[:2] = b"de"
    whole.filled(2)
    whole.add(bytearray(b"f"))
    assert whole.view == b"abcdef"
    assert not whole.room


CHUNKED = b'3\r\nabc\r\n10;x=y;z;w="a b;\\""\r\n0123456789abcdef\r\n001\r\n!\r\n00\r\nX: 1\r\nY:\r\n\r\n'


@pytest.mark.parametrize("size", [*range(1, 12), 100])
def test_chunks_are_decoded_in_pieces_of_any_size_up_to_their_end(size):
    chunks, text, decoded = Chunks(), CHUNKED + b"GET / HTTP/1.1", b""
    for start in range(0, len(text), size):
        piece = b"before" + text[start : start + size]
        end, found = chunks.feed(piece, len(b"before"))
        decoded += b"".join(found)
        if chunks.over:
            break
        assert end == len(piece)
    assert decoded == b"abc0123456789abcdef!"
    assert text[start + end - len(b"before") :] == b"GET / HTTP/1.1"


@pytest.mark.parametrize(
    "extensions", [" ;a=1", "; a=1", ";a = 1", "\t;\ta\t=\t1", ' ; a = "b ;c" ; d', ";a ;b", ";a= 1; b =2"]
)
def test_blanks_around_the_signs_of_an_extension_are_ignored(extensions):
    chunks, line_end = Chunks(), extensions.encode() + b"\r\n"
    text = b"3" + line_end + b"abc\r\n0" + line_end + b"\r\n"
    assert chunks.feed(text, 0) == (len(text), [b"abc"])
    assert chunks.over


@pytest.mark.parametrize(
    "unit", [b" ", b"\t;", b" ; a", b" ; a = b", b';a = " "', b"; a =", b'; a = "\\ ', b"a", b" ;a ;"]
)
def test_a_long_line_of_blanks_and_extensions_is_judged_soon(unit):
    for start in (b"3", b"3;", b"3;a", b"3;a =", b'3;a="'):
        text = start + unit * ((MAX_LINE_BYTES - 20) // len(unit)) + b"\x00\r\n"
        begun_s = time.thread_time()
        with pytest.raises(BadMessage, match="a chunk has no size"):
            Chunks().feed(text, 0)
        assert time.thread_time() - begun_s < 0.1


BROKEN = {
    "longer than its size": b"3\r\nabcd\r\n",
    "no size": b"zz\r\n",
    "a sign": b"-1\r\n",
    "a prefix": b"0x3\r\n",
    "an empty size": b"\r\n",
    "a size and more": b"3 x\r\n",
    "a size and a blank": b"3 \r\n",
    "a blank and a size": b" 3\r\n",
    "an extension without a name": b"3;\r\nabc",
    "an extension of blanks": b"3 ; \r\nabc",
    "an extension and a blank": b"3;a \r\nabc",
    "an extension of two words": b"3;a b\r\nabc",
    "an extension without a value": b"3;a= \r\nabc",
    "an extension that is no token": b"3;a=\xee\r\nabc",
    "an extension with an open quote": b'3;a="b\r\nabc',
    "a size out of range": b"8000000000000000\r\n",
    "a bare line feed": b"3\nabc",
    "a bare carriage return": b"3\r\nabc\rX",
    "a trailer that is no header": b"0\r\nbad header\r\n\r\n",
    "a trailer without a name": b"0\r\n: x\r\n\r\n",
    "a trailer with a control character": b"0\r\nX: \x00\r\n\r\n",
    "a line without an end": b"3;" + b"a" * MAX_LINE_BYTES,
}


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_chunks_are_refused(text, size):
    chunks = Chunks()
    with pytest.raises(BadMessage):
        for start in range(0, len(text), size):
            chunks.feed(text[start : start + size], 0)
