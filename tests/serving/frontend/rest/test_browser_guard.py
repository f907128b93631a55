"""Requests that a browser may have sent for a foreign site, where no token is asked for."""

import asyncio

import pytest

from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.authorisation import Surfaces
from torchere.serving.frontend.rest.browser_guard import BrowserGuard
from torchere.serving.frontend.rest.server import listener_of

SITE = b"http://evil.example"
MANAGEMENT: Surfaces = frozenset({"management"})
LOOPBACK = Address("127.0.0.1", 8081)
EVERYWHERE = Address("0.0.0.0", 8081)


def refused(host, origin=None, needs="management", address=LOOPBACK, **changes) -> bool:
    settings = ServerSettings(management_address=address, **changes)
    return BrowserGuard(MANAGEMENT, settings).refusal(needs, host, origin) is not None


@pytest.mark.parametrize("address", [LOOPBACK, EVERYWHERE, Address(unix_path="/x")])
@pytest.mark.parametrize(
    "host",
    [b"localhost:8081", b"127.0.0.1:8081", b"[::1]:8081", b"10.1.2.3", b"torchere:8081", b"", b"a.localhost"],
)
def test_usual_calls_need_no_setting(address, host):
    assert not refused(host, address=address)


@pytest.mark.parametrize(
    "host", [b"models.default", b"models.default.svc:8081", b"models.default.svc.cluster.local", b"a.example"]
)
def test_names_of_services_are_fine_where_clients_of_a_cluster_come_in(host):
    assert not refused(host, address=EVERYWHERE)


@pytest.mark.parametrize("origin", [None, b"http://evil.example:8081"])
def test_a_rebound_name_is_refused_on_loopback(origin):
    assert refused(b"evil.example:8081", origin)


def test_a_rebound_name_changes_nothing_on_any_address():
    assert refused(b"evil.example:8081", b"http://evil.example:8081", address=EVERYWHERE)


@pytest.mark.parametrize("address", [LOOPBACK, EVERYWHERE, Address(unix_path="/x")])
@pytest.mark.parametrize(
    "origin", [SITE, b"null", b"", b"http://localhost:3000", b"http://localhost", b"x\xe4"]
)
def test_pages_of_another_origin_are_refused(address, origin):
    assert refused(b"localhost:8081", origin, address=address)


def test_leave_for_every_site_to_read_is_none_to_change_models():
    assert refused(b"localhost:8081", SITE, cors_allowed_origin="*")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (b"localhost:8081", b"http://localhost:8081"),
        (b"LOCALHOST:8081", b"http://localhost:8081"),
        (b"127.0.0.1:443", b"https://127.0.0.1"),
        (b"[::1]:8081", b"http://[::1]:8081"),
    ],
)
def test_pages_of_the_server_itself_are_fine(host, origin):
    assert not refused(host, origin)


def test_an_origin_of_the_cors_settings_is_fine():
    assert not refused(b"localhost", b"https://Tool.example", cors_allowed_origin="https://tool.example")
    assert refused(b"localhost", b"https://tool.example:1", cors_allowed_origin="https://tool.example")


def test_a_named_host_is_fine_as_host_and_as_origin():
    named = {"allowed_hosts": ("models.example",)}
    assert not refused(b"models.example:8081", b"http://models.example:8081", **named)
    assert not refused(b"localhost:8081", b"https://models.example", **named)
    assert refused(b"other.example:8081", **named)
    assert refused(b"other.example:8081", address=EVERYWHERE, **named)
    assert not refused(b"other.example:8081", allowed_hosts=("*",))
    assert refused(b"localhost:8081", SITE, allowed_hosts=("*",))


@pytest.mark.parametrize("needs", ["inference", None])
def test_predictions_and_probes_are_checked_once_hosts_are_named(needs):
    assert not refused(b"evil.example", SITE, needs=needs)
    assert refused(b"evil.example", SITE, needs=needs, allowed_hosts=("models.example",))


@pytest.mark.parametrize("needs", ["management", "metrics", "api key"])
def test_management_and_metrics_are_always_checked(needs):
    assert refused(b"evil.example", SITE, needs=needs)


def test_the_metrics_port_has_an_address_of_its_own():
    settings = ServerSettings(metrics_address=EVERYWHERE)
    guard = BrowserGuard(frozenset({"metrics"}), settings)
    assert guard.refusal("metrics", b"metrics.monitoring.svc:8082", None) is None
    assert guard.refusal("metrics", b"localhost:8082", SITE) is not None


@pytest.mark.parametrize("target", ["/metrics", "/metrics/x"])
def test_with_tokens_on_pages_of_foreign_sites_read_no_metrics(ask, planes, target):
    assert ask("metrics", "GET", target, keys=planes.keys, origin="http://evil.example").status == 403
    assert ask("metrics", "GET", target, keys=planes.keys, host="evil.example").status == 403
    assert ask("metrics", "GET", target, keys=planes.keys).status in (200, 404)


def test_with_tokens_on_probes_are_checked_once_hosts_are_named(planes, ask_listener):
    services = planes.services(keys=planes.keys, allowed_hosts=("models.example",))
    listener = listener_of(frozenset({"inference"}), planes.data, planes.control, services)

    async def main():
        hosts = ("models.example", "10.0.0.7:8080", "evil.example")
        return [(await ask_listener(listener, "GET", "/readyz", host=host)).status for host in hosts]

    assert asyncio.run(main()) == [200, 200, 403]


def test_the_token_api_asks_for_a_token_itself(ask, planes):
    evil = {"host": "evil.example", "origin": "http://evil.example"}
    target = "/token?type=inference"
    assert (
        ask("management", "GET", target, keys=planes.keys, authorization="Bearer api", **evil).status == 200
    )


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("POST", "/models?url=echo.mar", {"origin": "http://evil.example"}),
        ("DELETE", "/models/echo", {"host": "evil.example:8081"}),
        (
            "PUT",
            "/models/echo?min_worker=9",
            {"host": "evil.example:8081", "origin": "http://evil.example:8081"},
        ),
    ],
)
def test_a_foreign_page_manages_nothing(ask, planes, method, target, headers):
    answer = ask("management", method, target, b"", **headers)
    assert (answer.status, answer.json["type"]) == (403, "ForbiddenException")
    assert "allowed_hosts" in answer.json["message"]
    assert planes.control.calls == []


def test_a_token_replaces_the_check(ask, planes):
    evil = {"host": "evil.example", "origin": "http://evil.example"}
    answer = ask("management", "GET", "/models", keys=planes.keys, authorization="Bearer management", **evil)
    assert answer.status == 200


def test_a_foreign_page_makes_no_prediction_once_hosts_are_named(planes, ask_listener):
    services = planes.services(allowed_hosts=("models.example",))
    listener = listener_of(frozenset({"inference"}), planes.data, planes.control, services)

    async def main():
        target = "/predictions/echo"
        named = await ask_listener(listener, "POST", target, b"x", host="models.example")
        foreign = [await ask_listener(listener, "POST", target, b"x", host="evil.example") for _ in range(2)]
        return named.status, [answer.status for answer in foreign]

    assert asyncio.run(main()) == (200, [403, 403])
    assert len(planes.data.asked) == 1
