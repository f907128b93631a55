"""Which names may stand in an archive."""

from __future__ import annotations

import time

import pytest

from torchere.archiver.container.entries import first_clash, folded, problem_with


@pytest.mark.parametrize(
    "name",
    [
        *["model.pt", "MAR-INF/MANIFEST.json", "a b/ü.txt", "..a", "a..b/c", ".hidden", "x" * 255],
        "/".join(["d" * 127] * 8) + "d",
    ],
)
def test_ordinary_names_are_accepted(name: str) -> None:
    assert problem_with(name) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("../x", "'..'"),
        ("a/../b", "'..'"),
        ("/etc/passwd", "absolute"),
        ("C:/x", "absolute"),
        ("c:x", "absolute"),
        ("a\\b", "backslash"),
        ("a\0b", "NUL"),
        ("a\nb", "control"),
        ("a\udc80", "surrogate"),
        ("a//b", "empty or '.'"),
        ("./a", "empty or '.'"),
        ("a/.", "empty or '.'"),
        ("a/", "empty or '.'"),
        ("a. ", "dot or a space"),
        ("a./b", "dot or a space"),
        ("x" * 256, "longer"),
        ("ü" * 128, "longer"),
        ("a/" + "x" * 256, "longer"),
        ("/".join(["d" * 127] * 8) + "dd", "longer"),
    ],
)
def test_names_that_could_leave_or_confuse_are_refused(name: str, why: str) -> None:
    assert why in (problem_with(name) or "")


@pytest.mark.parametrize(
    ("one", "other"), [("A.py", "a.PY"), ("é", "e\u0301"), ("straße", "STRASSE"), ("É", "e\u0301")]
)
def test_names_that_are_one_file_on_some_system_fold_to_one(one: str, other: str) -> None:
    assert folded(one) == folded(other)


def test_a_file_and_a_folder_of_one_name_clash() -> None:
    assert first_clash(["a/b", "A"]) == ("A", "a/b")


def test_two_spellings_of_one_name_clash() -> None:
    assert first_clash(["Model.py", "x", "model.py"]) == ("Model.py", "model.py")


def test_names_side_by_side_do_not_clash() -> None:
    assert first_clash(["a/b", "a/c", "ab", "b"]) is None


def test_a_folder_clashes_also_where_a_like_name_sorts_between() -> None:
    assert first_clash(["a", "a-b", "a.txt", "a/b"]) == ("a", "a/b")


def test_deep_names_are_compared_in_a_time_that_their_length_allows() -> None:
    began_s = time.process_time()
    assert first_clash(["a/" * 20_000 + "x", "b/" * 20_000 + "x"]) is None
    assert time.process_time() - began_s < 0.5  # 3 s, were the name of every parent folder put together
