"""Whether a compiled model fits this machine, from what the archive and the package say of it."""

from __future__ import annotations

import json
import platform
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from torchere.handlers.compiled.package import Build, misfit, read_build, read_cpu_flags

AVX2 = frozenset({"sse2", "avx", "avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512dq", "avx512vl", "avx512bw"}

WriteArchive = Callable[..., Path]


def test_an_archive_without_a_record_says_nothing(tmp_path: Path) -> None:
    assert read_build(str(tmp_path), {}) == Build()


def test_reads_the_record_the_archiver_writes(write_archive: WriteArchive) -> None:
    record = {"format": "aoti", "torch": "2.13.0", "isa": "AVX2", "fallback": "model.exported.pt2"}
    archive = write_archive({"MAR-INF/build.json": json.dumps(record), "model.exported.pt2": b"x"})
    assert read_build(str(archive), {}) == Build("2.13.0", "avx2", None, "model.exported.pt2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"torch": 2.13}', "torch in MAR-INF/build.json is 2.13"),
        ('{"fallback": "gone.pt2"}', "does not hold"),
        ('{"fallback": "../gone.pt2"}', "does not hold"),
    ],
)
def test_refuses_a_record_that_the_archiver_would_not_write(
    write_archive: WriteArchive, text: str, said: str
) -> None:
    archive = write_archive({"MAR-INF/build.json": text})
    with pytest.raises(RuntimeError, match=said):
        read_build(str(archive), {})


def test_a_record_that_is_longer_than_any_takes_no_memory(write_archive: WriteArchive) -> None:
    archive = write_archive({"MAR-INF/build.json": "{" + " " * 20_000_000 + "}"})
    tracemalloc.start()
    try:
        with pytest.raises(RuntimeError, match="more than 65536 bytes"):
            read_build(str(archive), {})
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_packages_own_word_fills_up_what_the_record_leaves_out(write_archive: WriteArchive) -> None:
    metadata = {"AOTI_CPU_ISA": "AVX512", "AOTI_MACHINE": "x86_64"}
    silent = write_archive({"MAR-INF/build.json": "{}"})
    assert read_build(str(silent), metadata) == Build(isa="avx512", machine="x86_64")
    assert read_build(str(silent), {}) == Build()
    named = write_archive({"MAR-INF/build.json": '{"isa": "avx2"}'})
    assert read_build(str(named), metadata) == Build(isa="avx2", machine="x86_64")


@pytest.mark.parametrize(
    ("isa", "flags"),
    [
        ("avx2", AVX2),
        ("avx2", AVX512),
        ("avx512", AVX512),
        ("neon", frozenset()),
        (None, AVX2),
        ("avx512", None),
    ],
)
def test_a_cpu_that_has_the_instruction_set_fits(isa: str | None, flags: frozenset[str] | None) -> None:
    assert misfit(Build(isa=isa), "2.13.0", flags) is None


@pytest.mark.parametrize(
    ("isa", "lacking"),
    [
        ("avx512", "avx512bw"),
        ("avx512 avx512_vnni", "avx512_vnni"),
        ("avx512 avx512_vnni amx_tile", "amx_tile"),
        ("amx", "amx_tile"),
        ("avx512_amx", "amx"),
    ],
)
def test_a_cpu_that_lacks_the_instruction_set_would_die_of_it(isa: str, lacking: str) -> None:
    found = misfit(Build(isa=isa), "2.13.0", AVX2)
    assert found is not None
    assert found.fatal
    assert lacking in found.reason


def test_another_kind_of_machine_is_fatal() -> None:
    found = misfit(Build(machine="sparc"), "2.13.0", None)
    assert found is not None
    assert found.fatal
    assert platform.machine() in found.reason


def test_another_torch_is_a_misfit_that_may_be_tried() -> None:
    found = misfit(Build(torch="2.12.1"), "2.13.0+cpu", AVX2)
    assert found is not None
    assert not found.fatal
    assert "2.12.1" in found.reason


def test_the_part_of_the_version_after_the_plus_does_not_count() -> None:
    assert misfit(Build(torch="2.13.0"), "2.13.0+cpu", AVX2) is None


def test_reads_the_flags_of_the_first_cpu(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu avx2\n")
    assert read_cpu_flags(cpuinfo) == {"fpu", "avx2"}


def test_does_not_know_the_flags_where_nobody_tells(tmp_path: Path) -> None:
    assert read_cpu_flags(tmp_path / "none") is None
    arm = tmp_path / "arm"
    arm.write_text("Features\t: fp asimd\n")
    assert read_cpu_flags(arm) is None
