"""What is read from a `.pt2` file before anything of it is loaded, and whether it fits this machine."""

from __future__ import annotations

import ast
import contextlib
import json
import platform
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from torchere.handlers.compiled import package as package_module
from torchere.handlers.compiled.package import (
    Build,
    InputRule,
    LinearSize,
    extracted_library,
    holds_gil,
    misfit,
    read_build,
    read_cpu_flags,
    read_package,
    read_rules,
    stride_of,
)

FOLDER = "net/data/aotinductor/model/"
METADATA = json.dumps({"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX2"})


def write(path: Path, entries: dict[str, str]) -> str:
    with zipfile.ZipFile(path, "w") as file:
        for name, text in entries.items():
            file.writestr(name, text)
    return str(path)


def test_finds_the_library_and_what_the_compiler_noted(tmp_path: Path) -> None:
    entries = {FOLDER + "a.wrapper.so": "code", FOLDER + "a.wrapper_metadata.json": METADATA}
    package = read_package(write(tmp_path / "net.pt2", entries))
    assert package.library == FOLDER + "a.wrapper.so"
    assert package.device == "cpu"
    assert package.metadata["AOTI_CPU_ISA"] == "AVX2"
    assert not package.is_program


@pytest.mark.parametrize(
    "beside",
    [FOLDER + "a.wrapper.json", FOLDER + "b.so", FOLDER + "a_serialized_weights.bin", "net/data/weights/w0"],
    ids=["operators outside of torch", "a second library", "weights", "weights as files"],
)
def test_a_library_that_needs_more_of_the_package_is_left_to_torch(tmp_path: Path, beside: str) -> None:
    package = read_package(write(tmp_path / "net.pt2", {FOLDER + "a.wrapper.so": "code", beside: ""}))
    assert package.library is None
    assert not package.is_program


@pytest.mark.parametrize(
    ("source", "checkable"),
    [
        ("if (arg_size[0] > 64) {", True),
        ("if (arg_size[0] < 20) {", True),
        ("if (arg_size[0] < 2) {", False),
        ("auto arg_size = arg.sizes();", False),  # an older torch writes no checks
    ],
)
def test_the_code_checks_its_inputs_unless_that_would_refuse_a_batch_of_one(
    tmp_path: Path, source: str, checkable: bool
) -> None:
    entries = {FOLDER + "a.wrapper.so": "code", FOLDER + "a.wrapper.cpp": source}
    assert (read_rules(read_package(write(tmp_path / "net.pt2", entries))) is None) is checkable


def test_inputs_are_not_checked_where_the_source_is_missing(tmp_path: Path) -> None:
    assert read_rules(read_package(write(tmp_path / "net.pt2", {FOLDER + "a.wrapper.so": "code"}))) == []


CHECKS = """
    ConstantHandle b = ConstantHandle(input_handles[1]);
    int32_t b_expected_dtype = aoti_torch_dtype_bool();
    ConstantHandle a = ConstantHandle(input_handles[0]);
    int32_t a_expected_dtype = aoti_torch_dtype_float32();
    if (a_size[0] < 2) {
    if (a_size[0] > 1024) {
    if (a_size[1] < 20) {
    if (64 != a_size[2]) {
    if (1 != a_stride[2]) {
    if (8 != buf0_size[0]) {
"""


def rules_of(package: str) -> list[InputRule]:
    rules = read_rules(read_package(package))
    assert rules is not None
    return rules


def test_the_rules_for_each_input_stand_in_the_source(tmp_path: Path) -> None:
    entries = {FOLDER + "a.wrapper.so": "code", FOLDER + "a.wrapper.cpp": CHECKS}
    first, second = rules_of(write(tmp_path / "net.pt2", entries))
    assert first == InputRule("float32", {0: 1, 1: 20, 2: 64}, {0: 1024, 2: 64}, {2: 1})
    assert (first.dimensions, second) == (3, InputRule("bool"))
    entries[FOLDER + "a.wrapper.cpp"] = CHECKS.replace("handles[0]", "handles[2]")  # one is missing
    assert read_rules(read_package(write(tmp_path / "net.pt2", entries))) == []


SIZES = """
    if (a_size[1] < 4) {
    if (b_size[0] < 5) {
    if (b_size[1] < 1) {
    if (b_size[2] < 20) {
    assert_size_stride(a, {s7, 2L*s7, 64L}, {128L*s7, 64L, 1L}, "input");
    assert_size_stride(b, {1L + 2L*s7, (-1L) + s7, s8, std::max(s7, 2L), s8}, {s8, 1L}, "input");
"""


def test_sizes_that_follow_from_a_free_one_are_bound_by_it(tmp_path: Path) -> None:
    entries = {FOLDER + "a.wrapper.so": "code", FOLDER + "a.wrapper.cpp": CHECKS + SIZES}
    first, second = rules_of(write(tmp_path / "net.pt2", entries))
    assert first.sizes == {0: LinearSize("s7"), 1: LinearSize("s7", 2)}
    assert second.sizes == {0: LinearSize("s7", 2, 1), 1: LinearSize("s7", 1, -1), 2: LinearSize("s8")}
    assert (first.least, second.least) == ({0: 1, 1: 2, 2: 64}, {0: 3, 1: 0, 2: 20})


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("s7, 1L", {0: 7}),
        ("64L*s7*s8, 64L*s8, 64L, 1L", {0: 64 * 56, 1: 64 * 8}),
        ("s8*(8L + 16L*s7), (-1L) + s8, static_cast<int64_t>(s7*s7), 1L", {0: 8 * 120, 1: 7, 2: 49}),
        ("s7, std::max(s7, 2L), s8", {0: 7}),
    ],
)
def test_strides_follow_from_free_sizes(tmp_path: Path, listed: str, expected: dict[int, int]) -> None:
    source = CHECKS + f'assert_size_stride(a, {{s7, s8, 64L}}, {{{listed}}}, "input");'
    entries = {FOLDER + "a.wrapper.so": "code", FOLDER + "a.wrapper.cpp": source}
    rule, _ = rules_of(write(tmp_path / "net.pt2", entries))
    assert {at: stride_of(one, {"s7": 7, "s8": 8}) for at, one in rule.free_strides.items()} == expected
    for formula in (*rule.free_strides.values(), ast.parse("s7 // 2", mode="eval").body):
        with pytest.raises(LookupError):
            stride_of(formula, {})


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def understate(path: Path, size: int) -> None:
    """Make a package state a size of 1 for each entry of that size."""
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", size), struct.pack("<I", 1)))


@pytest.mark.parametrize("states_size", [True, False])
@pytest.mark.parametrize("name", ["a.wrapper_metadata.json", "a.wrapper.cpp"])
@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_text_that_unpacks_to_more_than_a_compiler_writes_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: int, name: str, states_size: bool
) -> None:
    monkeypatch.setattr(package_module, "_MAX_SOURCE_BYTES", 1 << 20)
    path, size = tmp_path / "net.pt2", 30_000_000
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr(FOLDER + "a.wrapper.so", "code")
        file.writestr(FOLDER + name, b" " * size)
    if not states_size:
        understate(path, size)

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # its content does not fit the size that it states
            package = read_package(str(path))
            assert package.device == "unknown"
            assert read_rules(package) == []

    assert peak_bytes(read) < 10_000_000


def test_a_prediction_of_the_gil_reads_no_source(tmp_path: Path) -> None:
    path = write(
        tmp_path / "net.pt2", {FOLDER + "a.wrapper.so": "", FOLDER + "a.wrapper.cpp": " " * 20_000_000}
    )
    holds_gil(path, str(tmp_path))  # reads the installed torch once
    assert peak_bytes(lambda: holds_gil(path, str(tmp_path))) < 10_000_000


def test_a_directory_longer_than_any_is_refused_before_its_entries_are_kept(tmp_path: Path) -> None:
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, *[0] * 7, 1, *[0] * 6) + b"a"
    directory = entry * 100_000  # Python's reader does not stop at the count in the end record
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), 0, 0)
    (tmp_path / "net.pt2").write_bytes(directory + end)

    def read() -> None:
        with pytest.raises(RuntimeError, match=r"net\.pt2 is not a \.pt2 package .*directory is longer"):
            read_package(str(tmp_path / "net.pt2"))

    assert peak_bytes(read) < 1_000_000


def test_tells_an_exported_program(tmp_path: Path) -> None:
    assert read_package(write(tmp_path / "net.pt2", {"net/models/model.json": "{}"})).is_program


def test_metadata_that_is_no_object_counts_as_none(tmp_path: Path) -> None:
    entries = {FOLDER + "a.wrapper.so": "", FOLDER + "a.wrapper_metadata.json": "[]"}
    assert read_package(write(tmp_path / "net.pt2", entries)).device == "unknown"


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.pt2").write_text("text")
    with pytest.raises(RuntimeError, match=r"net\.pt2 is not a \.pt2 package"):
        read_package(str(tmp_path / "net.pt2"))


def damaged(path: Path, name: str, text: str) -> str:
    """A package in which one more entry is compressed, and its bytes are no deflate."""
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, text)
        entry = file.getinfo(name)
    start = entry.header_offset + 30 + len(name)
    whole = bytearray(path.read_bytes())
    whole[start : start + entry.compress_size] = b"\xff" * entry.compress_size
    path.write_bytes(whole)
    return str(path)


def test_a_note_that_does_not_unpack_makes_a_damaged_package(tmp_path: Path) -> None:
    write(tmp_path / "net.pt2", {FOLDER + "a.wrapper.so": "code"})
    path = damaged(tmp_path / "net.pt2", FOLDER + "a.wrapper_metadata.json", METADATA)
    with pytest.raises(RuntimeError, match=r"net\.pt2 is not a \.pt2 package"):
        read_package(path)
    assert not holds_gil(path, str(tmp_path))


def test_a_library_that_does_not_unpack_leaves_nothing_behind(tmp_path: Path) -> None:
    package = read_package(damaged(tmp_path / "net.pt2", FOLDER + "a.wrapper.so", "code"))
    with pytest.raises(RuntimeError, match="is damaged"):
        extracted_library(package, tmp_path / "libraries")
    assert list((tmp_path / "libraries").iterdir()) == []


def test_a_second_extraction_finds_the_first(tmp_path: Path) -> None:
    package = read_package(write(tmp_path / "net.pt2", {FOLDER + "a.wrapper.so": "code"}))
    first = extracted_library(package, tmp_path / "libraries")
    written = first.stat().st_mtime_ns
    assert extracted_library(package, tmp_path / "libraries") == first
    assert (first.read_text(), first.stat().st_mtime_ns) == ("code", written)


def test_a_damaged_library_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    package = read_package(write(path, {FOLDER + "a.wrapper.so": "code"}))
    path.write_bytes(path.read_bytes().replace(b"code", b"c0de", 1))
    with pytest.raises(RuntimeError, match="is damaged"):
        extracted_library(package, tmp_path / "libraries")
    assert list((tmp_path / "libraries").iterdir()) == []


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
