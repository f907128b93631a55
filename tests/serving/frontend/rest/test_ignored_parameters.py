import pytest

from torchere.serving.frontend.rest.management import warn_of_ignored
from torchere.serving.frontend.rest.openapi import REGISTER


@pytest.mark.parametrize(
    ("method", "target", "told"),
    [
        ("PUT", "/models/echo?min_worker=2&max_worker=3&synchronous=true&model_version=1.0", ""),
        ("PUT", "/models/echo?min_workers=2", "'min_workers' (did you mean min_worker?)"),
        ("PUT", "/models/echo?%0Atimeout=2", "'\\ntimeout'"),
        ("POST", "/models?url=echo.mar&runtime=python&s3_sse_kms=false", ""),
        ("POST", "/models?url=echo.mar&batchsize=4", "'batchsize' (did you mean batch_size?)"),
        ("POST", "/workflows?url=w.war&workflow_nam=x", "'workflow_nam' (did you mean workflow_name?)"),
    ],
)
def test_parameters_that_a_call_ignores_are_logged(ask, caplog, method, target, told):
    ask("management", method, target)
    told_of = [message.rpartition("not know: ")[2] for message in caplog.messages if "ignores" in message]
    assert told_of == ([told] if told else [])


def test_ignored_parameters_in_json_are_logged(ask, caplog):
    body = b'{"url": "echo.mar", "initial_worker": 1}'
    assert ask("management", "POST", "/models", body, content_type="application/json").status == 200
    assert "'initial_worker' (did you mean initial_workers?)" in caplog.text


@pytest.mark.parametrize(
    "rest",
    [
        "X-Amz-Credential=who&X-Amz-Signature=secret",
        "X-Goog-Signature=secret",
        "se=2030&sig=secret",
        "sig%3Dsecret",
    ],
)
def test_a_signed_url_that_is_cut_off_is_told_without_its_signature(ask, caplog, rest):
    ask("management", "POST", f"/models?url=https://bucket/m.mar?X-Amz-Expires=9&{rest}")
    assert caplog.messages[0].endswith(
        "encode the URL: curl -X POST -G --data-urlencode url=..., or send JSON"
    )
    assert "secret" not in caplog.text


def test_a_line_about_ignored_parameters_has_a_limit(caplog):
    warn_of_ignored("a call", (f"{'x' * 10_000}{number}" for number in range(1000)), REGISTER)
    assert caplog.messages[0].endswith(", 995 more")
    assert len(caplog.messages[0]) < 550
