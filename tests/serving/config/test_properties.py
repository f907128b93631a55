"""The grammar is that of java.util.Properties; the expected values follow its documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.config.properties import (
    MAX_FILE_BYTES,
    ConfigurationError,
    Entry,
    parse_properties,
    read_properties,
    substitute,
)


def pairs(text: str) -> list[tuple[str, str]]:
    return [(entry.key, entry.value) for entry in parse_properties(text)]


@pytest.mark.parametrize(
    "line",
    ["key=value", "key:value", "key value", "  key = value", "key\t:\tvalue", "key\fvalue", "key   value"],
)
def test_any_separator_parts_key_and_value(line: str) -> None:
    assert pairs(line) == [("key", "value")]


def test_only_the_first_separator_counts_and_trailing_blanks_stay() -> None:
    assert pairs("a==b: c  ") == [("a", "=b: c  ")]


def test_a_key_alone_has_an_empty_value() -> None:
    assert pairs("cheeses\nempty=") == [("cheeses", ""), ("empty", "")]


def test_comments_and_blank_lines_are_left_out() -> None:
    assert pairs("# one\n\n   ! two\n \t\na=1 # part of it") == [("a", "1 # part of it")]


def test_a_continued_line_loses_its_leading_blanks_only() -> None:
    assert pairs("fruits  apple, banana, \\\n      pear \\\n  # and more") == [
        ("fruits", "apple, banana, pear # and more")
    ]


def test_a_comment_is_never_continued() -> None:
    assert pairs("# comment \\\na=1") == [("a", "1")]


def test_an_even_number_of_backslashes_does_not_continue() -> None:
    assert pairs("a=1\\\\\nb=2") == [("a", "1\\"), ("b", "2")]


def test_a_backslash_at_the_end_of_the_file_is_dropped() -> None:
    assert pairs("a=1\\") == [("a", "1")]


def test_escapes_are_javas() -> None:
    assert pairs(r"a\ b\:c\=d=\t\n\u00e9\ud83d\ude00\z\\") == [("a b:c=d", "\t\né😀z\\")]


def test_all_three_line_ends_count_and_others_do_not() -> None:
    assert pairs("a=1\r\nb=2\rc=3\nd=4\x0b\x85\u2028") == [
        ("a", "1"),
        ("b", "2"),
        ("c", "3"),
        ("d", "4\x0b\x85\u2028"),
    ]


def test_a_comment_below_a_lone_continuation_is_one() -> None:
    assert pairs("\\\n# x=1\n\\\n\n  b=2\nc=3,\\\n# 4") == [("b", "2"), ("c", "3,# 4")]


def test_an_entry_knows_the_first_line_it_stands_on() -> None:
    assert [entry.line for entry in parse_properties("\n# x\na=1,\\\n 2\nb=3")] == [3, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ok=1\n=value", "line 2: found '=value', expected key=value"),
        ("a=\\u12", "line 1: malformed escape: expected \\u and four hex digits"),
        ("a=\\ud83d", "line 1: malformed escape: half of a surrogate pair"),
        ("a=\\u0000", "line 1: found a NUL character; expected text"),
    ],
)
def test_a_mistake_is_an_error_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_properties(text)
    assert str(caught.value) == message


def escaped(text: str) -> str:
    units = text.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(key=PLAIN.filter(bool), value=PLAIN)
def test_whatever_is_escaped_comes_back(key: str, value: str) -> None:
    assert pairs(f"{escaped(key)}={escaped(value)}") == [(key, value)]


@given(st.text())
def test_any_text_parses_or_is_refused_with_a_line(text: str) -> None:
    try:
        entries = parse_properties(text)
    except ConfigurationError as err:
        assert str(err).startswith("line ")
    else:
        assert all(entry.key and entry.line >= 1 for entry in entries)


def test_a_file_is_read_as_utf_8_with_or_without_its_mark(tmp_path: Path) -> None:
    file = tmp_path / "config.properties"
    file.write_bytes(b"\xef\xbb\xbfmodel_store=/caf\xc3\xa9\r\n")
    assert read_properties(file) == (Entry("model_store", "/café", 1),)


def test_another_encoding_is_refused_with_line_and_byte(tmp_path: Path) -> None:
    file = tmp_path / "config.properties"
    file.write_bytes(b"a=1\nmodel_store=/caf\xe9\n")
    with pytest.raises(ConfigurationError, match="line 2: byte 0xe9 is not UTF-8; save the file as UTF-8"):
        read_properties(file)


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.properties"
    with file.open("wb") as opened:
        opened.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ConfigurationError, match=f"over {MAX_FILE_BYTES} bytes"):
        read_properties(file)


def test_a_file_that_can_not_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Is a directory"):
        read_properties(tmp_path)


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.properties"
    file.write_text("=1")
    with pytest.raises(ConfigurationError, match=r"config\.properties: line 1: "):
        read_properties(file)


def test_placeholders_take_their_values_from_the_environment() -> None:
    entry = Entry("inference_address", "http://$$HOST$$:$$PORT$$", 1)
    assert substitute(entry, {"HOST": "0.0.0.0", "PORT": "80"}) == "http://0.0.0.0:80"


def test_a_placeholder_is_filled_in_once_and_single_dollars_stay() -> None:
    assert substitute(Entry("a", "$x$$A$$ $$", 1), {"A": "$$B$$"}) == "$x$$B$$ $$"


@pytest.mark.parametrize("name", ["MY-STORE", "my.store"])
def test_a_placeholder_may_name_any_variable(name: str) -> None:
    assert substitute(Entry("a", f"x$${name}$$", 1), {name: "store"}) == "xstore"


def test_a_placeholder_without_variable_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="Invalid Environment Variable NOPE: a needs it"):
        substitute(Entry("a", "$$NOPE$$", 7), {})
