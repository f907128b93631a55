"""The allocator keeps what a batch has freed."""

import platform
import subprocess
import sys

import pytest

from torchere.serving.process.allocator import heaps

# Ten times what a batch does, in a thread: allocate and touch 16 blocks of 8 MiB, then free them all.
CHURN = """
import ctypes, os, resource, sys, threading
from torchere.serving.process.allocator import keep_freed_memory

os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:2])  # so that there is one heap
print(keep_freed_memory(os.environ))
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def batch():
    blocks = [libc.malloc(2**23) for _ in range(16)]
    for block in blocks:
        ctypes.memset(block, 1, 2**23)
    for block in blocks:
        libc.free(block)

def churn():
    batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        batch()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=churn)
thread.start()
thread.join()
"""
PAGES_OF_A_BATCH = 16 * 2**23 // 4096

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


def test_eight_cores_share_a_heap() -> None:
    assert [heaps(cores) for cores in (1, 2, 15, 16, 64)] == [1, 1, 1, 2, 8]


def churned(environment: dict[str, str]) -> tuple[str, int]:
    """What `keep_freed_memory` said, and the page faults of ten batches after the first."""
    done = subprocess.run(
        [sys.executable, "-c", CHURN], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    said, faults = done.stdout.split()
    return said, int(faults)


def test_the_second_batch_in_a_thread_finds_the_memory_of_the_first() -> None:
    said, faults = churned({})

    assert said == "True"
    assert faults < PAGES_OF_A_BATCH / 10


def test_a_tunable_that_is_not_the_allocators_changes_nothing() -> None:
    said, faults = churned({"GLIBC_TUNABLES": "glibc.cpu.x86_rep_movsb_threshold=1000000"})

    assert said == "True"
    assert faults < PAGES_OF_A_BATCH / 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_ARENA_MAX", "131072"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_who_sets_the_allocator_in_the_environment_has_the_say(name: str, value: str) -> None:
    said, faults = churned({name: value})

    assert said == "False"
    assert faults > PAGES_OF_A_BATCH
