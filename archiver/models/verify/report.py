"""The report on a packed model, as JSON (`MAR-INF/report.json`) and as a table."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.models.measure.difference import Difference

REPORT_NAME = "MAR-INF/report.json"
FORMAT = 1
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Side:
    """The measurements of one of the two models."""

    name: str  # "original", "packed", or an archive's name
    size_bytes: int | None  # of the file; None without a file
    memory_bytes: int | None  # growth of a process that loads it and runs it twice; None if not measured
    latency_ms: Mapping[int, float]  # by batch size: median of a run, one thread


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of the measurements."""

    cpu: str
    isa: str  # torch's name of the vector instructions that it uses: "AVX2", "AVX512", "NEON"
    vnni: bool
    torch: str


@dataclass(frozen=True, slots=True)
class Report:
    """The comparison of a packed model with its original, on the same samples."""

    original: Side
    packed: Side
    difference: Difference
    max_drift: float
    samples: int
    machine: Machine
    engine: str | None = None  # `torchscript.quantized_engine`
    optimized: bool = False  # `torchscript.optimize_for_inference`
    notes: tuple[str, ...] = field(default=())  # how the packed model was made; JSON only
    doubts: tuple[str, ...] = ()  # reasons why the comparison is not meaningful

    @property
    def accepted(self) -> bool:
        """Whether the drift is within its limit, no channel was lost, and the outputs are comparable."""
        found = self.difference
        return found.drift <= self.max_drift and not found.silenced and not found.undefined

    def to_json(self) -> str:
        """Return the text of `MAR-INF/report.json`; NaN and infinity become null."""
        members: dict[str, Any] = {"version": FORMAT, "accepted": self.accepted, **asdict(self)}
        return json.dumps(_finite(members), indent=2)

    def table(self) -> str:
        """Return the report as a table for the user, one line per figure."""
        original, packed, found = self.original, self.packed, self.difference
        rows = [("", original.name, packed.name, "")]
        rows += [_bytes_row("file", original.size_bytes, packed.size_bytes)]
        rows += [_bytes_row("memory", original.memory_bytes, packed.memory_bytes)]
        for size in sorted(original.latency_ms.keys() & packed.latency_ms.keys()):
            rows.append(_time_row(f"batch of {size}", original.latency_ms[size], packed.latency_ms[size]))
        wide = max(12, len(original.name), len(packed.name)) + 2
        lines = [
            f"{what:<12}{one:>{wide}}{other:>{wide}}   {ratio}".rstrip() for what, one, other, ratio in rows
        ]
        lines += [
            f"largest difference {found.largest_abs:.3g}, mean {found.mean_abs:.3g}, over {found.rows} rows",
            _likeness(found),
            found.channel.note if found.channel else "",
            *(one.note for one in found.silenced),
            *self.doubts,
            "the original answers with nothing but not-a-number" if found.undefined else "",
            f"drift {found.drift:.3g}, at most {self.max_drift:.3g} wanted: "
            f"{'accepted' if self.accepted else 'REFUSED'}",
        ]
        return "\n".join(line for line in lines if line)


def this_machine() -> Machine:
    """Return the CPU, its vector instructions and the torch version, on which the measurements depend."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)  # torch 2.6 has no such function
    found = capabilities() or {"avx512_vnni": torch.cpu._is_vnni_supported()}
    vnni = bool(found.get("avx512_vnni") or found.get("avx_vnni"))
    return Machine(_cpu_name(), torch.backends.cpu.get_cpu_capability(), vnni, torch.__version__)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def _bytes_row(what: str, one: int | None, other: int | None) -> tuple[str, str, str, str]:
    shown = [_NOTHING if size is None else f"{size / 1e6:.2f} MB" for size in (one, other)]
    return (what, shown[0], shown[1], _ratio(one, other, "smaller", "larger"))


def _time_row(what: str, one: float, other: float) -> tuple[str, str, str, str]:
    return (what, f"{one:.3g} ms", f"{other:.3g} ms", _ratio(one, other, "faster", "slower"))


def _ratio(one: float | None, other: float | None, less: str, more: str) -> str:
    """Return the ratio of the two as text with `less` or `more`; empty if one is missing or 0."""
    if not one or not other:
        return ""
    return f"{one / other:.2f} x {less}" if other <= one else f"{other / one:.2f} x {more}"


def _likeness(found: Difference) -> str:
    parts = []
    if found.top1 is not None:
        parts.append(f"same first class in {found.top1:.1%} of rows")
    if found.cosine is not None:
        parts.append(f"cosine {found.cosine:.4f}")
    return ", ".join(parts)
