"""What is sent is answered, whatever becomes of the rest of the request."""

import socket
from concurrent.futures import ThreadPoolExecutor

from conformity.rest import Case, send

REFUSED = b"HTTP/1.1 413 Request Entity Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
MORE_THAN_SOCKETS_HOLD = b"x" * (64 << 20)


def test_an_answer_is_read_though_the_server_resets_the_connection_while_the_body_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as beside:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        answer = beside.submit(
            send, Case("large", "POST", "/", body=MORE_THAN_SOCKETS_HOLD), {"inference": address}
        )
        connection, _ = listener.accept()
        with connection:  # closed with a body that nobody reads: the kernel resets it
            connection.recv(1)
            connection.sendall(REFUSED)

        assert answer.result().status == 413
