"""Reading what the load generators print."""

import pytest
from harness.errors import Failed
from harness.load import h2load_result, wrk_result

WRK = """Running 2s test @ http://127.0.0.1:1
  2 requests in 2.00s
JSON {"requests": 5000, "duration_us": 2000000, "bad_status": %d, "lost": 0, "latency_us": {"50": 900}}
"""
H2LOAD = """finished in 5.00s, 6678.40 req/s, 1.02MB/s
requests: 33392 total, 33424 started, 33392 done, 33392 succeeded, %d failed, 0 errored, 0 timeout
status codes: 33392 2xx, 0 3xx, 0 4xx, 0 5xx
                     min         max         mean         sd        +/- sd
time for request:      812us     51.10ms      4.78ms      1.09ms    92.31%%
"""


def test_wrk_gives_the_rate_and_latencies_in_milliseconds():
    load = wrk_result(WRK % 0)
    assert load.per_second == 2500.0
    assert load.latency_ms == {"50": 0.9}


def test_a_run_of_wrk_with_refused_requests_is_no_figure():
    with pytest.raises(Failed, match="3 of 5000"):
        wrk_result(WRK % 3)


def test_a_wrk_that_could_not_connect_is_quoted():
    with pytest.raises(Failed, match="unable to connect"):
        wrk_result("", "unable to connect to 127.0.0.1:1")


def test_h2load_gives_the_rate_and_the_mean_in_milliseconds():
    load = h2load_result(H2LOAD % 0)
    assert load.per_second == 6678.4
    assert load.latency_ms == {"mean": 4.78}


def test_a_run_of_h2load_with_failed_calls_is_no_figure():
    with pytest.raises(Failed, match="7 failed"):
        h2load_result(H2LOAD % 7)
