"""The report on a packed model, as JSON (`MAR-INF/report.json`) and as a table."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.models.measure.cost import gain
from torchere.archiver.models.measure.difference import Difference

REPORT_NAME = "MAR-INF/report.json"
FORMAT = 1
_CHANNEL = 1.6  # a single channel may drift this many times as far as all outputs together
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Side:
    """The measurements of one form of the model."""

    name: str  # "original", "fp32", "packed", or an archive's name
    size_bytes: int | None  # size of the file; None: there is no file
    memory_bytes: int | None  # growth of a process that loads it and runs it twice; None if not measured
    latency_ms: Mapping[int, float]  # by batch size: processor time of a run, see `processor_ms`


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that the models were measured on."""

    cpu: str
    isa: str  # torch's name for the vector instructions that it uses: "AVX2", "AVX512", "NEON"
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
    fp32: Side | None = None  # the fastest fp32 form that packing would make instead; None: not made
    engine: str | None = None  # `torchscript.quantized_engine`
    optimized: bool = False  # `torchscript.optimize_for_inference`
    notes: tuple[str, ...] = ()  # how the packed model was made; not in the table
    doubts: tuple[str, ...] = ()  # reasons why the comparison is not meaningful

    @property
    def accepted(self) -> bool:
        """Whether the drifts are within their limits, no channel was lost, and outputs are comparable."""
        found = self.difference
        within = found.drift <= self.max_drift
        if found.channel is not None:
            within = within and found.channel.beyond_chance <= self.max_channel_drift
        return within and not found.silenced and not found.undefined

    @property
    def max_channel_drift(self) -> float:
        """The limit for the drift of a single channel; compared with `ChannelDrift.beyond_chance`."""
        return _CHANNEL * self.max_drift

    @property
    def speedup(self) -> float | None:
        """How many times as fast the packed model is as in fp32; None without a time in fp32."""
        return gain(self.fp32.latency_ms, self.packed.latency_ms) if self.fp32 else None

    def to_json(self) -> str:
        """Return the text of `MAR-INF/report.json`; NaN and infinity become null."""
        found = {"accepted": self.accepted, "speedup": self.speedup}
        members: dict[str, Any] = {"version": FORMAT, **found, **asdict(self)}
        return json.dumps(_finite(members), indent=2)

    def table(self) -> str:
        """Return the report as a table for the user, one line per figure."""
        found = self.difference
        sides = [side for side in (self.original, self.fp32, self.packed) if side is not None]
        rows = [["", *(side.name for side in sides), ""]]
        rows += _bytes_row("file", [side.size_bytes for side in sides])
        rows += _bytes_row("memory", [side.memory_bytes for side in sides])
        for size in sorted(set.intersection(*(set(side.latency_ms) for side in sides))):
            rows.append(_time_row(f"batch of {size}", [side.latency_ms[size] for side in sides]))
        wide = max(12, *(len(side.name) for side in sides)) + 2
        lines = [
            f"{what:<12}{''.join(f'{value:>{wide}}' for value in values)}   {ratio}".rstrip()
            for what, *values, ratio in rows
        ]
        if self.fp32 is not None:
            lines.append("ratios are to fp32; times are processor time on one thread")
        lines += [
            f"largest difference {found.largest_abs:.3g}, mean {found.mean_abs:.3g}, over {found.rows} rows",
            likeness(found),
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
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)  # torch 2.10 has no such function
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


def _bytes_row(what: str, sizes: list[int | None]) -> list[list[str]]:
    """Return the table's row in a list, which is empty if nothing was measured."""
    if all(size is None for size in sizes):
        return []
    shown = [_NOTHING if size is None else f"{size / 1e6:.2f} MB" for size in sizes]
    return [[what, *shown, _ratio(sizes[-2], sizes[-1], "smaller", "larger")]]


def _time_row(what: str, times_ms: list[float]) -> list[str]:
    shown = [f"{ms:.3g} ms" for ms in times_ms]
    return [what, *shown, _ratio(times_ms[-2], times_ms[-1], "faster", "slower")]


def _ratio(one: float | None, other: float | None, less: str, more: str) -> str:
    """Return the ratio of the two as text with `less` or `more`; empty if one is missing or 0."""
    if not one or not other:
        return ""
    return f"{one / other:.2f} x {less}" if other <= one else f"{other / one:.2f} x {more}"


def likeness(found: Difference) -> str:
    """Return top1 and cosine as text; "" without either of them.

    The text says "largest value", not "class": outputs [rows, values] may be a forecaster's or an encoder's.
    """
    parts = []
    if found.top1 is not None:
        parts.append(f"largest value at the same place in {found.top1:.1%} of rows")
    if found.cosine is not None:
        parts.append(f"cosine {found.cosine:.4f}")
    return ", ".join(parts)
