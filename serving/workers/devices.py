"""GPUs and CPU threads: their number, and their distribution over executors."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from glob import glob
from pathlib import Path

from torchere.handlers.loading import device_files
from torchere.serving.workers.executor import ExecutorStatus, LoadSpec

logger = logging.getLogger(__name__)


def gpu_count(most: int | None, kind: str = "cuda") -> int:
    """Return how many GPUs of a kind executors may use: those visible, at most `most` (None: all). Blocks."""
    there = visible_gpus() if kind == "cuda" else _counted_by_torch(kind)
    if most is None or most <= there:
        return there if most is None else most
    logger.warning("number_of_gpu=%d, and %s shows %d GPUs", most, _NAMES.get(kind, kind), there)
    return there


def counted_kind(kind: str | None) -> str:
    """Return the kind of GPU to count for a kind of device: itself for xpu and hpu, otherwise cuda."""
    return kind if kind in _VISIBLE_OF_KIND else "cuda"


def new_places(
    count: int, next_id: Callable[[], int], gpu_ids: tuple[int, ...], others: Iterable[ExecutorStatus]
) -> Iterator[tuple[int, int | None]]:
    """Yield the id and GPU of each new executor of a version: the GPU with the version's fewest executors.

    Ties are resolved in turn, by the executor id. A GPU that is listed twice gets twice as many executors;
    without GPUs all are on the CPU (None). `others` are the existing executors of the version.
    """
    taken = Counter(status.gpu_id for status in others)
    for _ in range(count):
        executor_id = next_id()
        first = executor_id % max(1, len(gpu_ids))
        in_turn = gpu_ids[first:] + gpu_ids[:first]
        gpu_id = min(in_turn, key=lambda one: taken[one] / gpu_ids.count(one), default=None)
        taken[gpu_id] += 1
        yield executor_id, gpu_id


def first_devices(gpu_ids: tuple[int, ...], devices: int) -> tuple[int, ...]:
    """Return the first GPU of each worker if each takes `devices` GPUs; leftover GPUs are not used.

    >>> first_devices((0, 1, 2, 3, 4), 2)
    (0, 2)
    """
    return gpu_ids[: len(gpu_ids) // devices * devices : devices]


def show_devices(spec: LoadSpec, gpu_id: int | None, kind: str) -> None:
    """Make only the worker's GPUs, from `gpu_id` on, visible to this process. Call it before torch uses any.

    `kind` is the kind of device in the model config, in lower case; "" if it names none.
    """
    if gpu_id is None:
        return
    variable = _VISIBLE_OF_KIND.get(kind, _VISIBLE)
    if variable == _VISIBLE and _VISIBLE_FIRST in os.environ and _is_for_rocm(_torch_libraries()):
        variable = _VISIBLE_FIRST
    visible = os.environ.get(variable)
    names = visible.split(",") if visible else [str(number) for number in range(max(spec.gpu_ids) + 1)]
    first = spec.gpu_ids.index(gpu_id)
    shown = spec.gpu_ids[first : first + spec.devices]
    os.environ[variable] = ",".join(names[number].strip() for number in shown)


class CoreShares:
    """Divides the cores over the executors of all versions. Used on the event loop only.

    Lanes take the current `threads` before each run (`LanePage.prepare`), so that they need no restart when
    other executors are added or removed.

    Args:
        cores: the cores to divide.
        chosen: intra-op threads of each executor in place of its share, up to `cores`; 0: none were chosen.
    """

    def __init__(self, cores: int, chosen: int = 0) -> None:
        self._cores = cores
        self._chosen = min(chosen, cores)
        self._executors: dict[object, int] = {}  # by pool
        self.threads = self.with_more(0)  # intra-op threads of each executor

    def take(self, pool: object, executors: int) -> None:
        """Record how many executors a pool has now; 0: none."""
        self._executors[pool] = executors
        if not executors:
            del self._executors[pool]
        self.threads = self.with_more(0)

    def with_more(self, executors: int) -> int:
        """Return the threads of each executor if `executors` more were added.

        Together they fit the cores, unless the operator has chosen a number.
        """
        share = self._cores // max(1, sum(self._executors.values()) + executors)
        return self._chosen or max(1, share)


def chosen_threads(environment: Mapping[str, str]) -> int:
    """Return the intra-op threads that an operator has chosen in the environment; 0: none, or no such number.

    As in torch, MKL's variable goes before that of OpenMP, unless it has no such number. That of OpenMP may
    have one for each level of nesting.

    >>> chosen_threads({"OMP_NUM_THREADS": "4,2"})
    4
    """
    texts = [environment.get(name, "") for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS")]
    firsts = [text.partition(",")[0].strip() for text in texts]
    return next((int(first) for first in firsts if re.fullmatch(r"0*[1-9][0-9]{0,2}", first)), 0)


# The number of GPUs that torch will see, for a server that does not import torch.
#
# The rules are those of `torch.cuda.device_count`. Where they can't be followed without torch (ROCm, GPUs
# named by UUID, an installation of another layout) a short-lived process asks torch, which takes seconds.

NVML = "libnvidia-ml.so.1"
ASK_TORCH = (sys.executable, "-c", "import sys, torch; print(getattr(torch, sys.argv[1]).device_count())")
_NAMES = {"cuda": "CUDA", "xpu": "torch.xpu", "hpu": "torch.hpu"}
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_VISIBLE_FIRST = "HIP_VISIBLE_DEVICES"  # ROCm reads CUDA's variable only if this one is not set
_VISIBLE_OF_KIND = {"xpu": "ZE_AFFINITY_MASK", "hpu": "HABANA_VISIBLE_MODULES"}  # of other kinds: `_VISIBLE`
ASK_TIMEOUT_S = 120.0
_ORDINALS = re.compile(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*")


def visible_gpus() -> int:
    """Return the number of GPUs visible to this process in CUDA or ROCm. Blocks: call it in a thread.

    Creates no CUDA context: one takes hundreds of megabytes on each GPU and does not survive a fork.
    """
    libraries = _torch_libraries()
    built_for_gpus = any("c10_cuda" in name for name in libraries) or _is_for_rocm(libraries)
    if any("c10" in name for name in libraries) and not built_for_gpus:
        return 0  # a CPU build; if none of torch's libraries is found, the build is unknown and torch decides
    wanted = os.environ.get(_VISIBLE)
    if wanted == "":
        return 0
    if wanted is None or _ORDINALS.fullmatch(wanted):
        there = _counted_by_driver() if any("c10_cuda" in name for name in libraries) else None
        if there is not None:
            return there if wanted is None else _shown([int(one) for one in wanted.split(",")], there)
    if sys.platform == "linux" and not any(map(glob, device_files.CUDA)):
        return 0  # a container without GPUs; common with torch's default build, which is for GPUs
    return _counted_by_torch()


def _torch_libraries() -> list[str]:
    found = importlib.util.find_spec("torch")
    folders = (found.submodule_search_locations or ()) if found else ()
    return [path.name for folder in folders for path in Path(folder, "lib").glob("*c10*")]


def _is_for_rocm(libraries: list[str]) -> bool:
    return any("c10_hip" in name for name in libraries)


def _shown(ordinals: list[int], there: int) -> int:
    """Return how many of `there` GPUs CUDA shows: a repeated ordinal hides all, one too high the rest."""
    if len(set(ordinals)) < len(ordinals):
        return 0
    return next((index for index, ordinal in enumerate(ordinals) if ordinal >= there), len(ordinals))


def _counted_by_driver() -> int | None:
    """Return the GPU count of NVML, as torch does; None if NVML is missing or fails."""
    try:
        library = ctypes.CDLL(NVML)
        if library.nvmlInit_v2() != 0:
            return None
        count = ctypes.c_uint()
        status = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if status != 0 else count.value


def _counted_by_torch(kind: str = "cuda") -> int:
    # Files in the current directory must not shadow modules of torch (has an effect from Python 3.11 on).
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(
            (*ASK_TORCH, kind),
            env=environment,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
        return int(done.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as err:
        logger.error("torch does not say how many GPUs there are: %s; the server uses none", err)
        return 0
