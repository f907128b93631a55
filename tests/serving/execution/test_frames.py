"""Cutting a stream into frames, however it arrives."""

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.execution.frames import FrameProtocol, FrameReader
from torchere.serving.execution.wire import HEADER, MAX_FRAME_BYTES


class Transport:
    """Remembers that it was aborted."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(1, 64))
def test_frames_come_out_as_they_went_in(payloads: list[bytes], piece: int) -> None:
    seen: list[bytes] = []
    protocol = FrameProtocol(lambda view: seen.append(bytes(view)), lambda: None)
    stream = b"".join(HEADER.pack(len(payload)) + payload for payload in payloads)
    for start in range(0, len(stream), piece):
        protocol.data_received(stream[start : start + piece])
    assert seen == payloads


def test_a_length_over_the_limit_ends_the_connection() -> None:
    transport = Transport()
    protocol = FrameProtocol(lambda view: None, lambda: None)
    protocol.connection_made(transport)  # type: ignore[arg-type]
    protocol.data_received(HEADER.pack(MAX_FRAME_BYTES + 1) + b"x")
    assert transport.aborted
    assert f"sent a frame of {MAX_FRAME_BYTES + 1} bytes" in protocol.fault


class Pieces:
    """A connection that gives `stream` in pieces of at most `size` bytes."""

    def __init__(self, stream: bytes, size: int) -> None:
        self._stream = stream
        self._size = size

    def recv_into(self, room: memoryview) -> int:
        """As that of a socket."""
        assert len(room)
        count = min(self._size, len(room))
        piece, self._stream = self._stream[:count], self._stream[count:]
        room[: len(piece)] = piece
        return len(piece)


def read_all(connection: Any) -> list[bytes]:
    reader = FrameReader(connection)
    frames = []
    while (payload := reader.next()) is not None:
        frames.append(bytes(payload))
    return frames


@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(1, 64))
def test_a_reader_gives_frames_as_they_went_in(payloads: list[bytes], piece: int) -> None:
    stream = b"".join(HEADER.pack(len(payload)) + payload for payload in payloads)
    assert read_all(Pieces(stream, piece)) == payloads


@pytest.mark.parametrize("piece", [1000, 65_536, 10**6])
@pytest.mark.parametrize("length", [65_531, 65_532, 65_533, 200_000])
def test_frames_that_fill_the_reader_s_room_or_more_come_out_whole(length: int, piece: int) -> None:
    payloads = [b"before", bytes(range(256)) * (length // 256) + b"x" * (length % 256), b"", b"after"]
    stream = b"".join(HEADER.pack(len(payload)) + payload for payload in payloads)
    assert read_all(Pieces(stream, piece)) == payloads


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_stream_that_ends_within_a_frame_is_over(length: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(HEADER.pack(3) + b"one" + HEADER.pack(length) + b"two")
        ours.shutdown(socket.SHUT_WR)
        assert read_all(theirs) == [b"one"]
