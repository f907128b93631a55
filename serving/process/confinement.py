"""The kernel's means to confine a process: user, limits, Landlock, seccomp. Linux only, but macOS imports it.

This is the one file that names system calls. Each function confines the calling process for good, and all
processes that it starts. Call them while the process has one thread: Landlock and seccomp confine the calling
thread only.

Landlock is called by its three system calls, because the package `landlock` has neither its rules for TCP and
signals nor a release (docs/decisions/0024-worker-sandbox.md). The constants come from linux/landlock.h,
linux/prctl.h and linux/seccomp.h. libseccomp makes the seccomp filter through `pyseccomp` (extra
`sandbox`), once in the server; a worker only installs it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import resource
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# These numbers are the same on all Linux architectures except alpha (asm-generic/unistd.h).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_RULESET_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_RULE_PATH_BENEATH = 1

_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x2008_0522  # linux/capability.h

# LANDLOCK_ACCESS_FS_*: bits in the order of linux/landlock.h. _FILE_RIGHTS: all that exist from an ABI on.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_NET_RIGHTS = 0b11  # LANDLOCK_ACCESS_NET_*: bind and connect TCP sockets
_SCOPES = 0b11  # LANDLOCK_SCOPE_*: abstract Unix sockets, signals
READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE = (1 << 15) - 1  # everything but ioctl on devices
DEVICE = _READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL_DEV

FILES_ABI = 3  # Linux 6.2: truncation counts as writing
TCP_ABI = 4  # Linux 6.7
SCOPES_ABI = 6  # Linux 6.12

# System calls that no model needs, refused with EPERM: they trace or read other processes, load code into
# the kernel, mount, change namespaces or the machine, or have a history of holes in the kernel. Docker's
# default profile refuses most of them, too (moby, profiles/seccomp).
DENIED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd"),
    *("bpf", "perf_event_open", "userfaultfd", "lookup_dcookie", "fanotify_init"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "keyctl", "request_key"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module"),
    *("mount", "umount", "umount2", "move_mount", "mount_setattr", "open_tree", "open_tree_attr"),
    *("pivot_root", "chroot"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "open_by_handle_at", "uselib", "nfsservctl"),
    *("unshare", "setns", "reboot", "swapon", "swapoff", "acct", "syslog", "quotactl", "quotactl_fd"),
    *("settimeofday", "clock_settime", "clock_settime64", "clock_adjtime", "adjtimex", "stime"),
    *("sethostname", "setdomainname", "iopl", "ioperm", "vm86", "vm86old", "vhangup", "personality"),
    "inotify_add_watch",  # reports the names of files in use, and Landlock does not govern it
    # System V IPC and POSIX queues have no paths, so Landlock does not govern them. With them, workers of
    # different models under one user could communicate, and the objects would outlive the workers. An id may
    # name an object of another process.
    *("shmget", "shmat", "shmctl", "msgget", "msgsnd", "msgrcv", "msgctl"),
    *("semget", "semop", "semtimedop", "semctl", "mq_open", "mq_unlink"),
)
# System calls that may name another process of the same user, here the server: (name, argument, value
# allowed). Landlock does not govern them.
_OWN_PROCESS_ONLY = (
    ("prlimit64", 0, 0),
    ("setpriority", 0, 0),
    ("setpriority", 1, 0),
    ("ioprio_set", 0, 1),  # 1: a process; not a process group (2) or a user (3)
    ("ioprio_set", 1, 0),
    ("sched_setscheduler", 0, 0),
    ("sched_setparam", 0, 0),
    ("sched_setattr", 0, 0),
)
# Landlock does not govern modes, owners and attributes: a process may change those of all files of its user,
# the key file of the server among them. An attribute holds the ACL, which is another way to change the mode.
_OF_OWNERS = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "file_setattr"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
    *("utime", "utimes", "futimesat"),
)
# With a path they could change a file of the server; without one (0) they change a file that is open.
_OWN_FILES_ONLY = (("utimensat", 1, 0), ("utimensat_time64", 1, 0))
# Numbers of system calls that libseccomp 2.5 does not know; they are the same on all architectures.
_NUMBERS = {
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_setattr": 469,
}
# SOCK_DGRAM and SOCK_RAW, which Unix sockets treat alike: one end of such a pair can send to any socket that
# has a path.
_PAIRS_THAT_SEND_ANYWHERE = (2, 3)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET of linux/sched.h.
_NEW_NAMESPACES = (0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000)
_ODD_FAMILIES = (15, 17, 29, 38, 40, 44)  # key, packet, CAN, ALG, vsock, XDP: no model needs them


@dataclass(frozen=True, slots=True)
class Kernel:
    """The means of confinement that this system has."""

    landlock_abi: int  # 0: none
    why_no_seccomp: str  # "": the kernel takes filters, and pyseccomp finds libseccomp to make them

    @property
    def seccomp(self) -> bool:
        """Whether filters can be made and installed."""
        return not self.why_no_seccomp


def kernel() -> Kernel:
    """Return the means of confinement that this system has; starts `ldconfig` once, through pyseccomp."""
    if sys.platform != "linux":
        return Kernel(0, f"seccomp is Linux's, and this is {sys.platform}")
    return Kernel(max(0, _call(_CREATE_RULESET, None, 0, _RULESET_VERSION)), _why_no_seccomp())


def _why_no_seccomp() -> str:
    try:
        import pyseccomp  # noqa: F401, PLC0415 - in the extra `sandbox`
    except ImportError:
        return "pyseccomp is not installed: pip install 'torchere[sandbox]'"
    except RuntimeError as err:
        return f"pyseccomp does not work ({err}): install libseccomp (Debian: libseccomp2)"
    return "" if Path("/proc/sys/kernel/seccomp").exists() else "the kernel has no seccomp filters"


def no_new_privileges() -> None:
    """Make set-user-id files and file capabilities ineffective for the calling thread and its children."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def limit(name: Literal["CORE", "NOFILE", "DATA", "NPROC"], value: int) -> None:
    """Lower a resource limit, soft and hard; a limit that is lower already stays."""
    number = getattr(resource, f"RLIMIT_{name}")
    held = resource.getrlimit(number)
    lower = [value if each == resource.RLIM_INFINITY else min(value, each) for each in held]
    resource.setrlimit(number, (lower[0], lower[1]))


def become(user: int, group: int) -> None:
    """Change the user and groups of the whole process; only root may do this.

    The supplementary groups are those of the user's entry in the system's files, if it has one.
    """
    try:
        os.initgroups(pwd.getpwuid(user).pw_name, group)
    except KeyError:
        os.setgroups([group])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    # After the change /proc/self still belongs to root, so the process could not read its own open files and
    # limits.
    _prctl(_PR_SET_DUMPABLE, 1)


def drop_capabilities() -> None:
    """Give up all capabilities of the calling thread; after `no_new_privileges` it can't regain them."""
    nothing = bytes(2 * 3 * 4)  # effective, permitted and inheritable, twice 32 bits
    _checked(_libc().capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), nothing))


def restrict_files(rules: Iterable[tuple[str, int]], *, tcp: bool) -> None:
    """Allow the process the given rights beneath the given paths, and access to no other files, by Landlock.

    It can no longer send signals to processes outside, trace them, or connect to their abstract sockets.
    Open files stay usable. An older kernel enforces only some of these restrictions (see `TCP_ABI`).

    Args:
        rules: paths and rights (`READ`, `WRITE`, `DEVICE`); a path that can't be opened is left out.
        tcp: whether TCP ports may be bound and connected to.

    Raises:
        OSError: the kernel has no Landlock, or refuses.
    """
    abi = _checked(_call(_CREATE_RULESET, None, 0, _RULESET_VERSION))
    handled = next(rights for least, rights in sorted(_FILE_RIGHTS.items(), reverse=True) if abi >= least)
    net = 0 if tcp or abi < TCP_ABI else _NET_RIGHTS
    attributes = [handled, net, _SCOPES][: 3 if abi >= SCOPES_ABI else 2 if abi >= TCP_ABI else 1]
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = _checked(_call(_CREATE_RULESET, packed, len(packed), 0))
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & handled)
        _checked(_call(_RESTRICT_SELF, ruleset, 0, 0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with suppress(FileNotFoundError, PermissionError, NotADirectoryError):
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(beneath).st_mode):
                rights &= _OF_FILES
            rule = struct.pack("=Qi", rights, beneath)  # struct landlock_path_beneath_attr is packed
            _checked(_call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0))
        finally:
            os.close(beneath)


def make_filter(*, network: bool, own_user: bool) -> bytes:
    """Make the seccomp program that refuses `DENIED`, and without `network` all sockets but pairs of streams.

    All other calls are allowed: a list of the calls that any library under a model makes would break with the
    library's next release.

    `own_user`: the process has another user than the server, so that the files it owns are not the server's.
    It may change their modes and times.

    Raises:
        ImportError, RuntimeError, OSError: pyseccomp or libseccomp is missing.
    """
    import pyseccomp as seccomp  # noqa: PLC0415 - in the extra `sandbox`

    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    with suppress(OSError):  # libseccomp before 2.5 only searches linearly, which is slower
        rules.set_attr(seccomp.Attr.CTL_OPTIMIZE, 2)
    refused = seccomp.ERRNO(errno.EPERM)

    def refuse(name: str, *conditions: Any, action: int = refused) -> None:
        number = seccomp.resolve_syscall(seccomp.system_arch(), name)
        number = _NUMBERS.get(name, -1) if number == -1 else number
        if number >= 0:  # otherwise this architecture or libseccomp does not have the call
            rules.add_rule(action, number, *conditions)

    for name in DENIED if own_user else (*DENIED, *_OF_OWNERS):
        refuse(name)
    for name, argument, allowed in _OWN_PROCESS_ONLY if own_user else (*_OWN_PROCESS_ONLY, *_OWN_FILES_ONLY):
        refuse(name, seccomp.Arg(argument, seccomp.NE, allowed))
    for flag in _NEW_NAMESPACES:
        refuse("clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    # A filter can't read the flags of clone3, which are in memory; after ENOSYS callers use clone.
    refuse("clone3", action=seccomp.ERRNO(errno.ENOSYS))
    for name, *conditions in _socket_rules(seccomp, network):
        refuse(name, *conditions)
    with os.fdopen(os.memfd_create("seccomp"), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _socket_rules(seccomp: Any, network: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the calls that open sockets and are refused, each with its conditions."""
    if network:
        yield from (("socket", seccomp.Arg(0, seccomp.EQ, family)) for family in _ODD_FAMILIES)
        return
    yield ("socket",)
    yield "socketpair", seccomp.Arg(0, seccomp.NE, socket.AF_UNIX)
    for kind in _PAIRS_THAT_SEND_ANYWHERE:
        yield "socketpair", seccomp.Arg(1, seccomp.MASKED_EQ, 0xF, kind)


class _Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h; an instruction has 8 bytes."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(program: bytes) -> None:
    """Install a program of `make_filter`; `no_new_privileges` comes first.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_Program(len(program) // 8, program)))


def _prctl(option: int, *arguments: Any) -> None:
    rest = [each if not isinstance(each, int) else ctypes.c_ulong(each) for each in arguments]
    rest += [ctypes.c_ulong(0)] * (4 - len(rest))
    _checked(_libc().prctl(option, *rest))


def _call(number: int, *arguments: int | bytes | None) -> int:
    system_call = _libc().syscall
    system_call.restype = ctypes.c_long
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = system_call(ctypes.c_long(number), *converted)
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
