"""Settings of TorchServe's that few use, on one server that has them all."""

import http.client
import io
import json
import pstats
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

AT_ONCE = 20  # as in the handler
ASYNC = """
import asyncio, json, os
from ts.handler_utils.utils import send_intermediate_predict_response

class Handler:
    def initialize(self, context):
        self.inside, self.together, self.cancelled = 0, None, 0

    async def handle(self, data, context):
        assert len(data) == 1
        body = data[0].get("body")
        wish = bytes(body).decode() if isinstance(body, bytearray) else str(body)
        if wish == "cancelled":
            return [str(self.cancelled)]
        if wish == "exit":
            raise SystemExit(3)
        if wish == "fail":
            raise ValueError("no")
        if wish == "forever":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if wish == "parts":
            for part in ("a", "b"):
                send_intermediate_predict_response([part], context.request_ids, "", 200, context)
                await asyncio.sleep(0)
            return ["c"]
        self.together = self.together or asyncio.Event()
        self.inside += 1
        if self.inside == 20:
            self.together.set()
        await self.together.wait()
        context.metrics.add_counter("Seen", 1, 0)
        return [{"header": context.get_request_header(0, "Who"), "id": context.get_request_id(0)}]
"""
ASYNC_CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 5000\nasyncCommunication: true\n"
TELLS = """
import os

def handle(data, context):
    if data is None:
        return
    names = [name for name in os.environ if name.startswith("TS_")]
    headers = context.get_all_request_header(0)
    sequence = context.get_sequence_id(0)
    context.set_response_header(0, context.header_key_sequence_id, sequence or "")
    context.set_response_header(0, context.header_key_sequence_end, sequence or "")
    return [{"environment": {name: os.environ[name] for name in names}, "headers": headers}]
"""
SEQUENCES = "minWorkers: 1\nmaxWorkers: 1\nsequenceBatching: true\ncontinuousBatching: true\n"
SEQUENCES += "sequenceMaxIdleMSec: 60000\nmaxNumSequence: 1\n"
SAMPLE = """
print("CPUUtilization.Percent:77.5|#Level:Host|#hostname:elsewhere,1700000000")
print("Unheard.Count:1|#Level:Host|#hostname:elsewhere,1700000000")
print("")
print("1:5")
"""


class Model(torch.nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(dim=1, keepdim=True)


@pytest.fixture(scope="module")
def server(pack: Any, start_server: Any, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = tmp_path_factory.mktemp("script") / "sample.py"
    script.write_text(SAMPLE)
    model = io.BytesIO()
    torch.jit.save(torch.jit.script(Model()), model)
    configured = {"handler": "h.py", "configFile": "c.yaml"}
    pack("parallel", {"h.py": ASYNC, "c.yaml": ASYNC_CONFIG}, **configured)
    pack("impatient", {"h.py": ASYNC, "c.yaml": ASYNC_CONFIG + "responseTimeout: 1\n"}, **configured)
    pack("tells", {"h.py": TELLS, "c.yaml": SEQUENCES}, **configured)
    pack("dense", {"m.pt": model.getvalue()}, handler="densenet_handler", serializedFile="m.pt")
    pack(
        "cpp", {"m.pt": model.getvalue()}, runtime="LSP", handler="TorchScriptHandler", serializedFile="m.pt"
    )
    properties = (
        f"system_metrics_cmd={script} --gpu 0\nts_header_key_sequence_id=x-chat\n"
        "ts_header_key_sequence_end=x-chat-over\ndecode_input_request=false\nipex_enable=true\n"
    )
    folder = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TS_BENCHMARK", "True")
        environment.setenv("SM_TELEMETRY_LOG", "/somewhere")
        environment.setenv("TMPDIR", str(folder))
        running = start_server("--disable-token-auth", "--enable-model-api", properties=properties)
    for name in ("parallel", "impatient", "tells", "dense", "cpp"):
        assert running.register(f"{name}.mar", initial_workers=1).status == 200
    running.profiles = folder
    return running


def test_an_asynchronous_handler_gets_requests_while_others_wait_each_with_its_own_context(
    server: Any,
) -> None:
    def ask(number: int) -> Any:
        return server.call("POST", "/predictions/parallel", b"wait", headers={"Who": str(number)})

    with ThreadPoolExecutor(AT_ONCE) as clients:
        replies = list(clients.map(ask, range(AT_ONCE)))
    assert [reply.json()["header"] for reply in replies] == [str(number) for number in range(AT_ONCE)]
    assert [reply.json()["id"] for reply in replies] == [reply.headers["x-request-id"] for reply in replies]


def test_an_asynchronous_handler_answers_in_parts_and_fails_for_one_request(server: Any) -> None:
    assert server.call("POST", "/predictions/parallel", b"parts").body == b"abc"
    assert server.call("POST", "/predictions/parallel", b"fail").status == 503


def test_a_client_that_leaves_cancels_its_coroutine(server: Any) -> None:
    before = int(server.call("POST", "/predictions/parallel", b"cancelled").body)
    client = http.client.HTTPConnection(server.rest["inference"])
    client.request("POST", "/predictions/parallel", b"forever", {"content-type": "application/octet-stream"})
    client.close()
    while int(server.call("POST", "/predictions/parallel", b"cancelled").body) == before:
        time.sleep(0.01)


def test_a_coroutine_that_takes_too_long_costs_its_own_request(server: Any) -> None:
    assert server.call("POST", "/predictions/impatient", b"forever").status == 504
    assert server.call("POST", "/predictions/impatient", b"cancelled").status == 200


def test_an_asynchronous_handler_that_ends_its_process_is_started_again(server: Any) -> None:
    reply = server.call("POST", "/predictions/parallel", b"exit")
    assert (reply.status, reply.json()["message"]) == (500, "Worker died.")
    assert server.call("POST", "/predictions/parallel", b"cancelled").body == b"0"
    assert server.logs("ModelServerError.Count:1|#TorchServe:0.12.0,")


def test_workers_have_torchserves_variables_and_the_names_of_the_headers(server: Any) -> None:
    told = server.call("POST", "/predictions/tells", b"{}", headers={"X-Chat": "mine"})
    assert told.json()["environment"].items() >= {
        ("TS_DECODE_INPUT_REQUEST", "false"),
        ("TS_IPEX_ENABLE", "true"),
        ("TS_IPEX_GPU_ENABLE", "false"),
        ("TS_REQUEST_SEQUENCE_ID", "x-chat"),
        ("TS_REQUEST_SEQUENCE_END", "x-chat-over"),
    }
    assert (told.headers["x-chat"], told.headers["x-chat-over"]) == ("mine", "mine")
    # Only one sequence may be open: the handler has ended the first one under the other name.
    begun = server.call("POST", "/predictions/tells", b"{}")
    assert begun.status == 200
    assert begun.headers["x-chat"].startswith("ts-seq-")
    assert begun.json()["headers"]["ts_request_sequence_start"] == "true"


def test_an_archive_of_the_cpp_backend_takes_and_answers_tensors(server: Any) -> None:
    file = io.BytesIO()
    torch.save(torch.tensor([1.0, 2.0]), file)
    answer = server.call("POST", "/predictions/cpp", file.getvalue())
    assert answer.status == 200
    assert torch.equal(torch.load(io.BytesIO(answer.body)), torch.tensor([3.0]))
    refused = server.call("POST", "/predictions/cpp", b"no tensor")
    assert (refused.status, refused.json()["code"]) == (400, 400)


def test_the_operators_script_samples_the_host(server: Any) -> None:
    while "CPUUtilization{" not in (text := server.call("GET", "/metrics", api="metrics").body.decode()):
        time.sleep(0.02)
    assert 'CPUUtilization{Level="Host",' in text
    assert "} 77.5" in text
    assert "MemoryUsed{" not in text


def test_the_profile_of_a_worker_is_in_the_temporary_folder(server: Any) -> None:
    assert server.call("POST", "/predictions/dense", json.dumps([1.0]).encode()).status == 400  # not decoded
    profile = pstats.Stats(str(server.profiles / "tsPythonProfile.prof"))
    assert any("handle" in function for _, _, function in profile.stats)  # type: ignore[attr-defined]


def test_the_handler_of_tensors_takes_files_of_torch_and_numpy(server: Any) -> None:
    for save in (torch.save, lambda tensor, file: np.save(file, tensor.numpy())):
        file = io.BytesIO()
        save(torch.tensor([1.0, 2.5]), file)
        reply = server.call("POST", "/predictions/dense", file.getvalue())
        assert torch.equal(torch.load(io.BytesIO(reply.body)), torch.tensor([[3.5]]))
