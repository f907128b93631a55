"""The sandbox of worker processes: the levels of `worker_sandbox`, and how a worker enters it.

A forked worker enters it when it learns which version it is for, before any code or weights of the archive
are read (`process.py`). A worker with an environment of its own enters it before its interpreter starts,
because packages run code when they are imported: this module's `main` runs first, and then executes the
interpreter.

`off` leaves workers with all rights of the server. `basic` takes away rights that no handler is known to
use. `strict` is for archives and requests that may be hostile: see docs/hardening.md. No archive can choose.
"""

from __future__ import annotations

import logging
import os
import pwd
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from torchere.handlers.loading import device_files
from torchere.serving.errors import ServingError
from torchere.serving.logs.lines import AT_START
from torchere.serving.process import confinement
from torchere.serving.process.confinement import DEVICE, FILES_ABI, READ, SCOPES_ABI, WRITE, Kernel
from torchere.serving.process.signals import die_with_parent
from torchere.serving.workers.oom import offer_to_oom_killer

if TYPE_CHECKING:  # a worker reads no settings, and each start would wait for the module
    from torchere.serving.config.server_settings import SandboxSettings, ServerSettings

logger = logging.getLogger(__name__)

IS_LINUX = sys.platform == "linux"
MAX_FILES = 65_536  # open at a time; an archive of memory-mapped files may need thousands
MAX_FILES_STRICT = 4_096
MAX_TASKS = 4_096  # processes and threads of `worker_user`, over all workers; the kernel exempts root
SCRATCH = "scratch"  # in the folder of the version, beside its archive; deleted with it
LIBRARIES = ".aot"  # in the archive: where handlers/compiled/load.py unpacks the library of a .pt2

# Paths that an interpreter, its libraries and a C compiler read. In /proc, Landlock's rule for tracing denies
# files of other processes; files in /sys are not secret. Certificates are included, private keys are not.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/proc", "/sys"),
    *("/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf", "/etc/ca-certificates"),
    *("/etc/pki/ca-trust", "/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf"),
    *("/etc/group", "/etc/passwd", "/etc/nsswitch.conf", "/etc/localtime", "/etc/timezone"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/os-release"),
    *("/etc/fonts", "/etc/mime.types", "/etc/OpenCL", "/etc/vulkan"),
)
NETWORK = ("/etc/hosts", "/etc/host.conf", "/etc/resolv.conf", "/etc/gai.conf", "/etc/services")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The sandbox of one version's workers; plain data, because it is sent to them."""

    archive: str = ""  # the unpacked archive; its folder holds its environment, too
    strict: bool = False
    user: int | None = None  # None: that of the server
    group: int = 0
    max_files: int = MAX_FILES
    max_tasks: int = MAX_TASKS
    max_memory_bytes: int = 0  # 0: no limit
    network: bool = True
    readable: tuple[str, ...] = ()  # paths of the interpreter, and of the operator, besides `SYSTEM`
    gpu: bool = False
    program: bytes = b""  # for seccomp

    @property
    def folder(self) -> str:
        """The folder of the version, which holds its archive, its own environment and its scratch folder."""
        return os.path.dirname(self.archive)

    @property
    def takes_whole_process(self) -> bool:
        """Whether the process can't be shared with other versions."""
        return self.strict or self.user is not None


def sandbox_of(server: ServerSettings, kernel: Kernel | None = None) -> Sandbox | None:
    """Return the sandbox of all workers, without the fields of single versions; None: they have none.

    Raises:
        ServingError: the settings contradict each other, or this system can't do what they ask for.
    """
    wanted = server.sandbox
    if wanted.level == "off":
        from torchere.serving.config.server_settings import SandboxSettings  # noqa: PLC0415 - not in workers

        if wanted != SandboxSettings("off"):
            raise _refused("off", ["no other setting of the sandbox: worker_user and the like need a level"])
        return None
    strict = wanted.level == "strict"
    user, group = _user(wanted)
    sandbox = Sandbox(
        strict=strict,
        user=user,
        group=group,
        max_files=MAX_FILES_STRICT if strict else MAX_FILES,
        max_memory_bytes=wanted.memory_limit_bytes,
        network=wanted.network or not strict,
        readable=tuple(_readable(wanted)),
    )
    if not strict:
        return sandbox
    if lacks := missing(kernel or confinement.kernel(), user, os.geteuid()):
        raise _refused("strict", lacks)
    if in_view := list(_secrets_in_view(server, sandbox)):
        raise _refused("strict", in_view)
    program = confinement.make_filter(network=sandbox.network, own_user=user is not None)
    return replace(sandbox, program=program)


def missing(kernel: Kernel, user: int | None, server_user: int) -> list[str]:
    """Return the needs of `strict` that this system does not meet, as parts of a sentence."""
    found = f"found {kernel.landlock_abi or 'none'}"
    lacks = []
    if user is None and server_user == 0:
        lacks.append("worker_user, because the server runs as root")
    if kernel.landlock_abi < FILES_ABI:
        lacks.append(f"Landlock ABI {FILES_ABI}, of Linux 6.2 or later ({found})")
    elif kernel.landlock_abi < SCOPES_ABI and user is None:
        lacks.append(
            f"Landlock ABI {SCOPES_ABI}, of Linux 6.12 or later ({found}), "
            "or worker_user, so that workers can't signal the server"
        )
    if not kernel.seccomp:
        lacks.append(f"seccomp ({kernel.why_no_seccomp})")
    return lacks


def announce(server: ServerSettings) -> None:
    """Log which parts of the sandbox are in effect.

    Raises:
        ServingError: as in `sandbox_of`.
    """
    kernel = confinement.kernel() if server.sandbox.level == "strict" else None
    sandbox = sandbox_of(server, kernel)
    if sandbox is None:
        logger.info("worker_sandbox=off: handlers have all rights of the server", extra=AT_START)
        return
    if not IS_LINUX:
        logger.warning(
            "worker_sandbox=%s: only limits are in effect, on %s", server.sandbox.level, sys.platform
        )
    logger.info(
        "worker_sandbox=%s: %s", server.sandbox.level, "; ".join(_parts(sandbox, kernel)), extra=AT_START
    )


def _parts(sandbox: Sandbox, kernel: Kernel | None) -> Iterator[str]:
    if IS_LINUX:
        yield "no new privileges"
    if sandbox.user is not None:
        yield f"user {sandbox.user}, group {sandbox.group}"
    yield f"no core files, at most {sandbox.max_files} open files"
    if sandbox.max_memory_bytes:
        yield f"at most {sandbox.max_memory_bytes} bytes of memory"
    if sandbox.strict and kernel is not None:
        yield f"files by Landlock ABI {kernel.landlock_abi}"
        yield "system calls by seccomp"
        yield "signals stay inside" if kernel.landlock_abi >= SCOPES_ABI else "signals by user only"
        yield "network" if sandbox.network else "no network"


def _refused(level: str, lacks: Sequence[str]) -> ServingError:
    return ServingError(
        "The sandbox of workers is not possible here.", f"worker_sandbox={level} needs {'; '.join(lacks)}"
    )


def _user(wanted: SandboxSettings) -> tuple[int | None, int]:
    """Return the ids of `worker_user` and its group; None: the worker keeps the server's."""
    if wanted.user is None:
        return None, 0
    try:
        if wanted.user.isdecimal():
            user = group = int(wanted.user)
            with suppress(KeyError):
                group = pwd.getpwuid(user).pw_gid
        else:
            entry = pwd.getpwnam(wanted.user)
            user, group = entry.pw_uid, entry.pw_gid
    except (KeyError, OverflowError):
        raise _refused(
            wanted.level, [f"a user of this system as worker_user; {wanted.user!r} is none"]
        ) from None
    if user == 0:
        raise _refused(wanted.level, ["another worker_user than root"])
    if user == os.geteuid():
        return None, 0
    if os.geteuid() != 0:
        raise _refused(wanted.level, [f"a server that runs as root to change to worker_user={wanted.user}"])
    return user, group


def _readable(wanted: SandboxSettings) -> Iterator[str]:
    """Yield the paths that a worker's interpreter reads, and those that the operator adds.

    The server's current folder, which `python -m` puts first on the search path, is left out.
    """
    yield from dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    here = os.getcwd()
    yield from (path for path in sys.path if path and (path in given or os.path.realpath(path) != here))
    yield from (path for path in libraries if path)
    rooms = Path(__file__).resolve().parents[2]  # an editable installation is not on the search path
    yield from (str(rooms / name) for name in ("archiver", "handlers", "serving"))
    yield from map(str, wanted.read_paths)


def _secrets_in_view(server: ServerSettings, sandbox: Sandbox) -> Iterator[str]:
    """Yield complaints about secrets of the server, or other models, that lie where workers may read."""
    secrets = {
        "key_file": server.key_file if server.token_auth_enabled else None,
        "token_keys_file": server.token_keys_file,
        "private_key_file": server.private_key_file,
        "rendezvous_secret_file": server.rendezvous.secret_file,
        "audit_log": server.audit_log,
        "quarantine_directory": server.quarantine_directory,
        "model_store": server.model_store,
        "workflow_store": server.workflow_store,
        "the folder for unpacked archives": server.temp_dir or Path(tempfile.gettempdir()),
    }
    for name, secret in secrets.items():
        for root in (*SYSTEM, *sandbox.readable):
            if secret is not None and Path(os.path.realpath(secret)).is_relative_to(os.path.realpath(root)):
                yield f"{name} outside of {root}, which workers may read"
                break


# Variables that name caches of torch.compile and others; without them these are in the worker's own folder.
CACHE_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


def enter(sandbox: Sandbox) -> None:
    """Confine the calling process for good; in a shared process, as far as possible only its thread.

    Raises:
        OSError: the kernel refuses, or the worker's user can't read the archive.
    """
    _limit(sandbox)
    if sandbox.takes_whole_process:
        scratch = _scratch(sandbox)
        os.environ.update(dict.fromkeys(("HOME", "TMPDIR", "TEMP", "TMP"), scratch))
        for name in CACHE_FOLDERS:  # of the server, which workers may not write to
            os.environ.pop(name, None)
        tempfile.tempdir = None  # determined anew at the next use
    if sandbox.user is not None:
        _become(sandbox, sandbox.user)
    if not IS_LINUX:
        return
    confinement.no_new_privileges()
    if sandbox.strict:
        confinement.drop_capabilities()  # of a server that has some without being root
        confinement.restrict_files(_rules(sandbox), tcp=sandbox.network)
        confinement.install_filter(sandbox.program)


def _limit(sandbox: Sandbox) -> None:
    confinement.limit("CORE", 0)  # a core file holds the clients' data
    confinement.limit("NOFILE", sandbox.max_files)
    if sandbox.max_memory_bytes:
        # Not RLIMIT_AS: torch maps gigabytes of libraries, and CUDA reserves terabytes that it never uses.
        confinement.limit("DATA", sandbox.max_memory_bytes)
    if sandbox.user is not None:
        confinement.limit("NPROC", sandbox.max_tasks)


def _scratch(sandbox: Sandbox) -> str:
    """Create the folders that the worker may write to; return the one for temporary files."""
    scratch = os.path.join(sandbox.folder, SCRATCH)
    folders = [scratch]
    if any(name.endswith(".pt2") for name in os.listdir(sandbox.archive)):
        folders.append(os.path.join(sandbox.archive, LIBRARIES))
    for folder in folders:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
            if sandbox.user is not None:
                os.chown(folder, sandbox.user, sandbox.group)
        if os.path.islink(folder):  # packed in the archive: it would extend the worker's rights
            raise PermissionError(f"{folder} is a link")
    return scratch


def _become(sandbox: Sandbox, user: int) -> None:
    needed = [path for path in (*sandbox.readable, sandbox.archive) if os.path.exists(path)]
    _open_to_group(Path(sandbox.folder), sandbox.group)
    confinement.become(user, sandbox.group)
    die_with_parent()  # the kernel has forgotten it with the change of the user
    for path in needed:
        if not os.access(path, os.R_OK):
            raise PermissionError(_unreadable(user, path))


def _unreadable(user: int, path: str) -> str:
    return f"worker_user {user} can't read {path}; check the modes of it and its parents"


_FIRST_UNREADABLE = "import os, sys; print(next((p for p in sys.argv[1:] if not os.access(p, os.R_OK)), ''))"


def check_readable(sandbox: Sandbox) -> None:
    """Check in a process of the worker's user that it can read the files that workers need.

    Raises:
        PermissionError: the user can't read one of them.
    """
    user, paths = sandbox.user, [path for path in sandbox.readable if os.path.exists(path)]
    if user is None:
        return
    command = [sys.executable, "-Sc", _FIRST_UNREADABLE, *paths]
    ids: dict[str, Any] = {"user": user, "group": sandbox.group, "extra_groups": ()}
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, **ids)
    except PermissionError:
        raise PermissionError(_unreadable(user, sys.executable)) from None
    if path := done.stdout.strip() or (paths[0] if done.returncode else ""):
        raise PermissionError(_unreadable(user, path))


def _open_to_group(folder: Path, group: int) -> None:
    """Let the group read the folder of a version, which stays the server's; once, before its code has run."""
    if folder.stat().st_gid == group and folder.stat().st_mode & 0o050 == 0o050:
        return
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in (SCRATCH, LIBRARIES)]
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            mode = os.lstat(path).st_mode
            needed = 0o555 if stat.S_ISDIR(mode) or mode & 0o100 else 0o444
            if not stat.S_ISLNK(mode) and mode & needed != needed:
                os.chmod(path, stat.S_IMODE(mode) | needed)
    for passed, needed in ((folder.parent, 0o010), (folder, 0o050)):
        mode = passed.stat().st_mode
        if mode & 0o005 != 0o005:  # otherwise all users may enter the folder already
            os.chown(passed, -1, group)
            os.chmod(passed, stat.S_IMODE(mode) | needed)


def _rules(sandbox: Sandbox) -> Iterator[tuple[str, int]]:
    readable = (*SYSTEM, *(NETWORK if sandbox.network else ()), *sandbox.readable, sandbox.folder)
    yield from ((path, READ) for path in readable)
    yield from ((path, WRITE) for path in DEVICES)
    yield os.path.join(sandbox.folder, SCRATCH), WRITE
    yield os.path.join(sandbox.archive, LIBRARIES), WRITE
    if sandbox.gpu:
        yield from ((path, DEVICE) for pattern in device_files.OPENED for path in glob(pattern))


def entered_by(sandbox: Sandbox, variables: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """Return the command that enters the sandbox, and then executes `command` with further variables."""
    entry = msgspec.json.encode((sandbox, variables)).decode()
    return [sys.executable, "-m", "torchere.serving.workers.sandbox", entry, *command]


def main() -> None:
    """Enter the sandbox of the first argument, and execute the command of the others."""
    entry, *command = sys.argv[1:]
    sandbox, variables = msgspec.json.decode(entry, type=tuple[Sandbox, dict[str, str]])
    offer_to_oom_killer()
    enter(sandbox)
    os.execve(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    main()
