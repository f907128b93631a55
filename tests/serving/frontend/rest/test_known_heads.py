"""What is kept of heads, and what is not, because the parser might see another head in the same bytes."""

import pytest

from torchere.serving.frontend.rest import known_heads
from torchere.serving.frontend.rest.codec import Head
from torchere.serving.frontend.rest.known_heads import DirectHead, DirectTarget, KnownHeads
from torchere.serving.frontend.rest.open_inference_wire import Wire
from torchere.serving.frontend.rest.targets import Target
from torchere.serving.telemetry.trace_context import TraceContext

LINE = b"POST /predictions/echo HTTP/1.1"
BYTES = LINE + b"\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
READ = DirectHead(DirectTarget(Target("echo"), "echo", None), Head(length=3), Wire(), (), None, LINE, True)


@pytest.fixture
def heads():
    return KnownHeads()


def test_a_head_that_came_before_is_found_with_its_body(heads):
    heads.keep(BYTES + b"one", READ)
    assert heads.find(BYTES + b"two") == (READ, b"two")


@pytest.mark.parametrize(
    "data", [BYTES, BYTES + b"tw", BYTES + b"two" + BYTES, BYTES[:-1], b"", b"\r\n" + BYTES + b"two"]
)
def test_other_than_one_whole_request_is_for_the_parser(heads, data):
    heads.keep(BYTES + b"one", READ)
    assert heads.find(data) is None


def test_a_head_that_differs_in_a_byte_is_another(heads):
    heads.keep(BYTES + b"one", READ)
    assert heads.find(BYTES.replace(b"Host", b"host") + b"two") is None


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n" + BYTES,
        BYTES.replace(b"Host: x\r\n", b"Host: x\n"),
        BYTES.replace(b"Host: x", b"Host: " + b"x" * known_heads.MAX_HEAD_BYTES),
        BYTES[:-2],
    ],
    ids=["blank lines before it", "a bare line feed", "too long", "not whole"],
)
def test_a_head_is_not_kept_when_its_end_is_not_certain(heads, data):
    heads.keep(data, READ)
    assert heads.find(data + b"one") is None
    assert heads.find(BYTES + b"one") is None
    assert heads.find(known_heads.HEAD_END + b"one") is None


def test_a_head_of_a_trace_is_not_kept(heads):
    heads.keep(BYTES, READ._replace(trace=TraceContext("1" * 32, "2" * 16, True)))
    assert heads.find(BYTES + b"one") is None


def test_so_many_are_kept_and_no_more(heads):
    for number in range(2 * known_heads.MAX_HEADS + 1):
        heads.keep(BYTES.replace(b"x", b"%d" % number), READ)
    assert len(heads._heads) == 1
