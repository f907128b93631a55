"""Lack of memory: as torch and what it stands on tell it, and for the values of a run."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchere.serving.types import InferRequest, Parameter
from torchere.serving.workers import lanes, messages
from torchere.serving.workers.frames import HEADER
from torchere.serving.workers.plain import lacks_memory

GpuError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)  # torch has it from 2.8 on


@pytest.mark.parametrize(
    "err",
    [
        MemoryError(),
        torch.OutOfMemoryError("Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity)"),
        GpuError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB)"),
        RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"),
        Exception("[ONNXRuntimeError] : Failed to allocate memory for requested buffer of size 9"),
        Exception("[ONNXRuntimeError] : Available memory of 5 is smaller than requested bytes of 9"),
    ],
    ids=lambda err: str(err)[:30],
)
def test_what_says_that_memory_is_lacking(err: Exception) -> None:
    assert lacks_memory(err)


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_on_a_cpu_says_so_in_a_text(*, compiled: bool) -> None:
    def too_much(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty([1 << 50])

    with pytest.raises(RuntimeError) as caught:
        (torch.jit.script(too_much) if compiled else too_much)(torch.ones(1))
    assert lacks_memory(caught.value)


@pytest.mark.parametrize(
    "err",
    [
        GpuError("CUDA error: device-side assert triggered"),
        GpuError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("Attempting to deserialize object on a CUDA device"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        ValueError("CUDA"),
        ValueError("invalid literal for int() with base 10: 'CUDA out of memory'"),  # of the client
        KeyError("RESOURCE_EXHAUSTED"),
    ],
    ids=lambda err: str(err)[:40],
)
def test_other_errors_of_a_gpu_are_no_lack_of_memory(err: Exception) -> None:
    assert not lacks_memory(err)


RECEIVES = """
import os, resource, socket
from torchere.serving.types import InferRequest, Parameter
from torchere.serving.workers import frames, lanes, messages

parameters = tuple(Parameter(str(number), bytes(32_000)) for number in range(6000))
frames.room_for(1)
server, worker = socket.socketpair()
if os.fork() == 0:
    worker.close()
    frames.send_all(server, messages.encode_run(7, 0, [InferRequest("id", parameters)]))
    os._exit(0)
server.close()
del parameters
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + 64 * 2**20,) * 2)
begun = []
descriptor = lanes.create(1)
page = lanes.LanePage(descriptor, 1)
run = lanes.next_run(frames.FrameReader(worker), page, begun.append)
print(len(begun), run.run_id, len(run.large) > 5000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_many_small_values_without_room_have_their_run_begun_and_leave_the_worker() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RECEIVES], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == ["1", "7", "True"]


def test_values_that_are_received_and_cannot_be_handed_on_leave_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_room(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(lanes, "run_with_raw", without_room)
    frame, raw = messages.encode_run(7, 0, [InferRequest("id", (Parameter("body", bytes(10**6)),))])
    batches: Any = SimpleNamespace(next=lambda: frame[HEADER.size :], raw=lambda count: raw)
    page: Any = None  # of which a run without a slot needs nothing
    run = lanes.next_run(batches, page, lambda _: None)
    assert run is not None and run.large
