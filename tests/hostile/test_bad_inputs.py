"""The page of bad inputs is current, and each of its rows names a test that exists, or a reason."""

from __future__ import annotations

from hostile.bad_inputs import PAGE, Row, Section, page, problems, sections


def test_every_row_has_tests_that_exist_or_a_reason() -> None:
    assert list(problems(sections())) == []


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(sections()), "run: python tests/hostile/bad_inputs.py"


def test_a_row_without_a_test_or_with_one_that_is_not_there_is_told() -> None:
    rows = (Row("H1", "x"), Row("H2", "y", "z", ("tests/hostile/test_bad_inputs.py::test_no",)))
    found = list(problems([Section("H", "HTTP", rows)]))
    assert "HTTP, H1: neither a test nor a reason for having none" in found
    assert "HTTP, H2: there is no test tests/hostile/test_bad_inputs.py::test_no" in found
    assert "H3 is missing" in found
