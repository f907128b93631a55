"""Names of handlers in C++, and what the bytes of a library say of it; nothing is compiled here."""

import pytest

from torchere.handlers.cpp import SUFFIX, CppHandlerName, cpp_handler_name, problem_of

STAMP = b"torchere handler, interface 1, torch 2.13.0\0"
FUNCTIONS = b"\0allocatorMine\0deleterMine\0allocatorHalf\0_ZNSaI9allocatorIcE\0"
MINE = CppHandlerName("libmine.so", "Mine")


@pytest.mark.parametrize(
    ("handler", "runtime", "name"),
    [
        ("libmine:Mine", "LSP", (f"libmine{SUFFIX}", "Mine")),
        (f"build/libmine{SUFFIX}:Mine", "LSP", (f"libmine{SUFFIX}", "Mine")),
        ("../../usr/lib/libmine:Mine", "LSP", (f"libmine{SUFFIX}", "Mine")),
        ("libmine:Mine", "python", None),
        ("TorchScriptHandler", "LSP", None),
    ],
)
def test_a_class_in_a_library_of_the_archive_is_named_by_both(
    handler: str, runtime: str, name: tuple[str, str] | None
) -> None:
    assert cpp_handler_name(handler, runtime) == name


@pytest.mark.parametrize(
    ("library", "torch", "problem"),
    [
        (STAMP + FUNCTIONS, "2.13.1+cu130", ""),
        (FUNCTIONS, "2.13.0", "libmine.so was compiled for TorchServe's C++ backend"),
        (STAMP.replace(b"e 1", b"e 2") + FUNCTIONS, "2.13.0", "headers of another release of torchere"),
        (STAMP + FUNCTIONS, "2.1.0", "was compiled with torch 2.13, and here is torch 2.1.0"),
        (STAMP + FUNCTIONS.replace(b"deleterMine", b"deleterHalf"), "2.13.0", "classes that have them: Half"),
        (STAMP, "2.13.0", "classes that have them: none"),
    ],
)
def test_a_library_that_a_worker_cannot_load_is_told_by_its_bytes(
    library: bytes, torch: str, problem: str
) -> None:
    found = problem_of(library, MINE, torch)
    assert problem in found
    assert bool(found) is bool(problem)
