"""What TorchServe's pytest files check by more than one request each: models, handlers, gRPC and access."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from suite.deployment import OPEN, Deployment
from suite.rows import Row

OCTETS = {"Content-Type": "application/octet-stream"}
STRICT = "strict_compatibility=true\n"  # TorchServe passes over it
INFERENCE, MANAGEMENT = "InferenceAPIsService", "ManagementAPIsService"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a test file upstream asserts; `run` raises AssertionError where it does not hold."""

    file: str
    title: str
    run: Callable[[Deployment], None]


def row_check(row: Row, at: Deployment) -> None:
    headers = {} if row.body is None else {"Content-Type": row.type}
    reply = at.ask(row.method, row.path.format(downloads=at.downloads), row.body, row.api, headers)
    assert reply.status in row.status, f"{reply.status}, expected {row.status}: {reply.text[:300]}"
    if row.holds:
        assert row.holds in reply.text, f"{row.holds!r} is not in {reply.text[:300]}"
    if row.lacks:
        assert row.lacks not in reply.text, reply.text[:300]
    name, value = row.header
    if name:
        assert reply.headers.get(name) == value, dict(reply.headers)


def of_row(row: Row) -> Check:
    return Check(row.file, row.title, partial(row_check, row))


def start_open(at: Deployment, more: str = "") -> None:
    at.start(
        *OPEN,
        properties=f"max_request_size=1048576\ndefault_response_timeout=20\n{more}",
    )


def start_strictly(at: Deployment) -> None:
    start_open(at, STRICT)


# Models and their versions: test_model_archiver.py, test_handler.py, test_model_config.py


def versions(at: Deployment) -> None:
    at.register("ok.mar", "versions", 3)
    at.register("ok_v2.mar", "versions", 3)
    assert len(at.manage("GET", "/models/versions/all").json) == 2
    assert at.manage("DELETE", "/models/versions/1.2.1").status == 200
    assert at.manage("DELETE", "/models/versions").status == 200


def local_then_url(at: Deployment) -> None:
    at.register("ok.mar", "twice")
    reply = at.register(f"{at.downloads}/ok.mar", "twice")
    assert (reply.status, reply.json["type"]) == (500, "InternalServerException"), reply.text
    at.manage("DELETE", "/models/twice")


def url_then_local(at: Deployment) -> None:
    at.register(f"{at.downloads}/only_here.mar", "twice")
    reply = at.register("only_here.mar", "twice")
    assert (reply.status, reply.json["type"]) == (409, "ConflictStatusException"), reply.text
    at.manage("DELETE", "/models/twice")


def unknown_handler(at: Deployment) -> None:
    reply = at.register("four.mar", "unhandled", handler="nehandler")
    assert (reply.status, reply.json["type"]) == (500, "InternalServerException"), reply.text


def archiver(more: tuple[str, ...], fails: bool, at: Deployment) -> None:
    (at.folder / "h.py").write_text("def handle(data, context):\n    return data\n")
    (at.folder / "packed").mkdir(exist_ok=True)
    command = ["torch-model-archiver", "--version", "1.0", "--export-path", "packed", *more]
    status = at.run(command, check=False, capture_output=True).returncode
    assert (status != 0) == fails, status


def batch_sizes(at: Deployment) -> None:
    at.register("four.mar", "two", 2, batch_size=2)
    at.register("four.mar", "four", 2)
    sizes = [at.manage("GET", f"/models/{name}/1.0").json[0]["batchSize"] for name in ("two", "four")]
    for name in ("two", "four"):
        at.manage("DELETE", f"/models/{name}")
    assert sizes == [2, 4]


def digit(form: str, at: Deployment) -> None:
    assert at.register(f"digits_{form}.mar", f"digits_{form}").status == 200
    replies = [at.ask("POST", f"/predictions/digits_{form}", body, headers=OCTETS) for body in (b"ab", b"ba")]
    assert [reply.text for reply in replies] == ["1", "0"]
    answer = at.call(INFERENCE, "Predictions", {"model_name": f"digits_{form}", "input": {"data": "ab"}})
    assert str(answer.messages[0]) == "1", answer


# What handlers do: streams, sequences, time, logs


def parts_of_an_answer(at: Deployment) -> None:
    at.register("parts.mar", "parts", batch_size=1)
    reply = at.ask("POST", "/predictions/parts", b"42")
    assert (reply.status, reply.headers["transfer-encoding"]) == (200, "chunked")
    assert reply.text == "hellohellohellohello world "


def parts_over_grpc(at: Deployment) -> None:
    request = {"model_name": "parts", "input": {"data": "42"}}
    answer = at.call(INFERENCE, "StreamPredictions", request)
    assert (answer.code, answer.messages) == ("OK", ("hello", "hello", "hello", "hello world "))


def sequences(at: Deployment) -> None:
    at.register("numbers.mar", "numbers", 2)
    found: dict[str, str] = {}

    def client(name: str, count: int) -> None:
        headers = {"ts_request_sequence_id": name}
        replies = [
            at.ask("POST", "/predictions/numbers", str(value).encode(), headers=headers).text
            for value in range(1, count + 1)
        ]
        found[name] = " ".join(replies)

    clients = [threading.Thread(target=client, args=pair) for pair in (("seq_0", 3), ("seq_1", 5))]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert found == {"seq_0": "1 3 6", "seq_1": "1 3 6 10 15"}


def sequences_over_grpc(at: Deployment) -> None:
    requests = [
        {"model_name": "numbers", "input": {"data": str(value)}, "sequence_id": "seq_2"}
        for value in (1, 2, 3)
    ]
    answer = at.call(INFERENCE, "StreamPredictions2", requests)
    assert [str(value) for value in answer.messages] == ["1", "3", "6"], answer


def is_ready(at: Deployment, model: str) -> bool:
    workers = at.manage("GET", f"/models/{model}").json[0]["workers"]
    return [worker["status"] for worker in workers] == ["READY"]


def slow_start(at: Deployment) -> None:
    path = "/models?url=slow_to_load.mar&initial_workers=1&synchronous=false"
    assert at.manage("POST", path).status == 202
    began_s = time.monotonic()
    at.wait_for(lambda: is_ready(at, "slow_to_load"), 30)
    assert 2 <= time.monotonic() - began_s < 20


def too_slow_a_start(at: Deployment) -> None:
    path = "/models?url=slower_than_allowed.mar&initial_workers=1&synchronous=true"
    reply = at.manage("POST", path)
    assert reply.status == 500, reply.text


def log_of_too_slow_a_start(at: Deployment) -> None:
    at.wait_for(lambda: "Backend worker did not respond in given time" in at.log, 5)


def too_slow_an_answer(at: Deployment) -> None:
    at.register("too_slow.mar", "too_slow", batch_size=1)
    reply = at.ask("POST", "/predictions/too_slow", b"42")
    assert reply.status == 500, reply.text
    at.wait_for(lambda: at.log.count("initialised") > 1, 30)  # the worker's successor


def log_of_recovery(at: Deployment) -> None:
    texts = ("Worker disconnected", "Retry worker", "Auto recovery start timestamp")
    at.wait_for(lambda: all(text in at.log for text in texts), 5)


def traceback(at: Deployment) -> None:
    at.manage("POST", "/models?url=fails_to_load.mar&model_name=traced&initial_workers=1&synchronous=false")
    wanted = (
        "Traceback (most recent call last):",
        "in initialize",
        "self.first()",
        "in first",
        "self.second()",
        "in second",
        "assert False",
        "AssertionError",
    )
    at.wait_for(lambda: all(text in at.log for text in wanted), 30)
    at.wait_for(lambda: at.log.count("AssertionError") >= 3, 60)  # also at its retries
    at.manage("DELETE", "/models/traced")


# gRPC: test_gRPC_inference_api.py, test_gRPC_management_apis.py


def grpc_of_a_model(at: Deployment) -> None:
    register = {"url": "ok.mar", "initial_workers": 1, "synchronous": True, "model_name": "grpc"}
    answer = at.call(MANAGEMENT, "RegisterModel", register)
    assert answer.code == "OK" and "registered with 1 initial workers" in str(answer.messages), answer
    answer = at.call(INFERENCE, "Predictions", {"model_name": "grpc", "input": {"data": "test"}})
    assert answer.messages == ("OK",), answer
    assert at.call(INFERENCE, "Ping", {}).code == "OK"
    answer = at.call(MANAGEMENT, "DescribeModel", {"model_name": "grpc"})
    assert answer.messages[0][0]["modelVersion"] == "1.11", answer
    assert at.call(MANAGEMENT, "UnregisterModel", {"model_name": "grpc"}).code == "OK"


GRPC_CODES: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    ("missing url", "RegisterModel", {}, "INVALID_ARGUMENT"),
    ("empty url", "RegisterModel", {"url": "", "model_name": "m"}, "INVALID_ARGUMENT"),
    ("invalid runtime", "RegisterModel", {"url": "ok.mar", "runtime": "python4"}, "INVALID_ARGUMENT"),
    ("scale an unknown model", "ScaleWorker", {"model_name": "none", "min_worker": 1}, "NOT_FOUND"),
    ("describe an unknown model", "DescribeModel", {"model_name": "none"}, "NOT_FOUND"),
    ("unregister an unknown model", "UnregisterModel", {"model_name": "none"}, "NOT_FOUND"),
    ("default of an unknown model", "SetDefault", {"model_name": "none", "model_version": "1"}, "NOT_FOUND"),
    ("list", "ListModels", {"limit": 1, "next_page_token": 0}, "OK"),
)


def grpc_code(method: str, request: dict[str, Any], code: str, at: Deployment) -> None:
    service = INFERENCE if method == "Predictions" else MANAGEMENT
    answer = at.call(service, method, request)
    assert answer.code == code, answer


# Tokens: test_token_authorization.py, test_gRPC_token_authorization.py


def start_with_tokens(at: Deployment) -> None:
    at.start("--enable-model-api", properties="default_workers_per_model=1\n")
    assert (
        at.manage(
            "POST", "/models?url=ok.mar&initial_workers=1&synchronous=true", **key(at, "management")
        ).status
        == 200
    )


def key(at: Deployment, kind: str) -> dict[str, str]:
    keys = json.loads((at.folder / "key_file.json").read_text())
    return {"Authorization": f"Bearer {keys[kind]['key']}"}


WRONG = {"Authorization": "Bearer abcd1234"}


def tokens(at: Deployment) -> None:
    described = [
        at.manage("GET", "/models/ok", **given).status for given in (key(at, "management"), WRONG, {})
    ]
    predicted = [
        at.ask("POST", "/predictions/ok", b"1", headers=given).status
        for given in (key(at, "inference"), WRONG, {})
    ]
    assert (described, predicted) == ([200, 400, 400], [200, 400, 400])


def new_tokens(at: Deployment) -> None:
    for kind in ("inference", "management"):
        old = key(at, kind)
        assert at.manage("GET", f"/token?type={kind}", **key(at, "API")).status == 200
        assert key(at, kind) != old
    assert at.ask("POST", "/predictions/ok", b"1", headers=key(at, "inference")).status == 200


def tokens_over_grpc(at: Deployment) -> None:
    answer = at.call(MANAGEMENT, "DescribeModel", {"model_name": "ok"})
    assert "Token Authorization failed" in answer.details, answer


def expired_tokens(at: Deployment) -> None:
    at.stop()
    at.start("--enable-model-api", properties="token_expiration_min=0.1\n")
    given = key(at, "management")
    assert at.manage("GET", "/models", **given).status == 200
    at.wait_for(lambda: at.manage("GET", "/models", **given).status == 400, 30)


# Who may register: test_model_control_mode.py


def start_closed(at: Deployment, properties: str = "") -> None:
    at.start("--disable-token-auth", "--models", "ok=ok.mar", properties=properties)


def start_closed_strictly(at: Deployment) -> None:
    start_closed(at, STRICT)


def closed(at: Deployment) -> None:
    at.wait_for(lambda: at.manage("GET", "/models/ok").status == 200)
    for method, path in (("POST", "/models?url=four.mar&initial_workers=1"), ("DELETE", "/models/ok")):
        reply = at.manage(method, path)
        assert (reply.status, reply.json) == (
            405,
            {
                "code": 405,
                "type": "MethodNotAllowedException",
                "message": "Requested method is not allowed, please refer to API document.",
            },
        )
    assert at.manage("GET", "/models/four").status == 404


def flag_before_file(at: Deployment) -> None:
    at.stop()
    at.start(*OPEN, "--models", "ok=ok.mar", properties="enable_model_api=false\n")
    assert at.manage("DELETE", "/models/ok").status == 200


def variable_before_both(at: Deployment) -> None:
    at.stop()
    at.variables["TS_ENABLE_MODEL_API"] = "true"
    at.start("--disable-token-auth", properties="enable_envvars_config=true\nenable_model_api=false\n")
    assert at.register("four.mar", "four").status == 200


# Archives of URLs: test_gRPC_allowed_urls.py


def start_with_urls(at: Deployment) -> None:
    at.start(*OPEN, properties=f"allowed_urls={at.downloads}/ok.mar\n")


def allowed_urls(at: Deployment) -> None:
    def register(url: str, name: str) -> Any:
        return at.call(MANAGEMENT, "RegisterModel", {"url": url, "model_name": name, "initial_workers": 0})

    assert register(f"{at.downloads}/only_here.mar", "no").details.startswith("Given URL")
    assert "Relative path is not allowed in url" in register(f"{at.downloads}/../ok.mar", "up").details
    (at.folder / "store" / "ok.mar").unlink()  # of the start; the download has its name
    answer = register(f"{at.downloads}/ok.mar", "yes")
    assert answer.code == "OK", answer
