"""Build record of a compiled model, and whether the build fits this machine. Only reads files."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path

from torchere.archiver.request import BUILD_NAME

CPUINFO = Path("/proc/cpuinfo")

# CPU flags that code compiled for each instruction set requires (torch/_inductor/cpu_vec_isa.py).
_X86_FLAGS = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx512f", "avx512dq", "avx512vl", "avx512bw", "fma"}),
    "avx512_vnni": frozenset({"avx512f", "avx512dq", "avx512vl", "avx512bw", "fma", "avx512_vnni"}),
    "amx": frozenset({"avx512f", "amx_tile", "amx_bf16", "amx_int8"}),
}
_SAME_SET = {"avx512_amx": "amx", "amx_tile": "amx"}


@dataclass(frozen=True, slots=True)
class Build:
    """Build record of an archive's compiled model; a field is None when it is unknown."""

    torch: str | None = None  # version of the torch that compiled it, without the part after `+`
    isa: str | None = None  # instruction set, lower case
    machine: str | None = None  # as platform.machine() returns it
    fallback: str | None = None  # file of the same model as an exported program

    def with_metadata(self, metadata: dict[str, str]) -> Build:
        """Return this record, with its missing values filled from the metadata of the package."""
        isa = metadata.get("AOTI_CPU_ISA", "").lower() or None
        machine = metadata.get("AOTI_MACHINE") or None
        return Build(self.torch, self.isa or isa, self.machine or machine, self.fallback)


def read_build(model_dir: str) -> Build:
    """Return the build record of an archive; an empty one when it has none.

    Raises:
        RuntimeError: the record exists and is not in the form that the archiver writes.
    """
    file = Path(model_dir, BUILD_NAME)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Build()
    except ValueError as err:
        raise RuntimeError(f"{BUILD_NAME} is not JSON: {err}; pack the archive again") from err
    if not isinstance(record, dict):
        raise RuntimeError(f"{BUILD_NAME} holds {record!r}; expected an object; pack the archive again")
    isa = _text(record, "isa")
    return Build(
        torch=_text(record, "torch"),
        isa=isa.lower() if isa else None,
        fallback=_fallback(_text(record, "fallback"), model_dir),
    )


@dataclass(frozen=True, slots=True)
class Misfit:
    """Reason against running a build on this machine. `fatal`: an attempt could end the process."""

    reason: str
    fatal: bool


def misfit(build: Build, torch_version: str, cpu_flags: frozenset[str] | None) -> Misfit | None:
    """Return the reason against running the build on this machine; None when there is none.

    Args:
        build: the build record.
        torch_version: version of the torch that is to run it.
        cpu_flags: flags of this CPU, see `read_cpu_flags`; None when they are unknown.
    """
    if build.machine and build.machine != platform.machine():
        return Misfit(f"it was compiled for {build.machine}, and this is {platform.machine()}", fatal=True)
    sets = (build.isa or "").split()  # torch separates several by spaces: "avx512 avx512_vnni"
    needed = frozenset().union(*(_X86_FLAGS.get(_SAME_SET.get(one, one), frozenset()) for one in sets))
    lacking = needed - (cpu_flags or frozenset())
    if cpu_flags is not None and lacking:
        names = ", ".join(sorted(lacking))
        return Misfit(f"it was compiled for {build.isa}; this CPU lacks {names}", fatal=True)
    if build.torch and build.torch != torch_version.partition("+")[0]:
        return Misfit(f"it was compiled with torch {build.torch}; this is {torch_version}", fatal=False)
    return None


def read_cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str] | None:
    """Return the instruction set extensions of an x86 CPU under Linux; None elsewhere."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), None)
    return frozenset(flags.split()) if flags else None


def _text(record: dict[str, object], key: str) -> str | None:
    value = record.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise RuntimeError(f"{key} in {BUILD_NAME} is {value!r}; expected a text; pack the archive again")
    return value


def _fallback(name: str | None, model_dir: str) -> str | None:
    if name is not None and (Path(name).name != name or not Path(model_dir, name).is_file()):
        raise RuntimeError(f"{BUILD_NAME} names {name!r}, which the archive does not hold; pack it again")
    return name
