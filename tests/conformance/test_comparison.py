"""The comparison finds what differs, and lets pass what may."""

from typing import Any

import pytest
from conformity.comparison import differences, exposed, families


@pytest.mark.parametrize(
    ("want", "got"),
    [
        ({"a": 1}, {"a": 1}),
        ({"a": [0.5, "x"]}, {"a": [0.5 + 1e-9, "x"]}),
        ({"pid": 4711}, {"pid": 12}),
        ({"a": 1}, {"a": 1, "ours": {"b": 2}}),
        ({}, {"a": None}),
    ],
)
def test_equal_answers_have_no_differences(want: Any, got: Any) -> None:
    assert list(differences(want, got, {"ours"})) == []


@pytest.mark.parametrize(
    ("want", "got", "line"),
    [
        ({"a": 1}, {}, "body.a is missing"),
        ({}, {"a": 1}, "body.a was not recorded"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "body.a.b is 2, recorded 1"),
        ([1, 2], [1], "body has 1 items, recorded 2"),
        ([0.5], [0.6], "body[0] is 0.6, recorded 0.5"),
        ({"a": True}, {"a": 1}, "body.a is 1, recorded True"),
        ({"pid": 4711}, {"pid": "4711"}, "body.pid is '4711', recorded 4711: another type"),
        ("text", b"text", "body is b'text', recorded 'text'"),
    ],
)
def test_a_difference_is_said_with_its_place(want: Any, got: Any, line: str) -> None:
    assert list(differences(want, got)) == [line]


def test_the_families_of_an_exposition_are_those_it_declares() -> None:
    assert families('# HELP a text\n# TYPE a counter\na{b="c",} 1.0\n# TYPE d gauge\n') == {"a", "d"}


def test_what_queries_rely_on_are_the_names_the_types_the_texts_and_the_labels() -> None:
    histogram = '# HELP h text\n# TYPE h histogram\nh_bucket{m="x",le="1.0",} 2.0\nh_sum{m="x",} 0.5\n'
    gauge = "# TYPE g gauge\ng 1.0\n"

    assert exposed(histogram + gauge) == {
        "h": (["# HELP h text", "# TYPE h histogram"], ["h_bucket{m,le}", "h_sum{m}"]),
        "g": (["# TYPE g gauge"], ["g{}"]),
    }
