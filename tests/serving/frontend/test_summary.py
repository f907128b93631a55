"""The lines that a server prints when its start is over."""

from __future__ import annotations

import json
import shlex
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchere.archiver.signature import Limit, Signature, TensorSpec, Values
from torchere.serving.config.server_settings import Address, ServerSettings
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.summary import Caller, StartedModel, started_models, summary
from torchere.serving.types import ModelKey

DEFAULT = Address("127.0.0.1", 8080)
SMALL = Signature((TensorSpec("x", "FP32", (-1, 4)), TensorSpec("flag", "BOOL", (2,))), ())
LARGE = Signature((TensorSpec("picture", "FP32", (-1, 3, -1, 224), (Limit(2, least=60, multiple=32),)),), ())


SHARED = Signature(
    (
        TensorSpec("ids", "INT64", (-1, -1), (Limit(1, 3, 8, 2, "length"),), Values(5, 9)),
        TensorSpec("mask", "INT64", (-1, -1), (Limit(1, 1, 9, 1, "length"),), Values(-3, -1)),
    ),
    (),
)
LONG = Signature((TensorSpec("ids", "INT64", (-1, 64), values=Values(1, 9)),), ())


def facts(
    handler: str = "tensor",
    signature: Signature | None = None,
    versions: tuple[str, ...] = ("1.0",),
    example: object = None,
) -> Any:
    numbers: Any = SimpleNamespace()
    return ModelFacts(ModelKey("net", "1.0"), versions, handler, {}, signature, 1, numbers, example)


def caller(command: str | None = "torchere", address: Address = DEFAULT, **settings: Any) -> Caller:
    return Caller(command, address, ServerSettings(**settings))


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (facts(signature=SMALL), ["--v2", "--json", '{"x": [[0.0, 0.0, 0.0, 0.0]], "flag": [false, false]}']),
        (facts(signature=LARGE), ["--zeros", "picture=1x3x64x224"]),
        (facts(signature=SHARED), ["--v2", "--json", '{"ids": [[5, 5, 5, 5]], "mask": [[-1, -1, -1, -1]]}']),
        (facts(signature=LONG), ["--file", "YOUR_REQUEST_FILE"]),  # --zeros would be refused
        (facts("image_classifier"), ["--image", "PICTURE.jpg"]),
        (facts("text_classifier"), ["--text", "A sentence."]),
        (facts("voice_activity"), ["--file", "SOUND.wav"]),
        (facts("mine.py", SMALL), ["--file", "YOUR_REQUEST_FILE"]),
        (facts("mine.py", example={"values": [1, 2]}), ["--json", '{"values": [1, 2]}']),
        (facts("mine.py", example=date(2020, 1, 1)), ["--file", "YOUR_REQUEST_FILE"]),  # JSON has no dates
        (facts("mine.py", example="x" * 600), ["--file", "YOUR_REQUEST_FILE"]),
    ],
)
def test_the_line_sends_what_the_model_takes(of: ModelFacts, words: list[str]) -> None:
    assert shlex.split(caller().line(of)) == ["torchere", "predict", "net", *words]


def test_the_line_names_what_is_not_the_default() -> None:
    elsewhere = caller("/opt/bin/torchere", Address("0.0.0.0", 9000), key_file=Path("/run/keys.json")).line(
        facts("mine.py", versions=("1.0", "2.0"))
    )
    assert elsewhere == (
        "/opt/bin/torchere predict net/1.0 --file YOUR_REQUEST_FILE --address http://127.0.0.1:9000 "
        "--token-file /run/keys.json"
    )
    fixed = caller(token_keys_file=Path("/k.json")).line(facts("mine.py"))
    assert fixed == "TORCHERE_TOKEN=KEY torchere predict net --file YOUR_REQUEST_FILE"
    secure = caller(address=Address("::", 443, tls=True), certificate_file=Path("/c.pem")).line(
        facts("mine.py")
    )
    assert secure.startswith("SSL_CERT_FILE=/c.pem torchere predict net ")
    assert secure.endswith("--address https://[::1]:443")


def test_without_the_library_of_predict_the_line_is_one_of_curl() -> None:
    line = caller(None, token_auth_enabled=False).line(facts(signature=SMALL))
    words = shlex.split(line)
    assert (words[0], words[1], words[3]) == ("curl", "--json", "http://127.0.0.1:8080/v2/models/net/infer")
    assert json.loads(words[2])["inputs"][1] == {
        "name": "flag",
        "shape": [2],
        "datatype": "BOOL",
        "data": [False, False],
    }
    with_key = caller(None).line(facts("image_classifier"))
    assert with_key == (
        'curl -H "Authorization: Bearer $(jq -r .inference.key key_file.json)" -T PICTURE.jpg '
        "http://127.0.0.1:8080/predictions/net"
    )
    socket = caller("torchere", Address(unix_path="/run/s"), token_auth_enabled=False).line(facts("mine.py"))
    assert socket == "curl --unix-socket /run/s -T YOUR_REQUEST_FILE http://localhost/predictions/net"


def test_models_that_do_not_work_have_their_cause_and_no_line() -> None:
    def version(ready: bool, failure: str = "", workflow: str = "") -> Any:
        origin = SimpleNamespace(workflow=workflow, isolation="thread")
        pool = SimpleNamespace(in_service=2 if ready else 0)
        return SimpleNamespace(
            key=ModelKey("net", "1.0"), origin=origin, pool=pool, ready=ready, failure_text=failure
        )

    versions = [version(True), version(False, "no such file"), version(False), version(True, workflow="w")]
    found = started_models(versions, ["gone"], lambda _: facts("mine.py"), caller())
    assert found == [
        StartedModel(
            "net 1.0",
            "2 workers (thread); its input is not declared: YOUR_REQUEST_FILE stands for a file with a "
            "request",
            "torchere predict net --file YOUR_REQUEST_FILE",
        ),
        StartedModel("net 1.0", "0 workers (thread)", "", "no such file"),
        StartedModel("net 1.0", "0 workers (thread)", "", "it has no worker: scale it up"),
        StartedModel("gone", "", "", "not registered: see above"),
    ]


def test_the_summary_has_addresses_keys_warnings_and_models() -> None:
    models = [
        StartedModel("net 1.0", "1 worker (process)", "torchere predict net"),
        StartedModel("a", "", "", "why"),
    ]
    addresses = {
        "inference": ("http://127.0.0.1:8080", "127.0.0.1:7070"),
        "metrics": ("http://127.0.0.1:8082", ""),
    }
    assert summary(models, addresses, "/k", 1, lambda text, _: text) == [
        "",
        "  inference   http://127.0.0.1:8080  gRPC 127.0.0.1:7070",
        "  metrics     http://127.0.0.1:8082",
        "  keys        /k",
        "  warnings    1 warning above",
        "",
        "  ready   net 1.0  1 worker (process)",
        "          torchere predict net",
        "  failed  a  why",
        "  1 of 2 models ready. Ctrl+C stops the server.",
        "",
    ]
