from pathlib import Path

import pytest

from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.rest.server import listeners

SHARED = "inference+management+metrics"


@pytest.mark.parametrize(
    ("method", "target"),
    [
        *[
            ("GET", "/ping"),
            ("POST", "/predictions/echo"),
            ("POST", "/models/echo/invoke"),
            ("GET", "/metrics"),
        ],
        *[
            ("GET", "/models"),
            ("GET", "/models/echo"),
            ("GET", "/models/echo/1.0"),
            ("DELETE", "/models/echo/1.0"),
        ],
        *[
            ("PUT", "/models/echo/1.0/set-default"),
            ("GET", "/v1/models/echo"),
            ("POST", "/v1/models/echo:predict"),
        ],
    ],
)
def test_a_shared_port_answers_every_api(ask, method, target):
    assert ask(SHARED, method, target).status == 200


@pytest.mark.parametrize(
    ("target", "key"),
    [
        ("/predictions/echo", "inference"),
        ("/models/echo", "management"),
        ("/models/echo/invoke", "inference"),
    ],
)
def test_a_shared_port_asks_for_one_key(ask, planes, target, key):
    other = {"inference": "management", "management": "inference"}[key]
    assert ask(SHARED, "GET", target, keys=planes.keys, authorization=f"Bearer {key}").status == 200
    assert ask(SHARED, "GET", target, keys=planes.keys, authorization=f"Bearer {other}").status == 400


@pytest.mark.parametrize("target", ["/models\n", "/models\n/", "/workflows\n", "/log-level\n"])
def test_a_line_break_at_the_end_of_a_path_is_no_way_round_the_key(ask, planes, target):
    with_key = {"keys": planes.keys, "authorization": "Bearer inference"}
    for method in ("GET", "POST", "PUT"):
        answer = ask(SHARED, method, f"{target}?url=a.mar", **with_key)
        assert (answer.status, answer.json["type"]) == (404, "ResourceNotFoundException")
    assert planes.control.calls == []


def test_three_addresses_make_three_listeners():
    settings = ServerSettings()
    assert listeners(settings) == [
        (settings.inference_address, {"inference"}),
        (settings.management_address, {"management"}),
        (settings.metrics_address, {"metrics"}),
    ]


def test_equal_addresses_make_one_listener_that_shows_the_metrics_too():
    one = Address(port=8080)
    settings = ServerSettings(inference_address=one, management_address=one)
    assert listeners(settings) == [
        (one, {"inference", "management", "metrics"}),
        (settings.metrics_address, {"metrics"}),
    ]
    all_of_them = ServerSettings(inference_address=one, management_address=one, metrics_address=one)
    assert listeners(all_of_them) == [(one, {"inference", "management", "metrics"})]


def test_without_a_metrics_listener_no_port_shows_them():
    one = Address(unix_path=str(Path("/run/t.sock")))
    settings = ServerSettings(inference_address=one, management_address=one, metrics_address=None)
    assert listeners(settings) == [(one, {"inference", "management"})]


def test_free_ports_are_never_the_same():
    free = Address(port=0)
    settings = ServerSettings(inference_address=free, management_address=free, metrics_address=free)
    assert len(listeners(settings)) == 3
