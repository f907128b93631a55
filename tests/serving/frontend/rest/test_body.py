import asyncio
from typing import Any

import numpy as np
import pytest

from torchere.serving.frontend.alignment import TENSOR_ALIGNMENT
from torchere.serving.frontend.rest import body
from torchere.serving.frontend.rest.body import (
    BodyTooLarge,
    ClientGone,
    WholeBody,
    discard_rest,
    read_body,
)


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
    return asyncio.run(read_body(incoming.receive, announced, limit))


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
    with pytest.raises(BodyTooLarge):
        read(incoming, announced=11)
    assert len(incoming.left) == 1


def test_a_body_without_an_announcement_is_refused_once_it_is_too_long():
    incoming = Incoming(*[b"aaaa"] * 10)
    with pytest.raises(BodyTooLarge):
        read(incoming)
    assert len(incoming.left) == 7


@pytest.mark.parametrize("chunks", [[b"a" * 11], [b"a" * 10, b"a"]])
def test_one_byte_too_many_is_too_many(chunks):
    with pytest.raises(BodyTooLarge):
        read(Incoming(*chunks))


@pytest.mark.parametrize("chunks", [[], [b"a"]])
def test_a_client_that_goes_away_is_told_from_one_that_is_done(chunks):
    with pytest.raises(ClientGone):
        read(Incoming(*chunks, ends=False))


def test_what_is_left_of_a_refused_body_is_dropped_to_its_end():
    rest = Incoming(*[b"aaaa"] * 100)
    asyncio.run(discard_rest(rest.receive))
    assert rest.left == []


def test_a_refused_body_without_end_is_dropped_for_a_while(monkeypatch):
    async def endless():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"aaaa", "more_body": True}

    monkeypatch.setattr(body, "LINGER_S", 0.05)
    asyncio.run(asyncio.wait_for(discard_rest(endless), 30))


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
