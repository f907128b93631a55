import tracemalloc
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.rest import wire
from torchere.serving.frontend.rest.codec import (
    MAX_FIELDS,
    SHORT_TEXT_BYTES,
    SPELLED_HEADERS,
    _unquoted_long,
    body_parameters,
    deadline,
    form_parameters,
    request_headers,
    text_values,
)
from torchere.serving.types import Parameter


@pytest.mark.parametrize(
    ("content_type", "kept"),
    [
        ("application/json", "application/json"),
        ("application/json; charset=utf-8", "application/json"),
        ("Text/Plain", "Text/Plain"),
        ("image/png", "image/png"),
        ("", ""),
    ],
)
def test_any_body_but_a_form_is_one_parameter_with_the_type_of_the_request(content_type, kept):
    assert body_parameters(content_type, b"x") == (Parameter("body", b"x", kept),)


def test_an_empty_body_is_still_a_parameter():
    assert body_parameters("", b"") == (Parameter("body", b""),)


def test_a_form_gives_its_decoded_fields_in_order_and_without_types():
    found = body_parameters("application/x-www-form-urlencoded; charset=utf-8", b"b=two+words&a=%31&b=&c")
    assert found == (
        Parameter("b", b"two words"),
        Parameter("a", b"1"),
        Parameter("b", b""),
        Parameter("c", b""),
    )


def test_blanks_around_names_are_dropped_in_forms_and_kept_in_queries():
    body = b" image =1&+b%09= 2 &%20=3"
    found = body_parameters("application/x-www-form-urlencoded", body)
    assert found == (Parameter("image", b"1"), Parameter("b", b" 2 "), Parameter("", b"3"))
    assert [one.name for one in form_parameters(body)] == [" image ", " b\t", " "]


@pytest.mark.parametrize(
    "body", [b'{"instances": [{"data": "a+b&c=%41"}]}', b" \r\n{", b"{" + b"&" * MAX_FIELDS]
)
def test_an_object_that_says_it_is_a_form_is_json_where_json_is_spoken(body):
    found = body_parameters("application/x-www-form-urlencoded", body, speaks_json=True)
    assert found == (Parameter("body", body, "application/json"),)


@pytest.mark.parametrize(
    ("body", "speaks_json", "name"),
    [(b'{"a": 1}', False, '{"a": 1}'), (b"[1]", True, "[1]"), (b"a={}", True, "a"), (b"%7B%7D", True, "{}")],
)
def test_a_form_is_one_everywhere(body, speaks_json, name):
    found = body_parameters("application/x-www-form-urlencoded", body, speaks_json=speaks_json)
    assert found[0].name == name


def test_a_form_of_too_many_fields_is_refused():
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
        form_parameters(b"&" * MAX_FIELDS)


@given(st.binary(max_size=300))
def test_any_bytes_make_a_form(body):
    assert all(isinstance(one.value, bytes) for one in form_parameters(body))


def test_a_query_gives_the_first_value_of_a_name():
    assert text_values(b"a=1&a=2&b=%FF") == {"a": "1", "b": "�"}


def test_headers_are_in_the_spelling_of_the_client():
    scope = {"headers": [(b"x-test", b"1")], SPELLED_HEADERS: [(b"X-Test", b"1")]}
    assert request_headers(scope) == (("X-Test", "1"),)


def test_headers_are_latin_1():
    assert request_headers({SPELLED_HEADERS: [(b"x-test", b"\xe9")]}) == (("x-test", "é"),)


def test_a_timeout_becomes_a_deadline_once():
    assert deadline(b" 250 ", 10.0) == 10.25


@pytest.mark.parametrize("value", [b"0", b"-1", b"1.5", b"abc", b"", b"86400001", b"9" * 4000, b"\xb2"])
def test_a_timeout_that_is_no_sensible_number_is_refused(value):
    with pytest.raises(InvalidRequest, match="x-torchere-timeout-ms must be a whole number from 1"):
        deadline(value, 0.0)


@given(st.text("%aAfF09gZ+ \u00e4=", max_size=3 * SHORT_TEXT_BYTES))
def test_a_long_text_is_decoded_as_a_short_one(text):
    value = text.encode()
    assert _unquoted_long(value + b"%4") == unquote_to_bytes(value + b"%4")


def test_the_memory_of_decoding_a_form_is_in_proportion_to_its_length():
    body = b"a=" + b"%" * 1_000_000
    tracemalloc.start()
    try:
        form_parameters(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 12 * len(body)


def test_long_headers_of_a_handler_that_are_left_out_are_not_kept():
    wire._kept.clear()
    assert wire.handler_lines((("connection", "x" * 10_000),)) == b""
    assert wire._kept == {}
    assert wire.handler_lines((("n", "x"),)) == b"n: x\r\n"
    assert list(wire._kept) == [(("n", "x"),)]
