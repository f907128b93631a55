"""What only real sockets show: nobody listens, an answer breaks off, an answer drips."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchere.client import Client, ConnectionFailed, DeadlineExceeded, Retries

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n"


@contextmanager
def peer(answer: bytes, wait: threading.Event | None = None) -> Iterator[str]:
    """A server of one connection that sends `answer`, waits, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                if wait is not None:
                    wait.wait(30)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            if wait is not None:
                wait.set()
            thread.join()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with Client(address, retries=Retries(most=0)) as client, pytest.raises(ConnectionFailed) as caught:
        client.predict("net")
    assert caught.value.refused
    assert caught.value.message.startswith(f"no connection to {address}")


def test_an_answer_that_breaks_off_is_an_error() -> None:
    broke = pytest.raises(ConnectionFailed, match="broke")
    with peer(HEAD + b"half") as address, Client(address) as client, broke:
        client.predict("net")


def test_parts_that_came_are_given_before_the_break_is_told() -> None:
    with peer(HEAD + b"half") as address, Client(address) as client:
        parts = client.predict_stream("net")
        assert next(parts) == b"half"
        with pytest.raises(ConnectionFailed, match="broke"):
            next(parts)


def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    late = pytest.raises(DeadlineExceeded, match=r"no answer within 0.2 s")
    with peer(HEAD, threading.Event()) as address, Client(address, timeout_s=0.2) as client, late:
        client.predict("net")
