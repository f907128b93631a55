"""Groups over several machines: who is admitted, and groups that are as large as the machines allow."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from pools import fork_launcher, new_pool, pool_in_service, until
from servers import free_ports

from torchere.serving import __version__
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import LoadFailed
from torchere.serving.store.package import store_of
from torchere.serving.workers import loss as restart
from torchere.serving.workers import machines
from torchere.serving.workers import worker as restart_limit
from torchere.serving.workers.executor import LoadSpec, Rendezvous
from torchere.serving.workers.heartbeat import HeartbeatSettings
from torchere.serving.workers.machines import Challenge, Hello, Machine, MachinesMissing, Refused, dial, meet
from torchere.serving.workers.messages import Load

SECRET = b"of the machines only"
LOAD = Load(LoadSpec("net", "1.0", "", "handler.py"), ())
HANDLER = """
import os
import torch

class Handler:
    def initialize(self, context):
        torch.distributed.init_process_group("gloo")

    def handle(self, data, context):
        total = torch.ones(1)
        if bytes(data[0]["body"]) != b"any":
            asked = bytes(data[0]["body"]).decode()
            total *= asked in os.environ or asked in ["=".join(item) for item in os.environ.items()]
        torch.distributed.all_reduce(total)
        return [f"{total.item():g} of {os.environ['WORLD_SIZE']}"] * len(data)
"""


class Meeting:
    """A leader that waits for machines, in a thread."""

    def __init__(self, ranks: int = 2, **changes: Any) -> None:
        asked = {"least": 2, "most": 2, "join_s": 30.0, "last_call_s": 0.0, "secret": SECRET, **changes}
        self.rendezvous = Rendezvous("127.0.0.1", free_ports(1)[0], **asked)
        self.found: list[Machine] | BaseException = []
        self._dialled: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, args=(ranks,))
        self._thread.start()

    def _run(self, ranks: int) -> None:
        try:
            self.found = meet(self.rendezvous, ranks, LOAD)
        except BaseException as err:
            self.found = err

    def connect(self) -> socket.socket:
        """Connect as a stranger; the leader has bound its port soon."""
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.rendezvous.port), 30)
            except OSError:
                assert self._thread.is_alive()

    def dial(self, secret: bytes = SECRET) -> Any:
        """Join as `torchere join` does, again until the leader listens."""
        while True:
            try:
                connections, welcome = dial("127.0.0.1", self.rendezvous.port, secret)
                self._dialled += connections
                return connections, welcome
            except ConnectionRefusedError:
                assert self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(60)
        return self.found

    def close(self) -> None:
        found = self.result()
        machines = found if isinstance(found, list) else []
        for connection in [*self._dialled, *(one for machine in machines for one in machine.connections)]:
            connection.close()


@pytest.fixture
def lead() -> Iterator[Callable[..., Meeting]]:
    """Begins meetings, whose connections are closed at the end of the test."""
    meetings: list[Meeting] = []

    def begin(**asked: Any) -> Meeting:
        meetings.append(Meeting(**asked))
        return meetings[-1]

    yield begin
    for meeting in meetings:
        meeting.close()


def hello_to(connection: socket.socket, release: str = __version__, machine: str = "one") -> Hello:
    """Read the leader's challenge, and return the right answer to it."""
    length = int.from_bytes(connection.recv(4), "big")
    challenge = msgspec.msgpack.decode(connection.recv(length), type=Challenge)
    hello = Hello(release, machine, 0, b"m" * 32, b"")
    proof = machines._proof(SECRET, "machine", challenge.nonce, hello)
    return msgspec.structs.replace(hello, proof=proof)


def frame(message: Any) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(4, "big") + payload


def test_a_machine_joins_with_a_connection_for_each_of_its_ranks(lead: Callable[..., Meeting]) -> None:
    meeting = lead(ranks=3, archive="net.mar", fingerprint="ab")
    connections, welcome = meeting.dial()
    (machine,) = meeting.result()
    assert (welcome.archive, welcome.fingerprint, welcome.at, welcome.load) == ("net.mar", "ab", 1, LOAD)
    assert machine.name == "127.0.0.1"
    for number, (ours, theirs) in enumerate(zip(machine.connections, connections, strict=True)):
        ours.sendall(b"%d" % number)
        assert theirs.recv(9) == b"%d" % number  # in the order of the ranks, and nothing between


def test_a_machine_with_another_secret_is_told_so_and_the_right_one_joins(
    lead: Callable[..., Meeting],
) -> None:
    meeting = lead()
    with pytest.raises(Refused, match="rendezvous_secret_file is another"):
        meeting.dial(b"the secret of others")
    meeting.dial()
    assert len(meeting.result()) == 1


def test_a_machine_does_not_join_a_leader_that_has_not_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pose() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(frame(Challenge(__version__, b"n" * 32, 1)))
                connection.recv(4096)
                connection.sendall(frame(machines.Welcome(b"p" * 32, LOAD, "net.mar", "", "", 1)))

        thread = threading.Thread(target=pose)
        thread.start()
        with pytest.raises(Refused, match="does not prove"):
            dial("127.0.0.1", impostor.getsockname()[1], SECRET)
        thread.join()


def test_a_proof_can_not_be_repeated_on_another_connection(lead: Callable[..., Meeting]) -> None:
    meeting = lead(ranks=1)
    with meeting.connect() as first, meeting.connect() as second:
        hello = hello_to(first)
        hello_to(second)
        second.sendall(frame(hello))
        assert b"rendezvous_secret_file is another" in second.recv(4096)
    meeting.dial()
    assert len(meeting.result()) == 1


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 9, b"\x00\x00\x00\x03abc", frame([2, "x"]), b"\x00\x00\x01"],
)
def test_strangers_do_not_hold_up_the_machines(lead: Callable[..., Meeting], said: bytes) -> None:
    meeting = lead()
    with meeting.connect() as stranger:
        stranger.sendall(said)
        meeting.dial()
        assert len(meeting.result()) == 1


def test_a_machine_of_another_release_is_refused(lead: Callable[..., Meeting]) -> None:
    meeting = lead(join_s=1.0)
    with meeting.connect() as connection:
        connection.sendall(frame(hello_to(connection, release="0.0.1")))
        assert f"expected {__version__}".encode() in connection.recv(4096)
    assert isinstance(meeting.result(), MachinesMissing)


def test_a_machine_that_has_gone_again_does_not_count(lead: Callable[..., Meeting]) -> None:
    meeting = lead(ranks=1, least=3, most=3, join_s=2.0)
    with meeting.connect() as connection:
        connection.sendall(frame(hello_to(connection)))
    found = meeting.result()
    assert isinstance(found, MachinesMissing)
    assert found.found == 1


def test_machines_that_do_not_come_are_missed_with_their_number(lead: Callable[..., Meeting]) -> None:
    found = lead(least=3, most=4, join_s=0.5).result()
    assert isinstance(found, MachinesMissing)
    assert "1 of 3 machines are there after 0.5 s" in str(found)


def test_with_the_least_number_there_is_a_last_call_for_more(lead: Callable[..., Meeting]) -> None:
    meeting = lead(ranks=1, least=1, most=3, last_call_s=2.0)
    meeting.dial()
    assert len(meeting.result()) == 1
    assert lead(least=1, most=3, last_call_s=0.0).result() == []


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model store with one archive."""
    folder = tmp_path_factory.mktemp("store")
    manifest = {"runtime": "python", "model": {"modelName": "net", "handler": "handler.py"}}
    with zipfile.ZipFile(folder / "net.mar", "w") as archive:
        archive.writestr("handler.py", HANDLER)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def further(store: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Popen]:
    """`torchere join` for the groups of all tests here, which run one after the other."""
    command = [
        sys.executable,
        "-m",
        "torchere.serving",
        "join",
        f"127.0.0.1:{port}",
        "--model-store",
        str(store),
        "--ts-config",
        "config.properties",
    ]
    log = tmp_path_factory.mktemp("join") / "log"
    (log.parent / "config.properties").write_text("blacklist_env_vars=NET_SECRET.*\n")
    environment = {**os.environ, "NET_SECRET_KEY": "s3cr3t", "NET_NAME": "net"}
    with log.open("w") as output:
        member = psutil.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent, env=environment
        )
    while "waiting for the leader" not in log.read_text():  # its import of torch is longer than a last call
        assert member.poll() is None, log.read_text()
        time.sleep(0.05)
    yield member
    member.send_signal(signal.SIGTERM)
    assert member.wait(30) == 0, log.read_text()


@pytest.fixture
def make_group(
    store: Path, port: int, make_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LoadSpec]]:
    """Makes the spec of a group, with two ranks on each machine where a test names no other number."""
    monkeypatch.setattr(restart, "BACKOFF_S", (0.0,))
    opened_store = store_of(ServerSettings(model_store=store))
    opened = opened_store.open("net.mar")
    stored = opened_store.unpack("net.mar", opened)

    def make(least: int, most: int, ranks: int = 2, **changes: Any) -> LoadSpec:
        times = {"join_s": 20.0, "last_call_s": 5.0, **changes}
        rendezvous = Rendezvous(
            "127.0.0.1", port, least, most, archive="net.mar", fingerprint=stored.fingerprint, **times
        )
        spec: LoadSpec = make_spec(
            HANDLER, ranks=ranks, devices=ranks, parallel_type="tp", rendezvous=rendezvous
        )
        return replace(spec, archive_dir=str(stored.directory))

    yield make
    opened_store.close()


async def answer_of(pool: Any, make_sink: Any, make_request: Any, word: str = "any") -> bytes:
    sink = make_sink()
    sink.submit(pool, [make_request(word)])
    body: bytes = (await sink.outcome()).body
    return body


def test_a_group_is_as_large_as_the_machines_allow_at_its_start(
    make_group, make_sink, make_request, further
) -> None:
    quick = HeartbeatSettings(ask_every_s=0.2, suspect_after_s=0.6, dead_after_s=2.0)

    async def main() -> None:
        async with pool_in_service(make_group(1, 2), heartbeat=quick) as pool:
            assert await answer_of(pool, make_sink, make_request) == b"4 of 4"
            further.suspend()  # the ranks go on, but nobody sees to them any more
            first = pool.statuses()[0].pid
            for rank in further.children():
                os.kill(rank.pid, signal.SIGSTOP)
            await until(lambda: not pool.in_service)
            await until(lambda: pool.in_service and pool.statuses()[0].pid != first)
            assert await answer_of(pool, make_sink, make_request) == b"2 of 2"
            further.resume()
            await until(lambda: not further.children())
            second = pool.statuses()[0].pid
            os.kill(second, signal.SIGKILL)
            await until(lambda: pool.in_service and pool.statuses()[0].pid != second)
            assert await answer_of(pool, make_sink, make_request) == b"4 of 4"

    asyncio.run(main())


def test_a_group_of_one_rank_answers_pings(make_group) -> None:
    quick = HeartbeatSettings(ask_every_s=0.1, suspect_after_s=0.5, dead_after_s=1.0)

    async def main() -> None:
        async with pool_in_service(make_group(1, 2, ranks=1, last_call_s=0.0), heartbeat=quick) as pool:
            first = pool.statuses()[0].pid
            await asyncio.sleep(2 * quick.dead_after_s)
            assert (pool.in_service, pool.statuses()[0].pid, pool.statuses()[0].losses) == (1, first, 0)

    asyncio.run(main())


def test_the_ranks_of_the_other_machine_end_with_the_group(make_group, further) -> None:
    async def main() -> None:
        async with pool_in_service(make_group(2, 2)):
            assert len(further.children()) == 2
        await until(lambda: not further.children())

    asyncio.run(main())


def test_the_ranks_of_the_other_machine_decode_bodies_if_their_leader_does(
    make_group, make_sink, make_request, further
) -> None:
    async def main() -> None:
        async with pool_in_service(replace(make_group(2, 2), decode_input=False)) as pool:
            ask = partial(answer_of, pool, make_sink, make_request)
            assert await ask("TS_DECODE_INPUT_REQUEST=false") == b"2 of 4"

    asyncio.run(main())


def test_the_ranks_of_the_other_machine_have_the_environment_of_workers(
    make_group, make_sink, make_request, further
) -> None:
    async def main() -> None:
        async with pool_in_service(make_group(2, 2)) as pool:
            ask = partial(answer_of, pool, make_sink, make_request)
            assert await ask("NET_SECRET_KEY") == b"0 of 4"
            assert await ask("PYTHONSAFEPATH") == b"0 of 4"
            for name in ("NET_NAME", "TS_DECODE_INPUT_REQUEST"):  # of the other machine only
                assert await ask(name) == b"2 of 4"
            assert await ask("GOMP_SPINCOUNT") == b"4 of 4"

    asyncio.run(main())


def test_a_group_whose_machines_do_not_come_fails_with_the_reason(make_group) -> None:
    async def main() -> None:
        with pytest.raises(LoadFailed) as error:
            async with pool_in_service(make_group(3, 3, join_s=0.5)):
                pass
        assert (
            "of 3 machines are there after 0.5 s; `torchere join` must reach 127.0.0.1:" in error.value.detail
        )
        assert not error.value.out_of_memory

    asyncio.run(main())


def test_at_the_start_of_a_server_the_machines_are_waited_for(make_group) -> None:
    async def main() -> None:
        launcher = fork_launcher()
        pool: Any = new_pool(make_group(3, 3, join_s=0.3, is_patient=True), launcher)
        loading = asyncio.ensure_future(pool.resize(1))
        await until(
            lambda: pool.statuses() and pool.statuses()[0].losses > restart_limit.KILLS_AT_FIRST_LOAD + 1
        )
        assert not loading.done()
        assert "of 3 machines are there" in pool.statuses()[0].last_failure
        loading.cancel()
        await asyncio.wait({loading})
        await pool.close()
        await launcher.close()

    asyncio.run(main())


def test_a_machine_with_another_archive_fails_the_load_with_the_reason(make_group, further) -> None:
    async def main() -> None:
        spec = make_group(2, 2)
        other = replace(spec.rendezvous, fingerprint="another")
        with pytest.raises(LoadFailed) as error:
            async with pool_in_service(replace(spec, rendezvous=other)):
                pass
        assert "rank 2: net.mar differs from the leader's" in error.value.detail

    asyncio.run(main())
