"""Network namespaces as hosts that share one cable; `pythonpath` of pytest's configuration leads here."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

CLONE_NEWNET = 0x40000000  # linux/sched.h


def ip(*arguments: str) -> None:
    """Run `ip`, from iproute2; raise what `subprocess.run` does."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """One namespace: its name, its address on the cable, and its end of it."""

    name: str
    address: str
    cable: str

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have this thread, and the processes that it starts, use the network of this host."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(before)
            os.close(before)
            os.close(there)

    def cut(self) -> None:
        """Pull its end of the cable."""
        ip("-n", self.name, "link", "set", self.cable, "down")

    def mend(self) -> None:
        """Plug it in again."""
        ip("-n", self.name, "link", "set", self.cable, "up")


def _enter(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, each with a loopback interface of its own; skips the test where that is not allowed."""
    mark = f"{os.getpid() % 2**16:x}"
    # 198.18.0.0/15 is for tests of networks (RFC 2544).
    hosts = [Host(f"torchere-{mark}-{at}", f"198.18.77.{at}", f"te{mark}{at}") for at in (1, 2)]
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
        except (OSError, subprocess.CalledProcessError) as err:
            said = getattr(err, "stderr", "") or str(err)
            pytest.skip(f"network namespaces need root and iproute2 on Linux: {said.strip()}")
        first, second = hosts
        cable = ["link", "add", first.cable, "netns", first.name, "type", "veth"]
        ip(*cable, "peer", "name", second.cable, "netns", second.name)
        for host in hosts:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.cable)
            for device in ("lo", host.cable):
                ip("-n", host.name, "link", "set", device, "up")
        yield first, second
    finally:
        for host in hosts:
            with suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "delete", host.name)
