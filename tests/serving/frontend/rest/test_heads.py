"""What heads say, and which are remembered by their bytes."""

import pytest

from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.frontend.authorisation import RestPort, Surfaces
from torchere.serving.frontend.rest import heads as module
from torchere.serving.frontend.rest.browser_guard import BrowserGuard
from torchere.serving.frontend.rest.errors import BadMessage
from torchere.serving.frontend.rest.heads import CHUNKED, MAX_KNOWN_HEADS, Head, HeadReader, Heads

LINE = b"POST /predictions/echo HTTP/1.1"
MAX_BODY_BYTES = 1000
BYTES = LINE + b"\r\nHost: x\r\nContent-Length: 3\r\n\r\n"


@pytest.fixture
def heads() -> Heads:
    surfaces: Surfaces = frozenset({"inference"})
    guard = BrowserGuard(surfaces, ServerSettings())
    return Heads(RestPort(surfaces, authorizes=True), MAX_BODY_BYTES, guard, speaks_tensors=True)


def read(heads: Heads, text: bytes, size: int = 100_000) -> Head:
    """The head, which comes in pieces of that size."""
    reader = HeadReader()
    for start in range(0, len(text), size):
        end = reader.feed(b"\n\n" + text[start : start + size], 2)
        if end >= 0:
            return heads.read(reader)
    raise AssertionError("it has no end")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100_000])
def test_a_head_is_read_in_pieces_of_any_size_up_to_its_end(heads, size):
    head = read(heads, BYTES + b"abc", size)
    assert (head.text, head.length, head.request_line) == (BYTES, 3, LINE)
    assert head.headers == [(b"Host", b"x"), (b"Content-Length", b"3")]


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("rest", [b"Host: x\r\n\r\n", b"Host: x\r\n", b"\n\n\r\n", b""])
def test_a_head_that_ends_earlier_for_the_parser_is_refused_in_pieces_of_any_size(size, rest):
    reader, text = HeadReader(), b"CONNECT \n\r\n" + rest
    with pytest.raises(BadMessage):
        for start in range(0, len(text), size):
            reader.feed(text[start : start + size], 0)


@pytest.mark.parametrize(
    ("asked", "logged"),
    [
        (
            b"url=https%3A%2F%2Fb%2Fm.mar%3FX-Amz-Signature%3D0f%26a%3Db&model_name=m",
            b"url=https://b/m.mar&model_name=m",
        ),
        (
            b"model_name=m&url=https://b/m.mar%3fsig=0f;handler=h",
            b"model_name=m&url=https://b/m.mar;handler=h",
        ),
        (b"url=https://b/m.mar?a=b&X-Amz-Signature=0f", b"url=https://b/m.mar"),  # not encoded
        (b"url=https://b/%C3%A9%0a.mar?sig=0f", b"url=https://b/%C3%A9%0A.mar"),
        (b"url=https%3A%2F%2Fb%2Fm.mar&batch_size=1", b"url=https%3A%2F%2Fb%2Fm.mar&batch_size=1"),
        (b"url=a%3Fb.mar&curl=c?d", b"url=a%3Fb.mar&curl=c?d"),  # a file of the store
    ],
)
def test_the_access_log_shows_a_url_without_its_query(heads, asked, logged):
    head = read(heads, b"POST /models?%b HTTP/1.1\r\nHost: x\r\n\r\n" % asked)
    assert head.request_line == b"POST /models?%b HTTP/1.1" % logged
    assert head.place.query == asked


def test_of_two_headers_of_one_name_the_first_counts(heads):
    lines = b"Origin: one\r\ncontent-type: a/b\r\nORIGIN: two\r\nContent-Type: c/d\r\nHost"
    head = read(heads, BYTES.replace(b"Host", lines))
    assert (head.origin, head.content_type) == (b"one", "a/b")


@pytest.mark.parametrize(("second", "counts"), [("two", None), ("", None), ("one", "one")])
def test_of_two_different_keys_none_counts(heads, second, counts):
    lines = f"Authorization: one\r\nAUTHORIZATION: {second}\r\nHost".encode()
    assert read(heads, BYTES.replace(b"Host", lines)).authorization == counts


@pytest.mark.parametrize(
    "text",
    [
        BYTES.replace(b"Content-Length: 3", b"Transfer-Encoding: gzip"),
        BYTES.replace(b"Content-Length: 3", b"Transfer-Encoding: gzip\r\nConnection: Upgrade\r\nUpgrade: x"),
        BYTES.replace(b"Content-Length: 3", b"Content-Length: 3\r\nTransfer-Encoding: chunked"),
        BYTES.replace(b"Content-Length: 3", b"Content-Length: 3\r\nContent-Length: 3"),
        BYTES.replace(b"Host: x\r\n", b"Host: x\n"),
        BYTES.replace(b"/predictions/echo", b"http://x"),
        BYTES.replace(b"Host: x", b"Host : x"),
        BYTES.replace(b"Host: x", b"Host: x\r\n folded"),
    ],
)
def test_a_head_of_which_two_readers_might_make_two_things_is_refused(heads, text):
    with pytest.raises(BadMessage):
        read(heads, text)


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"Host: x\r\nhost: x\r\n",
        b"Host: a b\r\n",
        b"Host: a, b\r\n",
        b"Host: a/b\r\n",
        b"Host: user@a\r\n",
        b"Host: a:b\r\n",
        b"Host: a:1:2\r\n",
        b"Host: [::1\r\n",
        b"Host: a\xe4\r\n",
        b"Host: %zz\r\n",
    ],
)
def test_a_request_of_http_1_1_needs_one_valid_host(heads, lines):
    with pytest.raises(BadMessage):
        read(heads, BYTES.replace(b"Host: x\r\n", lines))


@pytest.mark.parametrize(
    "host", [b"", b"localhost", b"a_b.c-d:8080", b"10.0.0.1:80", b"[::1]:8080", b"[fe80::1%25eth0]", b"x:"]
)
def test_a_host_is_a_name_or_an_address_and_may_have_a_port(heads, host):
    assert read(heads, BYTES.replace(b"Host: x", b"Host: " + host)).host == host


def test_a_request_of_http_1_0_needs_no_host_but_has_at_most_one(heads):
    old = BYTES.replace(b"HTTP/1.1", b"HTTP/1.0")
    assert read(heads, old.replace(b"Host: x\r\n", b"")).host == b""
    with pytest.raises(BadMessage):
        read(heads, old.replace(b"Host: x\r\n", b"Host: x\r\nHost: y\r\n"))


@pytest.mark.parametrize("version", [b"0.9", b"1.2", b"2.0", b"3.0"])
def test_a_head_of_another_version_is_refused(heads, version):
    with pytest.raises(BadMessage):
        read(heads, BYTES.replace(b"HTTP/1.1", b"HTTP/" + version))


@pytest.mark.parametrize("coding", [b"chunked", b"Chunked "])
def test_a_body_in_chunks_has_no_length(heads, coding):
    head = read(heads, BYTES.replace(b"Content-Length: 3", b"Transfer-Encoding: " + coding))
    assert head.length == CHUNKED


def test_of_many_zeros_before_a_length_no_more_count_than_a_length_has_digits(heads):
    assert read(heads, BYTES.replace(b"3", b"0" * 5000 + b"3")).length == 3


def test_a_head_that_came_before_is_remembered_by_its_bytes(heads):
    head = read(heads, BYTES + b"one")
    assert heads.known == {BYTES: head}


@pytest.mark.parametrize(
    "text",
    [
        BYTES.replace(b"predictions/echo", b"ping"),
        BYTES.replace(b"POST", b"OPTIONS"),
        BYTES.replace(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
        BYTES.replace(b"3", b"%d" % (MAX_BODY_BYTES + 1)),
        BYTES.replace(b"Host", b"Expect: 100-continue\r\nHost"),
        BYTES.replace(b"Host: x", b"Host: " + b"x" * module.MAX_KNOWN_BYTES),
        BYTES.replace(b"Host", b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01\r\nHost"),
        BYTES.replace(b"predictions/echo", b"v2/models/echo/infer").replace(
            b"Host", b"Inference-Header-Content-Length: many\r\nHost"
        ),
    ],
    ids=[
        "no prediction",
        "OPTIONS",
        "chunks",
        "too long a body",
        "expecting",
        "too long a head",
        "in a trace",
        "not well-formed",
    ],
)
def test_a_head_that_needs_more_than_its_body_is_not_remembered(heads, text):
    read(heads, text)
    assert heads.known == {}


def test_so_many_are_remembered_and_no_more(heads):
    for number in range(2 * MAX_KNOWN_HEADS + 1):
        read(heads, BYTES.replace(b"x", b"%d" % number))
    assert len(heads.known) == 1
