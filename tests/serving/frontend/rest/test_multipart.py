import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend.rest.codec import MAX_PARTS, MAX_SEMICOLONS, multipart_parameters
from torchere.serving.types import Parameter

TYPE = "multipart/form-data; boundary=xyz"


def part(disposition: str, body: bytes, *headers: str) -> bytes:
    head = "\r\n".join([f"Content-Disposition: form-data; {disposition}", *headers])
    return b"--xyz\r\n" + head.encode() + b"\r\n\r\n" + body + b"\r\n"


def test_each_part_is_a_parameter_and_only_files_have_a_type():
    body = (
        part('name="data"; filename="p.png"', b"\x89PNG", "Content-Type: image/png; x=1")
        + part('name="text"', b"hello", "Content-Type: text/plain")
        + b"--xyz--\r\n"
    )
    assert multipart_parameters(TYPE, body) == [
        Parameter("data", b"\x89PNG", "image/png"),
        Parameter("text", b"hello", ""),
    ]


def test_the_headers_of_a_part_come_in_any_order():
    body = b'--xyz\r\nContent-Type: a/b\r\ncontent-disposition: form-data; name="x"; filename="f"\r\n\r\n\r\n'
    assert multipart_parameters(TYPE, body + b"--xyz--") == [Parameter("x", b"", "a/b")]


def test_a_file_that_names_no_type_is_octets():
    body = part('name="data"; filename="p"', b"1") + b"--xyz--\r\n"
    assert multipart_parameters(TYPE, body) == [Parameter("data", b"1", "application/octet-stream")]


def test_a_file_may_have_an_extended_name_only():
    named = part("name=\"data\"; filename*=UTF-8''%C3%A4.json", b"{}", "Content-Type: application/json")
    assert multipart_parameters(TYPE, named + b"--xyz--") == [Parameter("data", b"{}", "application/json")]


@pytest.mark.parametrize("encoding", ["base64", "BASE64 ", "quoted-printable", "x" * 1000, ""])
def test_an_encoded_file_is_refused(encoding):
    header = f"Content-Transfer-Encoding: {encoding}"
    body = part('name="data"; filename="p"', b"aGk=", header) + b"--xyz--"
    with pytest.raises(InvalidRequest, match=r"^A file .{,200}; expected binary, 7bit, 8bit, or none$"):
        multipart_parameters(TYPE, body)
    assert multipart_parameters(TYPE, part('name="data"', b"aGk=", header) + b"--xyz--")[0].value == b"aGk="


@pytest.mark.parametrize("encoding", ["7bit", "8bit", "binary", "Binary"])
def test_a_file_may_say_that_it_is_not_encoded(encoding):
    body = part('name="data"; filename="p"', b"hi", f"Content-Transfer-Encoding: {encoding}") + b"--xyz--"
    assert multipart_parameters(TYPE, body)[0].value == b"hi"


def test_a_value_may_hold_line_breaks_and_what_looks_like_a_boundary():
    value = b"a\r\n--xy\r\n--x\r\n\r\n"
    body = part('name="a"', value) + b"--xyz--"
    assert multipart_parameters(TYPE, body) == [Parameter("a", value)]


@pytest.mark.parametrize(
    "disposition", ['name="image "', 'name=" image"; filename="f"', "name*=utf-8''%20image"]
)
def test_blanks_around_names_are_dropped(disposition):
    assert multipart_parameters(TYPE, part(disposition, b"1") + b"--xyz--")[0].name == "image"


def test_names_may_be_utf8():
    body = part('name="naïve"', b"1") + b"--xyz--"
    assert multipart_parameters(TYPE, body)[0].name == "naïve"


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ("name*=utf-8''n%C3%A4me", "näme"),
        ("NAME*=UTF-8'de'n%C3%A4me; filename=\"f\"", "näme"),
        ("filename=\"a\\\"; name*=utf-8''b\"; name*=utf-8''n%C3%A4me", "näme"),
        ("name*=utf-8''other; name=plain", "plain"),  # as TorchServe reads it
        ("name=\"\"; name*=utf-8''other", ""),
    ],
)
def test_a_name_beyond_ascii_may_come_as_aiohttp_writes_it(disposition, name):
    assert multipart_parameters(TYPE, part(disposition, b"1") + b"--xyz--")[0].name == name


@pytest.mark.parametrize(
    "disposition",
    [
        *("name*=iso-8859-1''%E4", "name*=n%C3%A4me", "name*0*=utf-8''n", "filename*=utf-8''n"),
        *("x=\"; name*=utf-8''n\"", "x=\"; name*=utf-8''n", "x=\"; name*=utf-8''n\\"),
    ],
)
def test_another_name_than_that_is_refused_with_what_was_expected(disposition):
    with pytest.raises(InvalidRequest, match=r"no name .*; expected name=\"NAME\" \(or name\*=utf-8''NAME\)"):
        multipart_parameters(TYPE, part(disposition, b"1") + b"--xyz--")


@pytest.mark.parametrize(
    ("content_type", "body", "cause"),
    [
        ("multipart/form-data", b"", "needs a boundary"),
        (TYPE, b"", "ends before its closing boundary"),
        (TYPE, part('name="a"', b"1"), "ends before its closing boundary"),
        (TYPE, b"--other\r\n\r\n", "broken: .*; expected parts between the boundaries"),
        (TYPE, b'--xyz\r\nContent-Disposition: form-data; filename="a"\r\n\r\nb\r\n--xyz--', "has no name"),
        (TYPE, b"--xyz\r\n\r\nb\r\n--xyz--", "has no name"),
        (TYPE, part('name="a"', b"1", "X-Long: " + "a" * 5000) + b"--xyz--", "broken"),
        (TYPE, part('name="a"', b"1", *["X-Many: 1"] * 40) + b"--xyz--", "broken"),
        (TYPE, part('name="a"', b"1") * (MAX_PARTS + 1) + b"--xyz--", f"more than {MAX_PARTS} parts"),
        (TYPE, part('name="a"', b"\r\n--xyz!" * 1001) + b"--xyz--", f"more than {MAX_PARTS} parts"),
    ],
)
def test_what_is_broken_or_too_much_is_refused_with_its_cause(content_type, body, cause):
    with pytest.raises(InvalidRequest, match=cause):
        multipart_parameters(content_type, body)


@pytest.mark.parametrize("before", [b"", b"\r\n"])
def test_as_many_parts_as_may_be_are_read(before):
    body = before + part('name="a"', b"1") * MAX_PARTS + b"--xyz--\r\n"
    assert multipart_parameters(TYPE, body) == [Parameter("a", b"1")] * MAX_PARTS


def test_nobody_can_fill_the_log_with_bad_bodies(caplog):
    with pytest.raises(InvalidRequest, match="broken"):
        multipart_parameters(TYPE, b"--xyz\r\nContent Disposition: form-data\r\n\r\nb\r\n--xyz--")
    assert not caplog.records


@given(st.binary(max_size=400))
def test_garbage_is_refused_or_read_and_nothing_else(body):
    try:
        found = multipart_parameters(TYPE, b"--xyz\r\n" + body)
    except InvalidRequest:
        return
    assert all(isinstance(one, Parameter) for one in found)


@given(st.lists(st.tuples(st.binary(max_size=50)), max_size=5), st.data())
def test_a_good_body_with_one_byte_changed_is_refused_or_read(values, data):
    good = b"".join(part(f'name="n{i}"', v) for i, (v,) in enumerate(values)) + b"--xyz--"
    place = data.draw(st.integers(0, len(good) - 1))
    bad = good[:place] + bytes([data.draw(st.integers(0, 255))]) + good[place + 1 :]
    try:
        assert isinstance(multipart_parameters(TYPE, bad), list)
    except InvalidRequest as refused:
        assert str(refused)


@given(st.text(max_size=60))
def test_any_content_type_is_refused_or_read(text):
    try:
        assert isinstance(multipart_parameters(f"multipart/form-data; {text}", b"--x--"), list)
    except InvalidRequest as refused:
        assert str(refused)


@pytest.mark.parametrize("more", ["; a=b" * MAX_SEMICOLONS, '; filename="%s"' % (";" * MAX_SEMICOLONS)])
def test_a_header_of_many_parameters_is_refused(more):
    body = part(f'name="a"{more}', b"1") + b"--xyz--"
    with pytest.raises(InvalidRequest, match="more than 64 semicolons"):
        multipart_parameters(TYPE, body)


def test_a_content_type_of_many_parameters_is_refused():
    with pytest.raises(InvalidRequest, match="more than 64 semicolons"):
        multipart_parameters(TYPE + "; a=b" * MAX_SEMICOLONS, part('name="a"', b"1") + b"--xyz--")


def test_a_filename_may_hold_some_semicolons():
    body = part('name="a"; filename="1;2;3.png"', b"1") + b"--xyz--"
    assert [one.name for one in multipart_parameters(TYPE, body)] == ["a"]
