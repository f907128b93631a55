"""Cutting a stream into frames, however it arrives."""

import asyncio
import gc
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.workers import frames
from torchere.serving.workers.frames import HEADER, MAX_FRAME_BYTES, FrameReader, FrameSocket, send_all


def stream_of(payloads: list[bytes]) -> bytes:
    return b"".join(HEADER.pack(len(payload)) + payload for payload in payloads)


class Server:
    """The server's end of a socket pair, and what it has received; `theirs` is the worker's end."""

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.seen: list[bytes] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.then: Callable[[], object] = lambda: None  # called behind each frame
        self.frames = FrameSocket(self.connection, self.take, self.end.set_result)

    def take(self, view: memoryview) -> None:
        self.seen.append(bytes(view))
        self.then()

    async def fault(self) -> str:
        """What the end of the stream is described as."""
        return await asyncio.wait_for(asyncio.shield(self.end), 30)


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.frames.close()
        server.theirs.close()


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(call, *arguments), 30)


@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(1, 64))
def test_frames_come_out_as_they_went_in(payloads: list[bytes], piece: int) -> None:
    async def main() -> None:
        async with serving() as server:
            stream = stream_of(payloads)
            for start in range(0, len(stream), piece):
                server.theirs.sendall(stream[start : start + piece])
                await asyncio.sleep(0)
            server.theirs.close()
            assert await server.fault() == ""
            assert server.seen == payloads

    asyncio.run(main())


@pytest.mark.parametrize("length", [0, 65_536, 262_145, 600_000])
def test_frames_beyond_a_turn_wait_while_the_loop_does_other_work(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(frames, "TURN_S", -1.0)  # each turn is over at the first look at the clock

    async def main() -> None:
        async with serving() as server:
            payloads = [b"%d" % number for number in range(500)] + [b"x" * length, b"after"]
            turns = []

            def other_work() -> None:
                turns.append(len(server.seen))
                if not server.end.done():
                    asyncio.get_running_loop().call_soon(other_work)

            other_work()
            await in_thread(server.theirs.sendall, stream_of(payloads))
            server.theirs.close()
            assert await server.fault() == ""
            assert server.seen == payloads
            assert max(later - earlier for earlier, later in pairwise(turns)) <= frames.FRAMES_A_LOOK

    asyncio.run(main())


@pytest.mark.parametrize("length", [5_000, 100_000, 300_000])
def test_a_long_frame_that_takes_a_turn_is_the_last_of_it(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(frames, "TURN_S", -1.0)

    async def main() -> None:
        async with serving() as server:
            payloads = [bytes([number]) * length for number in range(30)]
            turns = []

            def other_work() -> None:
                turns.append(len(server.seen))
                if not server.end.done():
                    asyncio.get_running_loop().call_soon(other_work)

            other_work()
            await in_thread(server.theirs.sendall, stream_of(payloads))
            server.theirs.close()
            assert await server.fault() == ""
            assert server.seen == payloads
            assert max(later - earlier for earlier, later in pairwise(turns)) == 1

    asyncio.run(main())


def test_frames_that_were_asked_for_count_for_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(frames, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    async def main() -> None:
        async with serving() as server:

            def then() -> None:
                clock.now_s += 1
                server.frames.begin_turn()

            server.then = then
            server.theirs.sendall(stream_of([b"x"] * 500))
            while not server.seen:
                await asyncio.sleep(0)
            assert len(server.seen) == 500

    asyncio.run(main())


@pytest.mark.parametrize("piece", [999, 65_536, 10**7])
@pytest.mark.parametrize("length", [65_531, 65_536, 262_139, 262_140, 262_141, 262_145, 600_000, 9_000_000])
def test_frames_of_any_length_are_received_whole_among_short_ones(length: int, piece: int) -> None:
    async def main() -> None:
        payloads = [b"before", bytes(range(256)) * (length // 256) + b"x" * (length % 256), b"", b"after"] * 2
        stream = stream_of(payloads)

        def send() -> None:
            for start in range(0, len(stream), piece):
                server.theirs.sendall(stream[start : start + piece])
            server.theirs.close()

        async with serving() as server:
            await in_thread(send)
            assert await server.fault() == ""
            assert server.seen == payloads

    asyncio.run(main())


def test_a_length_over_the_limit_ends_the_stream() -> None:
    async def main() -> None:
        async with serving() as server:
            server.theirs.sendall(stream_of([b"first"]) + HEADER.pack(MAX_FRAME_BYTES + 1) + b"x")
            assert await server.fault() == (
                f"sent a frame of {MAX_FRAME_BYTES + 1} bytes, expected at most {MAX_FRAME_BYTES}"
            )
            assert (server.seen, server.frames.open) == ([b"first"], False)
            with pytest.raises(BrokenPipeError):
                server.theirs.sendall(b"more")

    asyncio.run(main())


def test_a_header_alone_costs_no_memory() -> None:
    async def main() -> None:
        async with serving() as server:
            gc.collect()
            before = psutil.Process().memory_info().rss
            server.theirs.sendall(HEADER.pack(MAX_FRAME_BYTES) + b"x" * 1000)
            server.theirs.shutdown(socket.SHUT_WR)
            peaks = []
            while not server.end.done():
                await asyncio.sleep(0)
                peaks.append(psutil.Process().memory_info().rss)
            assert max(peaks) - before < 100 * 2**20
            assert (await server.fault(), server.seen) == ("", [])

    asyncio.run(main())


def test_a_stream_that_is_reset_within_a_frame_is_over() -> None:
    async def main() -> None:
        server_end, worker_end = await tcp_pair()
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        frames = FrameSocket(server_end, lambda view: None, ended.set_result)
        worker_end.sendall(HEADER.pack(10) + b"x")
        worker_end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        worker_end.close()
        assert await asyncio.wait_for(ended, 30) == ""
        assert not frames.open

    asyncio.run(main())


async def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Only TCP can be reset at will."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker_end = socket.create_connection(listener.getsockname())
        server_end, _ = listener.accept()
    return server_end, worker_end


def test_what_was_sent_before_a_write_fails_is_read_to_its_end() -> None:
    async def main() -> None:
        async with serving() as server:
            last_words = [b"%d" % number * 1000 for number in range(100)]
            server.theirs.sendall(stream_of(last_words))
            server.theirs.close()
            server.frames.send([bytearray(b"to nobody")])
            assert not server.frames.open
            assert await server.fault() == ""
            assert server.seen == last_words
            server.frames.send([bytearray(b"without effect")])

    asyncio.run(main())


def test_frames_behind_the_first_of_a_turn_go_out_together_at_its_end() -> None:
    async def main() -> None:
        async with serving() as server:
            server.theirs.setblocking(False)
            for number in range(100):
                server.frames.send([bytearray(stream_of([b"%02d" % number]))])
            assert server.theirs.recv(10_000) == stream_of([b"00"])
            await asyncio.sleep(0)
            rest = stream_of([b"%02d" % number for number in range(1, 100)])
            assert server.theirs.recv(10_000) == rest
            server.frames.send([bytearray(b"the next turn")])
            assert server.theirs.recv(10_000) == b"the next turn"

    asyncio.run(main())


def test_a_slow_reader_gets_everything_while_the_loop_goes_on() -> None:
    async def main() -> None:
        async with serving() as server:
            payloads = [bytes([number]) * (number * 40_000) for number in range(40)]
            for payload in payloads:
                server.frames.send([bytearray(stream_of([payload]))])
            reader = FrameReader(server.theirs)
            for payload in payloads:
                turns = 0
                reading = asyncio.ensure_future(in_thread(reader.next))
                while not reading.done():
                    await asyncio.sleep(0)
                    turns += 1
                assert turns > 0
                assert await reading == payload

    asyncio.run(main())


def test_the_worker_reads_all_and_then_the_end_when_writing_is_closed() -> None:
    async def main() -> None:
        async with serving() as server:
            server.frames.send([bytearray(stream_of([b"last"]))])
            server.frames.close_writing()
            assert read_all(server.theirs) == [b"last"]
            server.theirs.sendall(stream_of([b"answer"]))
            server.theirs.close()
            assert await server.fault() == ""
            assert server.seen == [b"answer"]

    asyncio.run(main())


def test_a_frame_socket_that_is_closed_while_it_hands_on_a_frame_hands_on_no_other() -> None:
    async def main() -> None:
        async with serving() as server:

            def close(view: memoryview) -> None:
                server.seen.append(bytes(view))
                server.frames.close()

            server.frames._on_frame = close
            server.theirs.sendall(stream_of([b"first", b"second"]))
            while not server.seen:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (server.seen, server.end.done()) == ([b"first"], False)

    asyncio.run(main())


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
    assert read_all(Pieces(stream_of(payloads), piece)) == payloads


@pytest.mark.parametrize("piece", [1000, 65_536, 10**6])
@pytest.mark.parametrize("length", [65_531, 65_532, 65_533, 200_000])
def test_frames_that_fill_the_reader_s_room_or_more_come_out_whole(length: int, piece: int) -> None:
    payloads = [b"before", bytes(range(256)) * (length // 256) + b"x" * (length % 256), b"", b"after"]
    assert read_all(Pieces(stream_of(payloads), piece)) == payloads


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_stream_that_ends_within_a_frame_is_over(length: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(HEADER.pack(3) + b"one" + HEADER.pack(length) + b"two")
        ours.shutdown(socket.SHUT_WR)
        assert read_all(theirs) == [b"one"]


class Announced:
    """A server's end whose frames of one digit announce as many times 50,000 raw bytes."""

    def __init__(self) -> None:
        self.connection, self.theirs = socket.socketpair()
        self.seen: list[bytes] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.frames = FrameSocket(self.connection, self.frame, self.end.set_result)

    def frame(self, view: memoryview) -> None:
        payload = bytes(view)
        self.seen.append(payload)
        if payload.isdigit():
            self.frames.take(50_000 * int(payload), lambda raw: self.seen.append(bytes(raw)))


@pytest.mark.parametrize("piece", [7_001, 65_536, 10**7])
def test_raw_bytes_behind_a_frame_are_received_as_they_went_in(piece: int) -> None:
    async def main() -> None:
        server = Announced()
        parts: list[bytes] = []
        for count in (1, 5, 2, 20, 1):
            parts += [b"%d" % count, bytes(range(250)) * 200 * count, b"between"]
        stream = b"".join(part if len(part) > 10 else HEADER.pack(len(part)) + part for part in parts)

        def send() -> None:
            for start in range(0, len(stream), piece):
                server.theirs.sendall(stream[start : start + piece])
            server.theirs.close()

        await in_thread(send)
        assert await asyncio.wait_for(server.end, 30) == ""
        assert server.seen == parts
        server.frames.close()

    asyncio.run(main())


def test_raw_bytes_that_do_not_come_whole_are_not_handed_on() -> None:
    async def main() -> None:
        server = Announced()
        server.theirs.sendall(HEADER.pack(1) + b"1" + b"x" * 49_999)
        server.theirs.close()
        assert await asyncio.wait_for(server.end, 30) == ""
        assert server.seen == [b"1"]

    asyncio.run(main())


@pytest.mark.parametrize("piece", [1000, 65_536, 10**6])
@pytest.mark.parametrize("count", [1, 65_527, 65_528, 500_000])
def test_a_reader_gives_raw_bytes_behind_a_frame(count: int, piece: int) -> None:
    raw = bytes(range(256)) * (count // 256) + b"x" * (count % 256)
    reader = FrameReader(Pieces(HEADER.pack(3) + b"one" + raw + HEADER.pack(3) + b"two", piece))  # type: ignore[arg-type]
    assert bytes(reader.next() or b"") == b"one"
    assert bytes(reader.raw(count) or b"") == raw
    assert bytes(reader.next() or b"") == b"two"
    assert FrameReader(Pieces(b"short", piece)).raw(6) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [1000, 65_536, 10**6])
@pytest.mark.parametrize("count", [1, 65_527, 65_528, 500_000])
def test_a_reader_drops_raw_bytes_behind_a_frame(count: int, piece: int) -> None:
    reader = FrameReader(Pieces(HEADER.pack(3) + b"one" + b"x" * count + HEADER.pack(3) + b"two", piece))  # type: ignore[arg-type]
    assert bytes(reader.next() or b"") == b"one"
    assert reader.drop(count)
    assert bytes(reader.next() or b"") == b"two"
    assert not FrameReader(Pieces(b"short", piece)).drop(6)  # type: ignore[arg-type]


def test_a_frame_is_sent_with_its_raw_bytes() -> None:
    ours, theirs = socket.socketpair()
    parts = [HEADER.pack(3) + b"one", *(bytes([number]) * 40_000 for number in range(100))]
    with ours, theirs:
        sender = threading.Thread(target=send_all, args=(ours, parts))
        sender.start()
        reader = FrameReader(theirs)
        assert bytes(reader.next() or b"") == b"one"
        assert bytes(reader.raw(4_000_000) or b"") == b"".join(parts[1:])
        sender.join()
