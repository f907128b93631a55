import asyncio
import threading
import zlib

import pytest

from torchere.serving.frontend.dataplane import Readiness
from torchere.serving.frontend.rest import routes
from torchere.serving.frontend.rest.server import listener_of

TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    ("method", "target"), [("GET", "/metrics"), ("POST", "/metrics"), ("GET", "/metrics/a/b")]
)
def test_the_metrics_are_text(ask, method, target):
    answer = ask("metrics", method, target)
    assert (answer.status, answer.headers["content-type"]) == (200, TYPE)
    assert b'Requests2XX{Level="Host",Hostname="host",} ' in answer.body


DATADOG = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.mark.parametrize("traces", [False, True])
@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (DATADOG, "with traces"),
        ("application/openmetrics-text,text/*;q=0.2", "with traces"),
        ("application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1", "always"),
        ("application/openmetrics-text,text/plain;q=0", "always"),
        ("application/openmetrics-text", "always"),
        ("application/openmetrics-text;q=0.5,*/*", "never"),
        ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;version=1.0.0;q=0.2", "never"),
        ("application/openmetrics-text;q=0", "never"),
        ("application/openmetrics-text;version=9.0.0", "never"),
        ("application/openmetrics-text;q=much", "never"),
        ("*/*", "never"),
        ("", "never"),
    ],
)
def test_openmetrics_is_for_scrapers_that_prefer_it_where_it_has_more_to_say(
    ask, planes, accept, openmetrics, traces
):
    planes.metrics.tracing = object() if traces else None
    answer = ask("metrics", "GET", "/metrics", accept=accept)
    expected = openmetrics == "always" or (traces and openmetrics == "with traces")
    assert answer.headers["content-type"] == (OPENMETRICS if expected else TYPE)
    assert answer.body.endswith(b"# EOF\n") is expected
    assert b"Requests2XX{" in answer.body  # under this name in both


def test_torchserves_counters_are_counters_to_scrapers_that_prefer_openmetrics(ask):
    text = ask("metrics", "GET", "/metrics", accept=DATADOG).body.decode()
    names = {"ts_inference_latency_microseconds", "ts_queue_latency_microseconds"}
    names |= {"Requests2XX", "Requests4XX", "Requests5XX"}
    assert names == {name for name in names if f"# TYPE {name} counter\n" in text}


def test_a_probe_that_says_no_is_no_error_of_the_server(ask, planes):
    planes.data.is_ready = Readiness(False, ("a model loads",))
    assert ask("inference", "GET", "/readyz").status == 503
    assert ask("inference", "GET", "/v2/health/ready").status == 503
    counters = planes.metrics.exposition({"Requests5XX"})
    assert 'Requests5XX{Level="Host",Hostname="host",} 0.0' in counters


def test_refusals_are_counted_by_reason(ask, planes):
    ask("inference", "POST", "/predictions/echo", b"x", keys=planes.keys)
    ask("inference", "POST", "/predictions/echo", b"x" * 2000)
    found = planes.metrics.exposition({"torchere_requests_rejected_total"})
    for reason in ("auth", "too_large"):
        assert f'rejected_total{{model="",version="",reason="{reason}",}} 1.0' in found


def test_samples_can_be_picked_by_name(ask):
    answer = ask("metrics", "GET", "/metrics?name[]=Requests2XX&name%5B%5D=Requests4XX")
    families = [line.split()[2] for line in answer.body.decode().splitlines() if line.startswith("# TYPE")]
    assert families == ["Requests2XX", "Requests4XX"]


def test_a_name_that_nothing_has_gives_nothing(ask):
    answer = ask("metrics", "GET", "/metrics?name[]=nope")
    assert (answer.status, answer.body) == (200, b"")


def test_the_metrics_never_need_a_key(ask, planes):
    assert ask("metrics", "GET", "/metrics", keys=planes.keys).status == 200


def test_the_port_describes_itself_and_knows_nothing_else(ask):
    assert [*ask("metrics", "OPTIONS", "/").json["paths"]] == ["/", "/api-description", "/metrics"]
    assert ask("metrics", "GET", "/").status == 405
    for target in ("/ping", "/models", "/predictions/echo", "/livez"):
        assert ask("metrics", "GET", target).status == 404


def test_in_log_mode_there_is_nothing_to_see(planes, ask_listener):
    app = listener_of(
        frozenset({"metrics"}), planes.data, planes.control, planes.services(metrics_mode="log")
    )
    answer = asyncio.run(ask_listener(app, "GET", "/metrics"))
    assert (answer.status, answer.body) == (200, b"")


def test_in_legacy_mode_there_are_the_three_old_counters(planes, ask_listener):
    meter = planes.metrics.meter("echo", "1.0")
    planes.metrics.show(meter)
    meter.accepted(named=False)
    app = listener_of(
        frozenset({"metrics"}), planes.data, planes.control, planes.services(metrics_mode="legacy")
    )
    planes.metrics.tracing = object()  # these three have no exemplars
    text = asyncio.run(ask_listener(app, "GET", "/metrics", accept=DATADOG)).body.decode()
    assert "# EOF" not in text
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert families == {
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    }
    assert asyncio.run(ask_listener(app, "GET", "/metrics?name[]=Requests2XX")).body == b""


@pytest.mark.parametrize(
    ("accepted", "zipped"),
    [("gzip", True), ("br;q=1, GZIP;q=0.5", True), ("*", True), ("gzip;q=0, *", False), ("br", False)],
)
def test_the_metrics_are_compressed_for_those_who_take_it(ask, accepted, zipped):
    answer = ask("metrics", "GET", "/metrics", accept_encoding=accepted)
    assert answer.headers.get("content-encoding") == ("gzip" if zipped else None)
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    text = zlib.decompress(answer.body, wbits=31) if zipped else answer.body
    assert b"# TYPE Requests2XX counter" in text


def test_scrapes_of_clients_that_are_gone_are_not_written(planes, monkeypatch):
    began, go_on, written = threading.Event(), threading.Event(), []
    page = routes._metrics_page

    def held_page(*args, **kwargs):
        written.append(args)
        began.set()
        assert go_on.wait(20)
        return page(*args, **kwargs)

    monkeypatch.setattr(routes, "_metrics_page", held_page)

    async def until(is_so):
        while not is_so():
            await asyncio.sleep(0)

    async def scrape(server):
        reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return reader, writer

    async def main():
        async with planes.serving("metrics") as server:
            listener = server.listener
            scrapes = [await scrape(server)]
            await asyncio.wait_for(until(began.is_set), 20)
            scrapes += [await scrape(server) for _ in range(5)]
            await asyncio.wait_for(until(lambda: len(listener.tasks) == 6), 20)
            for _, writer in scrapes[1:]:
                writer.transport.abort()
            await asyncio.wait_for(until(lambda: len(listener.connections) == 1), 20)
            scrapes.append(await scrape(server))
            go_on.set()
            answer = await asyncio.wait_for(scrapes[-1][0].read(), 20)
            for _, writer in scrapes:
                writer.transport.abort()
            return answer

    assert asyncio.run(main()).startswith(b"HTTP/1.1 200")
    assert len(written) == 2
