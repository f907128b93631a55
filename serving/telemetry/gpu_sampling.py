"""How busy the GPUs are, as `nvidia-smi` tells.

Asking torch instead would create a CUDA context in the server process, which costs hundreds of megabytes on
every device and forbids forking workers.
"""

from __future__ import annotations

import csv
import logging
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

logger = logging.getLogger(__name__)

_FIELDS = "index,utilization.gpu,memory.used,memory.total"
_TIMEOUT_S = 10.0  # it answers in under a second; with a hung driver, never

_hung: list[subprocess.Popen[str]] = []  # was killed; with a hung driver that comes to nothing, either
_asked: list[subprocess.Popen[str]] = []  # may answer yet


class GpuSample(NamedTuple):
    """One GPU at one moment; None where the device doesn't tell (utilisation under MIG, for one)."""

    device_id: int
    percent: float | None
    memory_used_mib: float | None
    memory_total_mib: float | None

    @property
    def memory_percent(self) -> float | None:
        """Share of the memory in use, from 0 to 100."""
        if self.memory_used_mib is None or not self.memory_total_mib:
            return None
        return 100 * self.memory_used_mib / self.memory_total_mib


def sample_gpus() -> tuple[GpuSample, ...]:
    """All GPUs, by index; none where there is no driver, or it fails (which is logged). Blocks up to 10 s."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        return _ask(command)
    except (OSError, subprocess.SubprocessError) as err:
        logger.warning("GPUs can't be sampled: %s", err)
        return ()


def give_up() -> None:
    """End what is asked now: nobody waits for its answer any more. Any thread may call it."""
    while _asked:
        _asked.pop().kill()


def _ask(command: list[str]) -> tuple[GpuSample, ...]:
    """The samples it prints. Unlike `subprocess.run`, this waits for nothing that can't be killed."""
    if any(process.poll() is None for process in _hung):
        raise subprocess.SubprocessError("the last nvidia-smi hangs still, as it does where the driver hangs")
    _hung.clear()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
    )
    _asked.append(process)
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _hung.append(process)
        raise
    finally:
        is_wanted = process in _asked
        if is_wanted:
            _asked.remove(process)
    if not is_wanted:
        return ()
    samples = tuple(parse_gpus(output))
    # It fails for warnings, too (14: the infoROM of one GPU is corrupted), and has told all it was asked.
    if process.returncode and not samples:
        raise subprocess.CalledProcessError(process.returncode, command)
    return samples


def parse_gpus(text: str) -> Iterator[GpuSample]:
    """The samples in the CSV that `nvidia-smi` prints; a line that is something else is passed over."""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_FIELDS.split(",")) and row[0].isdigit():
            percent, used, total = map(_number, row[1:])
            yield GpuSample(int(row[0]), percent, used, total)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", "[Not Supported]"
        return None
