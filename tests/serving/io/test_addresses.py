"""An address that another server listens on is refused before anything of that server's is touched."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchere.serving.config.server_settings import Address
from torchere.serving.errors import ServingError
from torchere.serving.io.addresses import refuse_taken, said_plainly


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_port_that_somebody_listens_on_is_refused(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    with pytest.raises(ServingError) as caught:
        refuse_taken([Address(port=0), Address(port=port)])
    assert caught.value.message == f"Cannot listen on http://127.0.0.1:{port}: Address already in use."


def test_a_port_is_free_again_when_nobody_listens_although_a_connection_of_it_lives(
    listening: socket.socket,
) -> None:
    place = listening.getsockname()
    with socket.create_connection(place), listening.accept()[0]:
        listening.close()
        refuse_taken([Address(port=place[1])])


def test_a_socket_file_is_taken_while_it_is_answered_and_free_when_its_server_was_killed(
    tmp_path: Path,
) -> None:
    address = Address(unix_path=str(tmp_path / "socket"))
    refuse_taken([address])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        with pytest.raises(ServingError, match="Cannot listen on unix:"):
            refuse_taken([address])
    refuse_taken([address])


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (Address("::1", 8080), "http://[::1]:8080"),
        (Address("h", 8443, tls=True), "https://h:8443"),
        (Address(unix_path="/run/s"), "unix:/run/s"),
    ],
)
def test_an_address_is_written_as_it_is_configured(address: Address, text: str) -> None:
    assert str(address) == text


def test_what_is_wrong_with_an_address_otherwise_is_left_to_whoever_binds_it() -> None:
    refuse_taken([Address("no.such.host.invalid", 8080), Address("192.0.2.1", 8080)])


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EMFILE, "Raise the limit of open files"),
        (errno.EACCES, "Set another"),
        (errno.EADDRINUSE, "Is another server running there? Set another"),
    ],
)
def test_the_advice_fits_what_the_system_said(number: int, advice: str) -> None:
    with pytest.raises(ServingError) as caught, said_plainly(Address(port=80)):
        raise OSError(number, "asyncio's words, ('127.0.0.1', 80)")
    assert caught.value.detail.startswith(advice)
    assert caught.value.message == f"Cannot listen on http://127.0.0.1:80: {os.strerror(number)}."


def test_a_host_that_is_not_found_is_said_as_such() -> None:
    with pytest.raises(ServingError, match="Name or service not known"), said_plainly(Address("h.invalid")):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("host", ["..x", f"{'a' * 64}.example"])
def test_a_host_that_no_name_can_be_is_refused_at_once(host: str) -> None:
    with pytest.raises(ServingError, match=r"Cannot listen on .*label"):
        refuse_taken([Address(host, 8080)])
