"""The Open Inference Protocol against a real server, with thread and with process executors."""

import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from torchere.archiver.signature import Signature, TensorSpec

LINEAR = Signature((TensorSpec("input", "FP32", (-1, 4)),), (TensorSpec("output", "FP32", (-1, 3)),))
TWO = Signature(
    (TensorSpec("a", "INT64", (-1, -1)), TensorSpec("b", "INT64", (-1, -1))),
    (TensorSpec("sum", "INT64", (-1, -1)), TensorSpec("difference", "INT64", (-1, -1))),
)
# Gives every tensor back, streams texts, remembers sequences, and tells what came that was no tensor.
ECHO = """
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException

class Echo:
    def initialize(self, context):
        self.sums = {}

    def handle(self, data, context):
        return [self.answer(index, row, context) for index, row in enumerate(data)]

    def answer(self, index, row, context):
        if "refuse" in row:
            raise PredictionException("not that", 422)
        if "text" in row:
            for word in ("one ", "two "):
                send_intermediate_predict_response([word], context.request_ids, "", 200, context)
            return "three"
        if "add" in row:
            return {"sum": self.added(index, row["add"], context)}
        if not all(hasattr(value, "dtype") for value in row.values()):
            return {"body": type(row["body"]).__name__}
        return dict(row)

    def added(self, index, value, context):
        name = context.get_sequence_id(index)
        if context.get_request_header(index, "ts_request_sequence_start") == "true":
            self.sums[name] = 0
        self.sums[name] += value
        return self.sums[name]
"""


class SumAndDifference(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


def scripted(module: torch.nn.Module) -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module.eval()), file)
    return file.getvalue()


def pack_all(pack: Callable[..., str], isolation: str) -> None:
    config = f"isolation: {isolation}\nbatchSize: 4\nmaxBatchDelay: 20\n"
    model = {"serializedFile": "m.pt", "handler": "tensor", "configFile": "c.yaml"}
    torch.manual_seed(0)
    for name, module, signature in (
        ("linear", torch.nn.Linear(4, 3), LINEAR),
        ("two", SumAndDifference(), TWO),
    ):
        files = {"m.pt": scripted(module), "signature.json": signature.to_json(), "c.yaml": config}
        pack(name, files, **model)
    own = {"handler": "echo.py", "configFile": "c.yaml"}
    pack("echo", {"echo.py": ECHO, "c.yaml": f"isolation: {isolation}\n"}, **own)
    sequences = "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 2\n"
    pack("counter", {"echo.py": ECHO, "c.yaml": f"isolation: {isolation}\n{sequences}"}, **own)


PROPERTIES = """
load_models=linear.mar,two.mar,echo.mar,counter.mar
disable_token_authorization=true
enable_model_api=true
"""


@pytest.fixture(scope="module", params=["thread", "process"])
def server(request: pytest.FixtureRequest, pack: Callable[..., str], start_server: Callable[..., Any]) -> Any:
    """A server with four models whose executors live in threads, or in processes."""
    pack_all(pack, request.param)
    running = start_server(properties=PROPERTIES)
    for model in ("linear", "two", "echo", "counter"):
        running.follow(f"{model}:1.0 is ready")
    return running


def post(server: Any, model: str, inputs: list[Any], **members: Any) -> Any:
    body = json.dumps({"inputs": inputs, **members}).encode()
    return server.call("POST", f"/v2/models/{model}/versions/1.0/infer", body)


def tensor(name: str, array: Any, datatype: str = "FP32") -> dict[str, Any]:
    array = np.asarray(array)
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.ravel().tolist()}


def post_binary(server: Any, model: str, arrays: dict[str, np.ndarray], **members: Any) -> tuple[Any, bytes]:
    """Send and get everything in binary form; returns the JSON of the answer and what stands behind it."""
    inputs = []
    for name, array in arrays.items():
        head = {"name": name, "shape": list(array.shape), "datatype": "FP32"}
        inputs.append({**head, "parameters": {"binary_data_size": array.nbytes}})
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}, **members}).encode()
    body = b"".join([text, *(array.tobytes() for array in arrays.values())])
    length = {"Inference-Header-Content-Length": str(len(text))}
    reply = server.call("POST", f"/v2/models/{model}/infer", body, headers=length)
    assert reply.status == 200, reply.body
    end = int(reply.headers["inference-header-content-length"])
    return json.loads(reply.body[:end]), reply.body[end:]


def test_the_server_and_its_models_tell_of_themselves(server: Any) -> None:
    assert server.call("GET", "/v2/health/live").json() == {"live": True}
    assert server.call("GET", "/v2/health/ready").json() == {"ready": True}
    assert server.call("GET", "/v2/models/linear/ready").json() == {"name": "linear", "ready": True}
    told = server.call("GET", "/v2/models/linear/versions/1.0").json()
    assert told["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}]
    assert server.call("GET", "/v2/models/echo").json()["inputs"] == []


def test_json_and_binary_give_the_same_numbers(server: Any) -> None:
    rows = np.random.default_rng(0).random((3, 4), dtype=np.float32)
    reply = post(server, "linear", [tensor("input", rows)], id="7").json()
    assert (reply["id"], reply["model_name"], reply["model_version"]) == ("7", "linear", "1.0")
    in_json = np.float32(reply["outputs"][0]["data"]).reshape(reply["outputs"][0]["shape"])
    head, raw = post_binary(server, "linear", {"input": rows})
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 36}
    assert np.array_equal(np.frombuffer(raw, np.float32).reshape(3, 3), in_json)
    plain = server.call(
        "POST", "/predictions/linear", json.dumps(rows.tolist()).encode(), content_type="application/json"
    )
    assert np.allclose(plain.json(), in_json)


def test_clients_at_once_get_their_own_answers(server: Any) -> None:
    rows = [np.full((1 + i % 3, 1 + i % 2), i) for i in range(24)]

    def ask(array: np.ndarray) -> Any:
        return post(server, "two", [tensor("a", array, "INT64"), tensor("b", array, "INT64")]).json()

    with ThreadPoolExecutor(8) as clients:
        replies = list(clients.map(ask, rows))
    for array, reply in zip(rows, replies, strict=True):
        total, difference = reply["outputs"]
        assert (total["shape"], total["data"]) == (list(array.shape), (2 * array).ravel().tolist())
        assert difference["data"] == [0] * array.size


def test_any_handler_gets_arrays_and_its_arrays_come_back(server: Any) -> None:
    inputs = [
        tensor("f", [[1.5, -0.0]]),
        {"name": "t", "shape": [2], "datatype": "BYTES", "data": ["a", "é"]},
        {"name": "h", "shape": [1], "datatype": "BF16", "data": [1.5]},
        {"name": "none", "shape": [0, 3], "datatype": "INT8", "data": []},
    ]
    outputs = post(server, "echo", inputs).json()["outputs"]
    assert [(o["name"], o["datatype"], o["shape"]) for o in outputs[:2]] == [
        ("f", "FP32", [1, 2]),
        ("t", "BYTES", [2]),
    ]
    assert [o["data"] for o in outputs] == [[1.5, -0.0], ["a", "é"], [1.5], []]


def test_a_body_of_another_kind_reaches_the_handler_as_it_is(server: Any) -> None:
    reply = server.call(
        "POST", "/v2/models/echo/infer", b'{"instances": []}', content_type="application/json"
    )
    assert reply.json() == {"body": "dict"}


def test_outputs_are_chosen_and_classified(server: Any) -> None:
    wanted = [{"name": "difference"}, {"name": "sum", "parameters": {"classification": 1}}]
    inputs = [tensor("a", [[5, 1]], "INT64"), tensor("b", [[1, 9]], "INT64")]
    outputs = post(server, "two", inputs, outputs=wanted).json()["outputs"]
    assert [(o["name"], o["data"]) for o in outputs] == [("difference", [4, -8]), ("sum", ["10:1"])]


@pytest.mark.parametrize(
    ("model", "inputs", "text"),
    [
        ("linear", [tensor("input", [[1, 2]])], "inputs[0].shape: found [1, 2], expected [-1, 4]"),
        (
            "linear",
            [tensor("input", [[1, 2, 3, 4]], "FP64")],
            "inputs[0].datatype: found FP64, expected FP32",
        ),
        ("linear", [tensor("x", [[1]])], "inputs[0].name: found 'x', expected one of 'input'"),
        ("echo", [{**tensor("x", [1.0]), "shape": [2**63]}], "inputs[0].shape[0]: found 9223372036854775808"),
        ("echo", [{**tensor("x", [1.0]), "shape": [-1]}], "inputs[0].shape[0]: found -1"),
    ],
)
def test_a_bad_tensor_is_refused_and_the_next_request_is_answered(
    server: Any, model: str, inputs: list[Any], text: str
) -> None:
    reply = post(server, model, inputs)
    assert reply.status == 400
    assert reply.json()["error"].startswith(text)
    assert post(server, "echo", [tensor("x", [1.0])]).status == 200


def test_an_output_that_there_is_none_of_is_refused(server: Any) -> None:
    reply = post(server, "echo", [tensor("x", [1.0])], outputs=[{"name": "y"}])
    assert (reply.status, reply.json()["error"]) == (400, "outputs[0].name: found 'y', expected one of 'x'")


def test_what_the_handler_refuses_keeps_its_status(server: Any) -> None:
    reply = post(server, "echo", [tensor("refuse", [1.0])])
    assert (reply.status, reply.json()["error"]) == (422, "not that")


def test_a_stream_is_events_and_generate_joins_it(server: Any) -> None:
    body = json.dumps(
        {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
    ).encode()
    reply = server.call("POST", "/v2/models/echo/versions/1.0/infer", body, accept="text/event-stream")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [json.loads(event.removeprefix(b"data: ")) for event in reply.body.split(b"\n\n") if event]
    assert [event["outputs"][0]["data"] for event in events] == [["one "], ["two "], ["three"]]
    reply = server.call("POST", "/v2/models/echo/generate", b'{"text": "x"}')
    assert reply.json()["output_0"] == "one two three"
    reply = server.call("POST", "/v2/models/echo/generate_stream", b'{"text": "x"}')
    assert reply.body.count(b"data: ") == 3
    assert (
        post(server, "echo", [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["x"]}]).status
        == 400
    )


def test_a_sequence_keeps_its_state_until_its_client_ends_it(server: Any) -> None:
    def add(value: int, name: Any, **flags: bool) -> Any:
        parameters = {"sequence_id": name, **flags}
        return post(server, "counter", [tensor("add", [value], "INT64")], parameters=parameters)

    def total(reply: Any) -> Any:
        return reply.json()["outputs"][0]["data"][0]

    assert total(add(1, 11, sequence_start=True)) == 1
    assert total(add(2, "b", sequence_start=True)) == 2
    assert total(add(4, 11)) == 5
    assert add(1, 12, sequence_start=True).status == 503  # two are all that may go on
    assert total(add(8, 11, sequence_end=True)) == 13
    assert total(add(1, 12, sequence_start=True, sequence_end=True)) == 1
    assert total(add(1, "b", sequence_end=True)) == 3


def test_statistics_count_what_was_asked(server: Any) -> None:
    def told() -> Any:
        return server.call("GET", "/v2/models/two/stats").json()["model_stats"][0]

    before = told()
    inputs = [tensor("a", [[5, 1]], "INT64"), tensor("b", [[1, 9]], "INT64")]
    assert post(server, "two", inputs).status == 200
    after = told()
    assert after["inference_count"] == before["inference_count"] + 1
    assert after["execution_count"] == before["execution_count"] + 1
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]


def test_a_model_can_be_unloaded_and_loaded_by_name(server: Any) -> None:
    def repository(path: str) -> Any:
        return server.call("POST", f"/v2/repository/{path}", b"", api="management")

    assert repository("models/two/unload").status == 200
    assert server.call("GET", "/v2/models/two/ready").status == 404
    assert repository("models/two/load").status == 200
    assert {"name": "two", "version": "1.0", "state": "READY"} in repository("index").json()
    assert repository("models/nothing/load").status == 404


def test_npy_files_go_in_and_come_out(server: Any) -> None:
    file = io.BytesIO()
    np.save(file, np.ones((2, 4), np.float32))
    reply = server.call("POST", "/predictions/linear", file.getvalue(), accept="application/x-npy")
    assert reply.headers["content-type"] == "application/x-npy"
    assert np.load(io.BytesIO(reply.body)).shape == (2, 3)
