"""How the machines of a rank group find each other: the handshake of both sides.

Rank 0 listens (`meet`), and `torchere join` on each further machine dials (`dial`), with one connection for
each of its ranks. After the handshake the connection carries the messages between rank 0 and a rank of its
own machine (`messages.py`): frames of MessagePack. Nothing is unpickled, which is why torchelastic's c10d
rendezvous is not used: its state in the store is a pickle.

Both sides prove by an HMAC over two random numbers that they have the same secret, before either believes
anything else. That keeps strangers out of the group, who would read its requests, and keeps a machine from
serving a stranger. It does not encrypt, and it does not cover the ports of torch.distributed.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch names it in no `__all__`

from torchere.serving import __version__
from torchere.serving.workers.executor import Rendezvous
from torchere.serving.workers.frames import HEADER
from torchere.serving.workers.messages import Load, encode_frame

logger = logging.getLogger(__name__)

CUT_OFF_S = 5.0  # a machine whose kernel acknowledges nothing for so long is cut off
HANDSHAKE_S = 10.0  # for a message of the handshake, which no model delays
_NONCE_BYTES = 32
_MAX_HELLO_BYTES = 1024  # a stranger can make the leader hold no more
_MAX_WELCOME_BYTES = 64 * 2**20  # holds a manifest and a model config
_MAX_STRANGERS = 256  # connections that have not proved anything yet; the oldest makes way
_LOOK_S = 0.2
_GONE = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of the leader: asks the other machine to prove that it has the secret."""

    release: str
    nonce: bytes
    ranks: int  # of each machine: that many connections are wanted


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """From the other machine: its proof, and which of its ranks the connection is for."""

    release: str
    machine: str  # chosen by the machine, the same on all its connections
    number: int  # of the rank on its machine
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """From the leader, once the machines are complete: its own proof, and the load."""

    proof: bytes
    load: Load  # without the paths of the leader
    archive: str  # its name in the model store
    url: str  # the URL or name that the leader registered it with
    fingerprint: str  # `StoredArchive.fingerprint`
    at: int  # the place of the machine in the group; the leader is 0


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """From the leader: the machine can't join, for this reason."""

    reason: str


FromLeader: TypeAlias = Challenge | Welcome | Refusal
_from_leader: msgspec.msgpack.Decoder[FromLeader] = msgspec.msgpack.Decoder(FromLeader)
_from_machine: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


class Refused(Exception):
    """The leader refuses this machine, or does not prove that it has the secret."""


class MachinesMissing(Exception):
    """Too few machines have come in time; `found` counts the leader."""

    def __init__(self, found: int, wanted: int, where: str, within_s: float) -> None:
        super().__init__(
            f"{found} of {wanted} machines are there after {within_s:g} s; `torchere join` must reach {where}"
        )
        self.found = found


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that has joined: the connection of each of its ranks, in their order."""

    name: str  # its address
    connections: tuple[socket.socket, ...]


def meet(rendezvous: Rendezvous, ranks: int, load: Load) -> list[Machine]:
    """Wait for the other machines of a group, and welcome them; blocks.

    It waits until `rendezvous.most` machines are there, this one included, but once `rendezvous.least` are
    there, only for `last_call_s` more.

    Args:
        rendezvous: where to listen, and for how many.
        ranks: the number of ranks on each machine.
        load: for the other machines, without the leader's paths.

    Raises:
        MachinesMissing: fewer than `rendezvous.least` have come within `rendezvous.join_s`.
        OSError: the address can't be bound within that time.
    """
    if rendezvous.most <= 1:
        return []
    limit_s = time.monotonic() + rendezvous.join_s
    listener = _listen(rendezvous, limit_s)
    with listener:
        meeting = _Meeting(listener, rendezvous, ranks)
        try:
            meeting.wait(limit_s)
        except BaseException:
            meeting.close()
            raise
        return meeting.welcome(load)


def _listen(rendezvous: Rendezvous, limit_s: float) -> socket.socket:
    """Listen, if need be with retries: the previous rank 0 may still hold the port while it ends."""
    while True:
        try:
            return listener_at(rendezvous.host, rendezvous.port)
        except OSError:
            if time.monotonic() > limit_s:
                raise
            time.sleep(_LOOK_S)


def open_store(host: str, ranks: int) -> TCPStore:
    """Open torch's store for all ranks at any free port, as torchrun's agent does.

    The socket is made here: torch's own would listen at all addresses of the machine, for every stranger.

    Raises:
        OSError: the address can't be bound.
    """
    listener = listener_at(host, 0)
    port = listener.getsockname()[1]
    store = TCPStore(
        reached_at(host),
        port,
        ranks,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.fileno(),
    )
    listener.detach()  # it is the store's now
    return store


def reached_at(host: str) -> str:
    """Return the address at which this machine reaches a listener of its own at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def listener_at(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket at this address only; port 0: any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


@dataclass(slots=True)
class _Guest:
    """A connection to the leader before the meeting is over."""

    connection: socket.socket
    host: str
    nonce: bytes
    since_s: float
    received: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None  # verified


class _Meeting:
    """The leader's side, in one thread: a connection that stalls must not hold up the others."""

    def __init__(self, listener: socket.socket, rendezvous: Rendezvous, ranks: int) -> None:
        self._listener = listener
        self._rendezvous = rendezvous
        self._ranks = ranks
        self._guests: dict[int, _Guest] = {}  # by descriptor
        self._poll = select.poll()
        listener.setblocking(False)
        self._poll.register(listener, select.POLLIN)

    def wait(self, limit_s: float) -> None:
        """Wait until the machines are complete; raises as `meet` does."""
        least, most = self._rendezvous.least, self._rendezvous.most
        enough_s: float | None = None  # when the least number was reached
        while (found := len(self._complete()) + 1) < most:
            now_s = time.monotonic()
            enough_s = (now_s if enough_s is None else enough_s) if found >= least else None
            if now_s >= min(
                limit_s, limit_s if enough_s is None else enough_s + self._rendezvous.last_call_s
            ):
                break
            self._step(now_s)
        if found < least:
            where = f"{self._rendezvous.host}:{self._rendezvous.port}"
            raise MachinesMissing(found, least, where, self._rendezvous.join_s)

    def welcome(self, load: Load) -> list[Machine]:
        """Welcome the complete machines in the order of their arrival; close the other connections."""
        rendezvous, machines = self._rendezvous, []
        for at, guests in enumerate(self._complete()[: rendezvous.most - 1], 1):
            for guest in guests:
                assert guest.hello is not None
                proof = _proof(rendezvous.secret, "leader", guest.nonce, guest.hello)
                welcome = Welcome(proof, load, rendezvous.archive, rendezvous.url, rendezvous.fingerprint, at)
                guest.connection.setblocking(True)
                guest.connection.sendall(encode_frame(welcome))
                del self._guests[guest.connection.fileno()]
            machines.append(Machine(guests[0].host, tuple(guest.connection for guest in guests)))
        self.close()
        return machines

    def close(self) -> None:
        """Close the connections that were not welcomed."""
        for guest in self._guests.values():
            guest.connection.close()
        self._guests.clear()

    def _complete(self) -> list[list[_Guest]]:
        """Return the connections of each machine that has all of them, in the order of their ranks."""
        by_machine: dict[str, dict[int, _Guest]] = {}
        for guest in self._guests.values():
            if guest.hello is not None:
                by_machine.setdefault(guest.hello.machine, {})[guest.hello.number] = guest
        return [
            [guests[number] for number in range(self._ranks)]
            for guests in by_machine.values()
            if len(guests) == self._ranks
        ]

    def _step(self, now_s: float) -> None:
        for descriptor, events in self._poll.poll(_LOOK_S * 1000):
            if descriptor == self._listener.fileno():
                self._admit(now_s)
            elif (guest := self._guests.get(descriptor)) is not None:
                try:
                    goes_on = self._hear(guest) and not events & _GONE
                except (OSError, ValueError, msgspec.MsgspecError) as err:
                    logger.warning("rendezvous: %s does not join: %s", guest.host, err)
                    goes_on = False
                if not goes_on:
                    self._dismiss(guest)
        for guest in [each for each in self._guests.values() if each.hello is None]:
            if now_s - guest.since_s > HANDSHAKE_S:
                self._dismiss(guest)

    def _admit(self, now_s: float) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:  # it has gone again, or no descriptor is left
            return
        strangers = [guest for guest in self._guests.values() if guest.hello is None]
        if len(strangers) >= _MAX_STRANGERS:
            self._dismiss(strangers[0])
        watch_peer(connection)
        connection.setblocking(False)
        guest = _Guest(connection, address[0], secrets.token_bytes(_NONCE_BYTES), now_s)
        self._guests[connection.fileno()] = guest
        self._poll.register(connection, select.POLLIN | _GONE)
        try:
            connection.sendall(encode_frame(Challenge(__version__, guest.nonce, self._ranks)))
        except OSError:
            self._dismiss(guest)

    def _hear(self, guest: _Guest) -> bool:
        """Read the bytes that have arrived; return False if the connection is over.

        Raises:
            OSError: reset.
            ValueError, msgspec.MsgspecError: it sent something else than a valid proof.
        """
        try:
            some = guest.connection.recv(_MAX_HELLO_BYTES)
        except BlockingIOError:
            return True
        if not some or guest.hello is not None:  # a machine that was verified has nothing to say yet
            return False
        guest.received += some
        if len(guest.received) < HEADER.size:
            return True
        (length,) = HEADER.unpack_from(guest.received)
        if length > _MAX_HELLO_BYTES:
            raise ValueError(f"it sent {length} bytes, expected at most {_MAX_HELLO_BYTES}")
        if len(guest.received) < HEADER.size + length:
            return True
        hello = _from_machine.decode(bytes(guest.received[HEADER.size :]))
        if reason := self._objection(guest, hello):
            guest.connection.sendall(encode_frame(Refusal(reason)))
            raise ValueError(reason)
        guest.hello = hello
        return True

    def _objection(self, guest: _Guest, hello: Hello) -> str:
        if not hmac.compare_digest(
            hello.proof, _proof(self._rendezvous.secret, "machine", guest.nonce, hello)
        ):
            return "its rendezvous_secret_file is another than the leader's"
        if hello.release != __version__:
            return f"it runs release {hello.release}, expected {__version__}, the leader's"
        if not 0 <= hello.number < self._ranks:
            return f"rank {hello.number} of a machine, expected one of {self._ranks}"
        return ""

    def _dismiss(self, guest: _Guest) -> None:
        self._poll.unregister(guest.connection)
        del self._guests[guest.connection.fileno()]
        guest.connection.close()


def dial(host: str, port: int, secret: bytes) -> tuple[list[socket.socket], Welcome]:
    """Join the group whose leader listens there; blocks until the leader has all machines.

    Return the connection of each rank of this machine, and the leader's welcome.

    Raises:
        OSError: the leader can't be reached, or has gone.
        Refused: the leader refuses this machine, or does not prove that it has the secret.
    """
    machine = secrets.token_hex(16)
    connections: list[socket.socket] = []
    try:
        challenge, hello = _introduce(host, port, secret, machine, connections)
        said = [(challenge, hello)]
        said += [_introduce(host, port, secret, machine, connections) for _ in range(challenge.ranks - 1)]
        welcomes = [_welcomed(one, secret, *each) for one, each in zip(connections, said, strict=True)]
        return connections, welcomes[0]
    except BaseException:
        for connection in connections:
            connection.close()
        raise


def _introduce(
    host: str, port: int, secret: bytes, machine: str, connections: list[socket.socket]
) -> tuple[Challenge, Hello]:
    """Open the connection of the next rank of this machine, and prove that it has the secret."""
    connection = socket.create_connection((host, port), HANDSHAKE_S)
    connections.append(connection)
    watch_peer(connection)
    challenge: Challenge = _receive(connection, Challenge, _MAX_HELLO_BYTES)
    hello = Hello(__version__, machine, len(connections) - 1, secrets.token_bytes(_NONCE_BYTES), b"")
    hello = msgspec.structs.replace(hello, proof=_proof(secret, "machine", challenge.nonce, hello))
    connection.sendall(encode_frame(hello))
    return challenge, hello


def _welcomed(connection: socket.socket, secret: bytes, challenge: Challenge, hello: Hello) -> Welcome:
    connection.settimeout(None)  # the kernel ends the connection if the leader is cut off
    welcome: Welcome = _receive(connection, Welcome, _MAX_WELCOME_BYTES)
    if not hmac.compare_digest(welcome.proof, _proof(secret, "leader", challenge.nonce, hello)):
        raise Refused("the leader does not prove that it has the secret of this machine")
    return welcome


def _proof(secret: bytes, side: str, nonce: bytes, hello: Hello) -> bytes:
    """Return the proof that `side` has the secret; it can't be sent back as the proof of the other side."""
    words = [side, nonce, hello.nonce, hello.machine, hello.number, hello.release]
    return hmac.digest(secret, msgspec.msgpack.encode(words), "sha256")


def _receive(connection: socket.socket, kind: type[Any], most: int) -> Any:
    """Receive one message of this kind, and no byte after it.

    Raises:
        OSError: the connection ends, or stalls.
        Refused: the message is a refusal, or not of this kind.
    """
    (length,) = HEADER.unpack(_exactly(connection, HEADER.size))
    if length > most:
        raise Refused(f"the leader sent {length} bytes, expected at most {most}")
    try:
        message = _from_leader.decode(_exactly(connection, length))
    except msgspec.MsgspecError as err:
        raise Refused(f"the leader sent what is not a message: {err}") from err
    if isinstance(message, Refusal):
        raise Refused(message.reason)
    if not isinstance(message, kind):
        raise Refused(f"the leader sent a {type(message).__name__}, expected a {kind.__name__}")
    return message


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        some = connection.recv(count - len(received))
        if not some:
            raise ConnectionResetError("the leader has closed the connection")
        received += some
    return bytes(received)


def watch_peer(connection: socket.socket) -> None:
    """Have the kernel end the connection `CUT_OFF_S` after the peer's machine has last acknowledged anything.

    A stopped process on a running machine is not noticed by this, but by its missing heartbeat.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {
        "TCP_KEEPIDLE": 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": int(CUT_OFF_S) - 2,
        "TCP_USER_TIMEOUT": int(CUT_OFF_S * 1000),  # for bytes that are not acknowledged; Linux
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def interface_variables(connections: Sequence[socket.socket], loopback: str) -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on the interface of these connections, or on loopback.

    Otherwise they listen on the interface that the host name resolves to, which not every sandbox can find.
    Variables that the operator has set take precedence.
    """
    name = _interface_of(connections[0]) if connections else loopback
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if connections else ("GLOO_SOCKET_IFNAME",)
    return {variable: os.environ.get(variable, name) for variable in names if name}


def _interface_of(connection: socket.socket) -> str:
    """Return the name of the network interface of a connection; "": no interface has its address."""
    import psutil  # noqa: PLC0415 - only groups over several machines need it

    address = connection.getsockname()[0].removeprefix("::ffff:")
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return ""
