import logging

import pytest


@pytest.fixture(autouse=True)
def as_before():
    yield
    logging.getLogger("torchere.serving").setLevel(logging.NOTSET)


def test_a_level_is_changed_and_shown(ask):
    answer = ask("management", "PUT", "/log-level?logger=torchere.serving&level=debug")
    assert (answer.status, answer.json["torchere.serving"]) == (200, "DEBUG")
    assert logging.getLogger("torchere.serving.server").isEnabledFor(logging.DEBUG)
    assert ask("management", "GET", "/log-level").json["torchere.serving"] == "DEBUG"


@pytest.mark.parametrize("query", ["level=LOUD", "logger=made.up&level=INFO", ""])
def test_what_is_not_there_is_refused(ask, query):
    answer = ask("management", "PUT", f"/log-level?{query}")
    assert answer.status == 400
    assert "found" in answer.json["message"] or "nothing logs as" in answer.json["message"]


def test_other_methods_are_not_allowed(ask):
    assert ask("management", "DELETE", "/log-level").status == 405


@pytest.mark.parametrize("surfaces", ["management", "inference+management+metrics"])
def test_it_is_for_holders_of_the_management_key(ask, planes, surfaces):
    for key, status in (("inference", 400), ("management", 200)):
        headers = {"authorization": f"Bearer {key}", "keys": planes.keys}
        assert (
            ask(surfaces, "PUT", "/log-level?logger=torchere.serving&level=INFO", **headers).status == status
        )


def test_clients_of_the_inference_port_do_not_find_it(ask):
    assert ask("inference", "PUT", "/log-level?level=DEBUG").status == 404
