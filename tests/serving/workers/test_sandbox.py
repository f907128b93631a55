"""What a hostile handler tries in its sandbox: each attempt is refused, and the worker goes on."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile_workers import rig_of

from torchere.serving.config.server_settings import SandboxLevel, SandboxSettings, ServerSettings
from torchere.serving.errors import HandlerFailed, LoadFailed, OutOfResources, ServingError
from torchere.serving.process import confinement
from torchere.serving.process.confinement import SCOPES_ABI, Kernel
from torchere.serving.types import InferResponse
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.sandbox import MAX_FILES, Sandbox, missing, sandbox_of
from torchere.serving.workers.spawn import worker_environment

KERNEL = confinement.kernel()
needs_landlock = pytest.mark.skipif(
    KERNEL.landlock_abi < SCOPES_ABI, reason=f"Landlock ABI {KERNEL.landlock_abi}, needs {SCOPES_ABI}"
)
needs_seccomp = pytest.mark.skipif(not KERNEL.seccomp, reason=KERNEL.why_no_seccomp)
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can change to another user"
)
MEMORY_LIMIT_BYTES = 3 * 2**30
UNUSED_USER = 64_321  # without an entry in /etc/passwd
REFUSALS = ("PermissionError: ", "OSError: [Errno 18]", "BlockingIOError: ", "CalledProcessError: ")

# `SERVER` is the process that runs the tests; `refused` raises what a system call of libc reports.
PRELUDE = """
import os, resource, signal, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def refused(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""
FILES = {
    "reads the key file": "open(SECRET).read()",
    "reads the passwords of the system": "open('/etc/shadow').read()",
    "reads another model": "open(OTHER + '/model/weights').read()",
    "lists the other models": "os.listdir(os.path.dirname(OTHER))",
    "watches which other models are used": (
        "refused(libc.inotify_add_watch(libc.inotify_init(), os.path.dirname(OTHER).encode(), 0xfff))"
    ),
    "writes outside of its folder": "open(os.path.dirname(SECRET) + '/new', 'w')",
    "writes to /tmp": "open('/tmp/of-a-hostile-handler', 'w')",
    "writes to shared memory": "open('/dev/shm/of-a-hostile-handler', 'w')",
    "changes its own archive": "open('handler.py', 'a')",
    "empties a file": "os.truncate(SECRET, 0)",
    "deletes a file": "os.unlink(SECRET)",
    "closes a file to the server": "os.chmod(SECRET, 0)",
    "opens a file to all users": "os.chmod('handler.py', 0o777)",
    "closes a file to the server by an ACL": """
import struct
rows = [(1, 0), (4, 0), (32, 4)]  # the owner, its group, others
acl = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', who, may, 0xffffffff) for who, may in rows)
os.setxattr(SECRET, 'system.posix_acl_access', acl)""",
    "removes an attribute of a file": "os.removexattr(SECRET, 'user.mark')",
    "changes the time of a file": "os.utime(SECRET, (1, 1))",
    "moves a file to itself": "os.rename(SECRET, os.environ['TMPDIR'] + '/mine')",
    "links a file to itself": "os.link(SECRET, os.environ['TMPDIR'] + '/mine')",
    "follows a link of its own": """
link = os.environ['TMPDIR'] + '/link'
os.path.lexists(link) or os.symlink(SECRET, link)
open(link).read()""",
    "has another program read": "subprocess.run(['cat', SECRET], check=True)",
    "reads the memory of the server": "open(f'/proc/{SERVER}/mem', 'rb').read(1)",
    "reads the variables of the server": "open(f'/proc/{SERVER}/environ', 'rb').read(1)",
    "opens the files of the server": "open(f'/proc/{SERVER}/fd/0')",
    "goes round by the root of the server": "open(f'/proc/{SERVER}/root' + SECRET).read()",
    "signals the server": "os.kill(SERVER, signal.SIGCONT)",
    "looks whether the server lives": "os.kill(SERVER, 0)",
}
PAIR = """
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK):
    try:
        socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b'forged', LISTENER)
    except PermissionError:
        continue
    raise SystemError('it reaches a socket outside')
raise PermissionError('no such pair')"""
CALLS = {
    "connects to the machine itself": "socket.create_connection(('127.0.0.1', PORT))",
    "listens": "socket.create_server(('127.0.0.1', 0))",
    "opens a Unix socket": "socket.socket(socket.AF_UNIX)",
    "sends from one of a pair to a Unix socket": PAIR,
    "opens a pair of another family": "socket.socketpair(30, socket.SOCK_SEQPACKET)",
    "takes memory that outlives it": "refused(libc.shmget(0, 4096, 0o1600))",
    "takes a queue that all processes share": "refused(libc.msgget(0, 0o1600))",
    "opens a raw socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "traces the server": "refused(libc.ptrace(16, SERVER, 0, 0))",
    "reads the server's memory": """
class Piece(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
mine, its = Piece(ctypes.addressof(ctypes.create_string_buffer(8)), 8), Piece(0x400000, 8)
refused(libc.process_vm_readv(SERVER, ctypes.byref(mine), 1, ctypes.byref(its), 1, 0))""",
    "lowers the limits of the server": "resource.prlimit(SERVER, resource.RLIMIT_CORE, (0, 0))",
    "slows the server down": "os.setpriority(os.PRIO_PROCESS, SERVER, 19)",
    "slows all processes of its user down": "os.setpriority(os.PRIO_USER, 0, 19)",
    "makes the server idle": "os.sched_setscheduler(SERVER, os.SCHED_IDLE, os.sched_param(0))",
    "makes a user namespace": "refused(libc.unshare(0x10000000))",
    "mounts": "refused(libc.mount(b'none', b'/mnt', b'tmpfs', 0, None))",
    "changes its root": "os.chroot('/usr')",
}
# By their numbers on x86-64, because libc has no functions for them.
RAW_CALLS = {
    "makes one with a process": "refused(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))",
    "closes a file to the server by a newer call": "refused(libc.syscall(452, -100, SECRET.encode(), 0, 0))",
    "changes an attribute by a newer call": (
        "refused(libc.syscall(463, -100, SECRET.encode(), 0, b'user.mark', bytes(16), 16))"
    ),
    "makes a file immutable": "refused(libc.syscall(469, -100, SECRET.encode(), bytes(24), 24, 0))",
    "watches the kernel": "refused(libc.syscall(298, 0, 0, -1, -1, 0))",
    "loads a program into the kernel": "refused(libc.syscall(321, 0, 0, 0))",
    "asks for an io_uring": "refused(libc.syscall(425, 1, 0))",
    "asks for page faults": "refused(libc.syscall(323, 0))",
    "reads keys of the kernel": "refused(libc.syscall(250, 0, -3, 0, 0, 0))",
    "slows the disk of all processes of its user down": "refused(libc.syscall(251, 3, 0, 2 << 13 | 4))",
    "slows the disk of all processes of its group down": "refused(libc.syscall(251, 2, 0, 2 << 13 | 4))",
    "opens a named queue": "refused(libc.syscall(240, b'of-another-model', 0, 0, 0))",
    "deletes a named queue": "refused(libc.syscall(241, b'of-another-model'))",
    "deletes the memory of others": "refused(libc.syscall(31, 1 << 30, 0, 0))",
    "sends to a queue of others": "refused(libc.syscall(69, 1 << 30, bytes(16), 0, 0))",
    "reads a queue of others": "refused(libc.syscall(70, 1 << 30, bytes(16), 0, 0, 0))",
    "deletes a queue of others": "refused(libc.syscall(71, 1 << 30, 0, 0))",
    "takes a semaphore of others": "refused(libc.syscall(65, 1 << 30, bytes(6), 1))",
    "takes a semaphore of others for a time": "refused(libc.syscall(220, 1 << 30, bytes(6), 1, 0))",
    "deletes a semaphore of others": "refused(libc.syscall(66, 1 << 30, 0, 0))",
}

if platform.machine() != "x86_64":
    RAW_CALLS.clear()


@pytest.fixture
def readable_by_all() -> Iterator[Path]:
    """A folder that every user may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def unpacked(spec: LoadSpec, folder: Path) -> Path:
    """Move the archive of a spec to where a server unpacks it: into a folder of its own, closed to others."""
    archive = folder / "version" / "model"
    archive.parent.mkdir(mode=0o700)
    shutil.move(spec.archive_dir, archive)
    return archive


@pytest.fixture
def caged(tmp_path: Path, hostile: Callable[..., LoadSpec]) -> Callable[..., LoadSpec]:
    """A version in a strict sandbox, with the server's user, beside a secret and another version."""
    (tmp_path / "secret").write_text("key")
    (tmp_path / "other" / "model").mkdir(parents=True)
    (tmp_path / "other" / "model" / "weights").write_text("weights")
    home = tmp_path / "own" / "model"

    def make(**changes: Any) -> LoadSpec:
        home.mkdir(parents=True, exist_ok=True)
        spec = hostile()
        (home / "handler.py").write_text(Path(spec.archive_dir, "handler.py").read_text())
        made = sandbox_of(ServerSettings(model_store=tmp_path, sandbox=SandboxSettings("basic")))
        assert made is not None
        strict = Sandbox(
            archive=str(home),
            strict=True,
            max_files=4096,
            max_memory_bytes=MEMORY_LIMIT_BYTES,
            network=False,
            readable=made.readable,
            program=confinement.make_filter(network=False, own_user=False),
        )
        return replace(spec, archive_dir=str(home), sandbox=replace(strict, **changes))

    return make


def sources(attacks: dict[str, str], folder: Path, port: int = 1) -> dict[str, str]:
    known = (
        f"SERVER, SECRET, OTHER, PORT = {os.getpid()}, {f'{folder}/secret'!r}, {f'{folder}/other'!r}, {port}"
        f"; LISTENER = {f'{folder}/listener'!r}"
    )
    return {name: f"{PRELUDE}\n{known}\n{attack}" for name, attack in attacks.items()}


@needs_landlock
@needs_seccomp
def test_each_attack_is_refused_and_the_worker_goes_on(caged: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with rig_of(caged()) as rig:
            pid = rig.pid
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
                listener.bind(str(tmp_path / "listener"))
            with suppress(OSError):  # a file system without attributes
                os.setxattr(tmp_path / "secret", "user.mark", b"1")
            for name, source in sources({**FILES, **CALLS, **RAW_CALLS}, tmp_path).items():
                outcome = await rig.run(source)
                assert isinstance(outcome, HandlerFailed), name
                assert outcome.detail.startswith(REFUSALS), (name, outcome.detail)
            assert isinstance(await rig.run("pass"), InferResponse)
            assert rig.pid == pid

    asyncio.run(main())


ALLOWED = """
import json, os, signal, socket, subprocess, tempfile, threading
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("mine"); file.flush()
    assert subprocess.run(["cat", file.name], capture_output=True, check=True).stdout == b"mine"
assert open("handler.py").read()
assert open("/proc/self/status").read() and os.listdir("/proc/self/fd")
assert os.path.expanduser("~").endswith("scratch")
near, far = socket.socketpair()
near.send(b"mine")
assert far.recv(4) == b"mine"
with open(os.path.expanduser("~/mine"), "w") as file:
    os.utime(file.fileno(), (1, 1))
threading.Thread(target=print).start()
child = os.fork()
if child == 0:
    time.sleep(60)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
import wave, sqlite3  # not imported before
import torch
torch.nn.Linear(4, 4)(torch.zeros(1, 4))
"""


@needs_landlock
@needs_seccomp
def test_what_handlers_usually_do_is_allowed(caged: Any) -> None:
    async def main() -> None:
        async with rig_of(caged()) as rig:
            outcome = await rig.run(ALLOWED)
            assert isinstance(outcome, InferResponse), outcome.detail

    asyncio.run(main())


@needs_landlock
@needs_seccomp
def test_a_worker_with_network_connects_but_no_odd_socket_opens(caged: Any, tmp_path: Path) -> None:
    program = confinement.make_filter(network=True, own_user=False)
    connect = {"connects": "socket.create_connection(('127.0.0.1', PORT)).close()"}
    odd = {"opens a raw socket": CALLS["opens a raw socket"]}

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            async with rig_of(caged(network=True, program=program)) as rig:
                for source in sources(connect, tmp_path, port).values():
                    assert isinstance(await rig.run(source), InferResponse)
                for source in sources(odd, tmp_path).values():
                    assert isinstance(await rig.run(source), HandlerFailed)

    asyncio.run(main())


def test_files_and_memory_end_at_their_limits(hostile: Any, tmp_path: Path) -> None:
    spec = hostile()
    sandbox = Sandbox(archive=spec.archive_dir, max_files=4096, max_memory_bytes=MEMORY_LIMIT_BYTES)
    many = "files = [open('handler.py') for _ in range(10_000)]"
    much = f"memory = bytearray({MEMORY_LIMIT_BYTES})"

    async def main() -> None:
        async with rig_of(replace(spec, sandbox=sandbox)) as rig:
            outcome = await rig.run(many)
            assert isinstance(outcome, HandlerFailed)
            assert "Too many open files" in outcome.detail
            assert isinstance(await rig.run(much), OutOfResources)
            tensor = f"import torch; torch.zeros({MEMORY_LIMIT_BYTES}, dtype=torch.uint8)"
            assert isinstance(await rig.run(tensor), OutOfResources)
            assert isinstance(await rig.run("pass"), InferResponse)

    asyncio.run(main())


BOMB = """
children = []
try:
    for _ in range(200):
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        children.append(child)
finally:
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
"""
ROOTS = {
    "gets its rights back": "os.setuid(0)",
    "reads the passwords of the system": "open('/etc/shadow')",
    "signals the server": f"os.kill({os.getpid()}, signal.SIGCONT)",
    "reads the variables of the server": f"open('/proc/{os.getpid()}/environ', 'rb').read(1)",
    "changes its own archive": "open('handler.py', 'a')",
    "forks without end": BOMB,
}


@needs_root
def test_a_worker_with_its_own_user_has_none_of_roots_rights(hostile: Any, readable_by_all: Path) -> None:
    spec = hostile()
    archive = unpacked(spec, readable_by_all)
    (archive / "handler.py").chmod(0o600)
    sandbox = Sandbox(archive=str(archive), user=UNUSED_USER, group=UNUSED_USER, max_tasks=100)

    async def main() -> None:
        async with rig_of(replace(spec, archive_dir=str(archive), sandbox=sandbox)) as rig:
            pid = rig.pid
            assert psutil.Process(pid).uids().real == UNUSED_USER
            assert psutil.Process(pid).gids().real == UNUSED_USER
            for name, source in ROOTS.items():
                outcome = await rig.run(source)
                assert isinstance(outcome, HandlerFailed), name
                assert outcome.detail.startswith(REFUSALS), (name, outcome.detail)
            written = "open(os.environ['TMPDIR'] + '/file', 'w').write('mine')"
            assert isinstance(await rig.run(written), InferResponse)
            assert rig.pid == pid

    asyncio.run(main())
    assert (archive / "handler.py").stat().st_uid == 0
    assert archive.parent.stat().st_mode & 0o007 == 0


@needs_root
def test_a_user_that_cannot_read_what_it_needs_fails_the_load_with_a_hint(
    hostile: Any, readable_by_all: Path
) -> None:
    private = readable_by_all / "private"
    private.mkdir(mode=0o700)
    spec = hostile()
    archive = str(unpacked(spec, readable_by_all))
    readable = (str(private),)
    sandbox = Sandbox(archive=archive, user=UNUSED_USER, group=UNUSED_USER, readable=readable)

    async def main() -> None:
        with pytest.raises(LoadFailed, match="Failed to start workers") as failed:
            async with rig_of(replace(spec, archive_dir=archive, sandbox=sandbox)):
                pass
        assert f"worker_user {UNUSED_USER} can't read {private}" in failed.value.detail

    asyncio.run(main())


@needs_landlock
@needs_seccomp
def test_an_archive_that_brings_a_link_for_its_libraries_is_refused(caged: Any, tmp_path: Path) -> None:
    spec = caged()
    Path(spec.archive_dir, "net.pt2").touch()
    Path(spec.archive_dir, ".aot").symlink_to(tmp_path)

    async def main() -> None:
        with pytest.raises(LoadFailed) as failed:
            async with rig_of(spec):
                pass
        assert ".aot is a link" in failed.value.detail

    asyncio.run(main())


def kernel(landlock_abi: int = 7, seccomp: bool = True) -> Kernel:
    return Kernel(landlock_abi, "" if seccomp else "pyseccomp is not installed")


def test_strict_names_everything_that_is_missing() -> None:
    lacks = missing(kernel(0, seccomp=False), user=None, server_user=0)
    assert [text.split(",")[0].split(" (")[0] for text in lacks] == [
        "worker_user",
        "Landlock ABI 3",
        "seccomp",
    ]
    assert missing(kernel(), user=None, server_user=1000) == []
    assert missing(kernel(3), user=65534, server_user=0) == []


def test_an_older_kernel_needs_an_own_user_for_signals() -> None:
    (lack,) = missing(kernel(5), user=None, server_user=1000)
    assert "worker_user" in lack


def settings(level: SandboxLevel, **changes: Any) -> ServerSettings:
    return ServerSettings(sandbox=SandboxSettings(level, **changes))


def test_off_is_no_sandbox_and_takes_no_other_setting() -> None:
    assert sandbox_of(settings("off")) is None
    with pytest.raises(ServingError, match="not possible") as refused:
        sandbox_of(settings("off", user="nobody"))
    assert "worker_sandbox=off" in refused.value.detail


def test_basic_is_the_default_and_leaves_files_and_network_alone() -> None:
    sandbox = sandbox_of(ServerSettings())
    assert sandbox is not None
    assert (sandbox.strict, sandbox.network, sandbox.user, sandbox.max_files) == (
        False,
        True,
        None,
        MAX_FILES,
    )
    assert not sandbox.takes_whole_process


@pytest.mark.parametrize("user", ["no-such-user", "root", "0"])
def test_a_user_that_is_missing_or_root_is_refused(user: str) -> None:
    with pytest.raises(ServingError) as refused:
        sandbox_of(settings("basic", user=user))
    assert "worker_user" in refused.value.detail


@needs_landlock
@needs_seccomp
@pytest.mark.parametrize("secret", ["key_file", "workflow_store"])
def test_a_secret_where_workers_may_read_is_refused(tmp_path: Path, secret: str) -> None:
    user = str(UNUSED_USER) if os.geteuid() == 0 else None
    server = replace(settings("strict", read_paths=(tmp_path,), user=user), temp_dir=Path("/var/empty"))
    changes: dict[str, Any] = {secret: tmp_path / "secret"}
    with pytest.raises(ServingError) as refused:
        sandbox_of(replace(server, **changes))
    assert f"{secret} outside of {tmp_path}" in refused.value.detail


def test_strict_hides_variables_that_look_like_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("MY_API_KEY", "x")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    hidden = settings("strict").env_vars_hidden_from_workers
    found = worker_environment(hidden)
    assert "AWS_SECRET_ACCESS_KEY" not in found
    assert "MY_API_KEY" not in found
    assert "PATH" in found
    assert settings("basic").env_vars_hidden_from_workers is None


@pytest.mark.parametrize(
    ("value", "is_hidden"),
    [
        ("postgresql+psycopg2://user:pw@host/db", True),
        ("redis://:pw@host:6379/0", True),
        ("a,mongodb://user:p/w@one,two", True),
        ("jdbc:postgresql://user:p@w@host/db", True),
        ("https://user@host/db", False),
        ("https://host:8080/a@b", False),
        ("http://[::1]:8080/a@b", False),
        ("https://host/a:b@c", False),
        ("me:pw@host", False),
        ("/usr/bin:/bin", False),
    ],
)
def test_strict_hides_variables_whose_values_are_urls_with_a_password(
    monkeypatch: pytest.MonkeyPatch, value: str, is_hidden: bool
) -> None:
    monkeypatch.setenv("DATABASE_URL", value)
    names_given = replace(settings("strict"), hidden_env_vars="AWS_.*")
    for made, hides in ((settings("strict"), is_hidden), (settings("basic"), False), (names_given, False)):
        found = worker_environment(made.env_vars_hidden_from_workers, made)
        assert ("DATABASE_URL" not in found) == hides
