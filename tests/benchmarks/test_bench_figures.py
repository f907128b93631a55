"""The arithmetic of `torchere bench`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.commands.bench import LOST, Tally, percentile, progress, refusal_text, report

HUNDRED = [float(number) for number in range(1, 101)]


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 50.0), (90, 90.0), (99, 99.0), (100, 100.0), (0.1, 1.0)]
)
def test_a_percentile_is_the_nearest_rank(percent: float, expected: float):
    assert percentile(HUNDRED, percent) == expected


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.1, 100))
def test_at_least_that_share_of_the_values_does_not_exceed_a_percentile(values: list[float], percent: float):
    found = percentile(sorted(values), percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100 - 1e-9


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_a_percentile_of_nothing_is_refused(values: list[float], percent: float):
    with pytest.raises(ValueError, match="expected some"):
        percentile(values, percent)


def test_the_report_counts_answers_with_a_2xx_only():
    tally = Tally()
    for latency_s in (0.001, 0.002, 0.003, 0.004):
        tally.add(200, latency_s)
    tally.add(429, 0.0001)
    tally.add(429, 0.0001)
    tally.add(LOST, 0.5)
    assert report(tally, 2.0, 8).splitlines() == [
        "2.0 req/s   (4 answers in 2.0 s, 8 clients)",
        "p50 2.00 ms   p90 4.00 ms   p99 4.00 ms   max 4.00 ms",
        "1 x no answer (connection lost)",
        "2 x status 429",
    ]


def test_the_report_groups_failures_by_what_was_said():
    tally = Tally()
    for body in (b'{"code": 429, "message": "The queue is full."}', b"", b'{"error": "The queue is full."}'):
        tally.add(429, 0.0001, body)
    tally.add(503, 0.1, b'{"message": "Prediction failed", "detail": "KeyError: \'x\'"}')
    assert report(tally, 1.0, 1).splitlines()[1:] == [
        "2 x status 429: The queue is full.",
        "1 x status 429",
        "1 x status 503: Prediction failed: KeyError: 'x'",
    ]


def test_the_report_shows_the_foremost_texts_of_a_status_only():
    tally = Tally()
    tally.add(LOST, 0.1, b"refused")
    for number in range(1000):  # more than are kept
        tally.add(500, 0.1, b"request %d failed" % number)
    for _ in range(2):
        tally.add(500, 0.1, b"request 5 failed")
    lost, first, *_, last = report(tally, 1.0, 1).splitlines()[1:]
    assert lost == "1 x no answer (connection lost): refused"
    assert first == "3 x status 500: request 5 failed"
    assert last == "997 x status 500: other texts"
    assert len(tally.errors) <= 102


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", ""),
        (b"<h1>Bad</h1>\n gateway", "<h1>Bad</h1> gateway"),
        (b'{"x": 1}', '{"x": 1}'),
        (b"[1]", "[1]"),
        (b"[" * 100_000, "[" * 300 + "..."),
        (b"\xff", "\\xff"),
    ],
)
def test_a_body_that_is_no_error_of_the_server_is_shown_in_one_short_line(body: bytes, text: str):
    assert refusal_text(body) == text


def test_a_report_of_nothing_but_errors_has_no_latencies():
    tally = Tally()
    tally.add(404, 0.001)
    assert report(tally, 1.0, 1).splitlines() == [
        "0.0 req/s   (0 answers in 1.0 s, 1 clients)",
        "1 x status 404",
    ]


def test_the_bar_fills_and_never_overflows():
    tally = Tally(latencies_s=[0.1] * 30)
    assert progress(0.0, 10.0, tally).startswith("\r[........................]   0%  0 req/s")
    assert progress(5.0, 10.0, tally).startswith("\r[############............]  50%  6 req/s")
    tally.add(503, 0.1)
    assert "[########################] 100%  2 req/s, 1 errors" in progress(12.0, 10.0, tally)
