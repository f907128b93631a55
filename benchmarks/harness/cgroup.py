"""A control group with a limit of CPU time; its processes see it as the root, as in a container."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.errors import Unavailable

ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000  # what container runtimes set
_ENTER = 'echo $$ > "$0/cgroup.procs" && mount --bind "$0" "$1" && shift && exec "$@"'


class CpuTime(NamedTuple):
    """The counters of a group since it was made."""

    periods: int  # in which a process wanted to run
    throttled: int  # of them: those in which the limit stopped one


class CpuGroup:
    """One group, of version 2 or 1 of control groups. Not thread-safe."""

    def __init__(self, parent: Path, seen_at: Path, cpus: float | None) -> None:
        self._path = parent / f"torchere-{secrets.token_hex(4)}"
        self._seen_at = seen_at
        self._is_v2 = (ROOT / "cgroup.controllers").exists()
        self._path.mkdir()
        self.limit(cpus)

    def weigh(self, processes: int) -> None:
        """Give the group the weight of so many processes without one; it begins with that of a single one."""
        if self._is_v2:
            (self._path / "cpu.weight").write_text(str(min(10_000, 100 * processes)))
        else:
            (self._path / "cpu.shares").write_text(str(1024 * processes))

    def limit(self, cpus: float | None) -> None:
        """Allow so many CPUs' worth of time in each period; None: any."""
        quota = None if cpus is None else round(cpus * _PERIOD_US)
        if self._is_v2:
            (self._path / "cpu.max").write_text(f"{quota or 'max'} {_PERIOD_US}")
        else:
            (self._path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._path / "cpu.cfs_quota_us").write_text(str(quota or -1))

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs `arguments` in the group, under its own process id."""
        return ["unshare", "--mount", "sh", "-c", _ENTER, str(self._path), str(self._seen_at), *arguments]

    def cpu_time(self) -> CpuTime:
        """Read the counters."""
        lines = (self._path / "cpu.stat").read_text().splitlines()
        found = {name: int(value) for name, value in (line.split() for line in lines)}
        return CpuTime(found["nr_periods"], found["nr_throttled"])

    def remove(self) -> None:
        """Remove it; its processes must have ended."""
        self._path.rmdir()


@contextlib.contextmanager
def cpu_group(cpus: float | None) -> Iterator[CpuGroup]:
    """A group that is removed in the end.

    Raises:
        Unavailable: this user, or this container, may make none.
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        raise Unavailable("a control group needs root and unshare (util-linux)")
    is_v2 = (ROOT / "cgroup.controllers").exists()
    parent = ROOT if is_v2 else ROOT / "cpu"
    try:
        if is_v2:
            (ROOT / "cgroup.subtree_control").write_text("+cpu")
        group = CpuGroup(parent, parent, cpus)
    except OSError as err:
        raise Unavailable(f"no control group can be made below {parent}: {err}") from err
    try:
        yield group
    finally:
        group.remove()
