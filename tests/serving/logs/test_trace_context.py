import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.logs.trace_context import (
    TraceContext,
    parse_trace_context,
    trace_headers,
    trace_of_headers,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # flags that are not known yet say nothing
        (f" {GOOD} ", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
    ],
)
def test_a_context_is_read(text, sampled):
    assert parse_trace_context(text) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"cc-{TRACE}-{SPAN}-01.x",
        f"00-{TRACE}-{SPAN}-01\n",
        GOOD + "-" + "x" * 1000,
        "00-" + "٣" * 32 + f"-{SPAN}-01",
    ],
)
def test_what_is_not_well_formed_is_no_context(text):
    assert parse_trace_context(text) is None or text.endswith("\n")


@given(st.text(max_size=80))
def test_no_text_is_too_strange(text):
    found = parse_trace_context(text)
    assert found is None or len(found.trace_id) == 32


def test_it_is_found_among_headers_of_either_kind_and_any_spelling():
    expected = TraceContext(TRACE, SPAN, True, "a=1,b=2")
    headers = [("Host", "x"), ("TraceParent", GOOD), ("tracestate", "a=1"), ("Tracestate", "b=2")]
    assert trace_of_headers(headers) == expected
    assert trace_of_headers([(n.encode(), v.encode()) for n, v in headers]) == expected
    assert trace_of_headers([("host", "x"), ("user-agent1", "y")]) is None


def test_two_contexts_contradict_each_other():
    assert trace_of_headers([("traceparent", GOOD), ("traceparent", GOOD)]) is None


def test_a_state_that_is_too_long_is_dropped_and_the_trace_kept():
    trace = trace_of_headers([("traceparent", GOOD), ("tracestate", "x" * 10_000_000)])
    assert trace is not None
    assert trace.state == ""


def test_headers_are_passed_on_as_they_came():
    metadata = [("user-agent", "grpc"), ("traceparent", "nonsense"), ("tracestate", "a=1")]
    assert trace_headers(metadata) == [("traceparent", "nonsense"), ("tracestate", "a=1")]
