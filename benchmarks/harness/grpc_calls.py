"""A load client for unary gRPC calls with a different deadline in each: h2load repeats one header block.

    python grpc_calls.py ADDRESS METHOD MESSAGE_FILE --connections 8 --streams 4 --seconds 2 --answer-bytes 1

A closed loop over plain sockets: each connection keeps so many calls open. The header block is what a client
sends that remembers its fields: indices into the dynamic table, and `grpc-timeout` as a literal with an
indexed name. Frames are written and read here, at some 5 us a call beside the kernel's work for the sockets:
gRPC's own client takes 100 and more, and would be what is measured. An answer counts when its message has at
least `--answer-bytes`: a failed call has trailers only. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 0x1
_END_HEADERS = 0x4
_FRAME = struct.Struct(">HBBBI")  # length (16 bits, 8 bits), type, flags, stream
_FRAME_BYTES = _FRAME.size
_MAX_MESSAGE = 16_384 - 5  # one DATA frame, without the prefix of the message
_WINDOW = 2**31 - 1
_FIRST_WINDOW = 65_535  # of the connection, in both directions (RFC 9113, 6.9.2)
_INITIAL_WINDOW_SIZE = 4  # a setting
_LEAST_DEADLINE_US = 30_000_000  # far from every answer; eight digits are the most that gRPC allows
_DEADLINES = 69_000_000
_RECEIVED = 2**18
# Static table (RFC 7541, appendix A): POST, http; names of :path, :authority, content-type.
_POST, _HTTP, _PATH, _AUTHORITY, _CONTENT_TYPE = 0x83, 0x86, 4, 1, 31
_ADDED = 62  # index of the newest entry of the dynamic table
_LITERAL_ADDED = 0x40


class CallFailed(Exception):
    """A call, or a whole connection, was not answered as it should be."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return _FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def first_block(method: str, authority: str, timeout: bytes) -> bytes:
    """The header block of a connection's first call, which puts its fields into the dynamic table."""
    fields = [bytes([_POST, _HTTP])]
    fields += [_added(_PATH, b"", method.encode()), _added(_AUTHORITY, b"", authority.encode())]
    fields += [_added(_CONTENT_TYPE, b"", b"application/grpc"), _added(0, b"te", b"trailers")]
    fields.append(_added(0, b"grpc-timeout", timeout))
    return b"".join(fields)


def next_block(timeout: bytes) -> bytes:
    """The header block of each later call: five fields were added, the timeout's is the newest."""
    known = bytes([_POST, _HTTP, *(0x80 | (_ADDED + place) for place in (4, 3, 2, 1))])
    # A name beyond 14 needs a second byte behind the prefix of four bits (RFC 7541, 5.1).
    return known + bytes([0x0F, _ADDED - 0x0F, len(timeout)]) + timeout


def _added(index: int, name: bytes, value: bytes) -> bytes:
    """A literal field that is added to the dynamic table; values of up to 126 bytes."""
    if len(value) > 126:
        raise ValueError(f"found a header value of {len(value)} bytes, expected at most 126")
    named = bytes([len(name)]) + name if name else b""
    return bytes([_LITERAL_ADDED | index]) + named + bytes([len(value)]) + value


def timeout_of(number: int) -> bytes:
    """The deadline of call `number` in microseconds: a new one for each of 69 million calls."""
    return b"%du" % (_LEAST_DEADLINE_US + number % _DEADLINES)


class Connection:
    """One connection with `streams` calls open. Latencies of finished calls are appended to `latencies_s`."""

    def __init__(self, address: str, method: str, message: bytes, streams: int, answer_bytes: int) -> None:
        if len(message) > _MAX_MESSAGE:
            raise ValueError(f"found a message of {len(message)} bytes, expected at most {_MAX_MESSAGE}")
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW)
        grown = struct.pack(">I", _WINDOW - _FIRST_WINDOW)
        self.socket.sendall(_PREFACE + frame(_SETTINGS, 0, 0, settings) + frame(_WINDOW_UPDATE, 0, 0, grown))
        self.latencies_s: list[float] = []
        self._method, self._authority = method, address
        body = b"\0" + struct.pack(">I", len(message)) + message
        self._body_bytes = len(body)
        # All but the stream and the deadline is the same in each later call, so it is made once: five bytes
        # of a frame's head, the stream, the rest.
        later = frame(_HEADERS, _END_HEADERS, 0, next_block(timeout_of(0)))
        self._headers = later[:5], later[_FRAME_BYTES : -len(timeout_of(0))]
        data = frame(_DATA, _END_STREAM, 0, body)
        self._data = data[:5], data[_FRAME_BYTES:]
        self._answer_bytes = answer_bytes + 5  # with the prefix of the message
        self._started_s: dict[int, float] = {}  # by stream, of the open calls
        self._sizes: dict[int, int] = {}  # bytes of their answers so far
        self._due = streams  # calls that may begin
        self._number, self._stream = 0, 1
        self._window = _FIRST_WINDOW  # bytes of bodies that the server allows
        self._taken = 0  # bytes of answers that the server was not given back
        self._rest = b""

    def close(self) -> None:
        """Close the socket; open calls are lost."""
        self.socket.close()

    def begin_calls(self, step: int, first_number: int = 0) -> None:
        """Begin as many calls as are due and fit into the server's window; deadlines differ by `step`.

        The first time, `first_number` is that of the first call.
        """
        out: list[bytes] = []
        now_s = time.perf_counter()
        (head, block), (data_head, body) = self._headers, self._data
        while self._due and self._window >= self._body_bytes:
            stream = self._stream.to_bytes(4, "big")
            if self._stream == 1:
                self._number = first_number
                first = first_block(self._method, self._authority, timeout_of(first_number))
                out.append(frame(_HEADERS, _END_HEADERS, 1, first))
            else:
                out += (head, stream, block, timeout_of(self._number))
            out += (data_head, stream, body)
            self._started_s[self._stream] = now_s
            self._sizes[self._stream] = 0
            self._stream += 2
            self._number += step
            self._window -= self._body_bytes
            self._due -= 1
        if out:
            self.socket.sendall(b"".join(out))

    def receive(self) -> None:
        """Read what has arrived. A finished call makes another one due.

        Raises:
            CallFailed: a call failed, or the server closed the connection.
        """
        received = self.socket.recv(_RECEIVED)
        if not received:
            raise CallFailed("the server closed the connection")
        now_s, sizes = time.perf_counter(), self._sizes
        buffer = self._rest + received if self._rest else received
        at, end = 0, len(buffer)
        while end - at >= _FRAME_BYTES:
            high, low, kind, flags, stream = _FRAME.unpack_from(buffer, at)
            length = high << 8 | low
            after = at + _FRAME_BYTES + length
            if after > end:
                break
            if kind == _DATA:
                sizes[stream] += length
            elif kind != _HEADERS:
                self._control(kind, flags, stream, buffer[at + _FRAME_BYTES : after])
            if flags & _END_STREAM and kind <= _HEADERS:
                self._finish(stream, now_s)
            at = after
        self._rest = buffer[at:]

    def _finish(self, stream: int, now_s: float) -> None:
        size = self._sizes.pop(stream)
        if size < self._answer_bytes:
            raise CallFailed(f"found an answer of {size} bytes, expected at least {self._answer_bytes}")
        self.latencies_s.append(now_s - self._started_s.pop(stream))
        self._taken += size
        self._due += 1
        if self._taken > _WINDOW // 2:
            self.socket.sendall(frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self.socket.sendall(frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY or (kind == _RST_STREAM and stream in self._sizes):
            raise CallFailed(f"the server sent frame {kind} with {payload!r}")


def run(connections: Sequence[Connection], seconds: float) -> dict[str, object]:
    """Load for so many seconds; calls that are open at the end do not count."""
    by_descriptor = {one.socket.fileno(): one for one in connections}
    cpu_s, started_s = time.process_time(), time.perf_counter()
    for number, one in enumerate(connections):
        one.begin_calls(len(connections), number + 1)
    stop_s = started_s + seconds
    with select.epoll() as poll:
        for descriptor in by_descriptor:
            poll.register(descriptor, select.EPOLLIN)
        while (left_s := stop_s - time.perf_counter()) > 0:
            for descriptor, _ in poll.poll(left_s):
                one = by_descriptor[descriptor]
                one.receive()
                one.begin_calls(len(connections))
    elapsed_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    latencies_s = sorted(one for connection in connections for one in connection.latencies_s)
    if not latencies_s:
        raise CallFailed(f"no call was answered in {seconds:g} s")
    ranks = {str(rank): latencies_s[int(rank / 100 * (len(latencies_s) - 1))] * 1000 for rank in (50, 90, 99)}
    count = len(latencies_s)
    return {
        "requests": count,
        "per_second": count / elapsed_s,
        "latency_ms": ranks,
        "client_cpu_us": cpu_s / count * 1e6,
    }


def main() -> int:
    """Run what the arguments say; see the module."""
    parser = argparse.ArgumentParser(description="Load of unary gRPC calls with deadlines.")
    parser.add_argument("address", help="host:port")
    parser.add_argument("method", help="/package.Service/Name")
    parser.add_argument("message", type=Path, help="file with the serialised request")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4, help="calls open on each connection")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--answer-bytes", type=int, default=1, help="least size of an answer's message")
    options = parser.parse_args()
    message = options.message.read_bytes()
    try:
        connections = [
            Connection(options.address, options.method, message, options.streams, options.answer_bytes)
            for _ in range(options.connections)
        ]
        print(json.dumps(run(connections, options.seconds)))
    except (CallFailed, OSError) as err:
        print(err, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
