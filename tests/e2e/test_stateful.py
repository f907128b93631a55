"""Handlers that keep state, as TorchServe's users write them: sequences and continuous batching."""

import http.client
import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

SUMS = """
from ts.torch_handler.base_handler import BaseHandler

class Sums(BaseHandler):
    def initialize(self, context):
        self.sums = {}
        self.initialized = True

    def handle(self, data, context):
        answers = []
        for i, row in enumerate(data):
            sequence = context.get_sequence_id(i)
            if context.get_request_header(i, context.header_key_sequence_start) == "true":
                self.sums[sequence] = 0
            self.sums[sequence] = self.sums.get(sequence, 0) + int(row["body"])
            context.set_response_header(i, context.header_key_sequence_id, sequence)
            answers.append({"sum": self.sums[sequence]})
        return answers
"""
SUMS_CONFIG = """
minWorkers: 2
maxWorkers: 2
batchSize: 4
maxBatchDelay: 10
sequenceBatching: true
sequenceMaxIdleMSec: 60000
maxNumSequence: 8
maxSequenceJobQueueSize: 8
"""
COUNTDOWN = """
from ts.torch_handler.base_handler import BaseHandler

class Countdown(BaseHandler):
    def initialize(self, context):
        self.left = {}
        self.initialized = True

    def handle(self, data, context):
        ids = [context.get_request_id(i) for i in range(len(data))]
        for name, row in zip(ids, data):
            if row:  # a request that goes on comes without parameters
                self.left[name] = int(row["body"])
            self.left[name] -= 1
        context.stopping_criteria = [lambda answer, name=name: self.left[name] <= 0 for name in ids]
        return [f"{self.left[name]} " for name in ids]
"""
CRITERIA_SET_ONCE = """
from ts.torch_handler.base_handler import BaseHandler

class Countdown(BaseHandler):
    def initialize(self, context):
        self.left = {}
        context.stopping_criteria = [lambda answer: answer == "0 "] * 8  # more than a batch has
        self.initialized = True

    def handle(self, data, context):
        ids = [context.get_request_id(i) for i in range(len(data))]
        for name, row in zip(ids, data):
            self.left[name] = (int(row["body"]) if row else self.left[name]) - 1
        return [f"{self.left[name]} " for name in ids]
"""
COUNTDOWN_CONFIG = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 5\ncontinuousBatching: true\n"


@pytest.fixture(scope="module")
def server(pack: Any, open_server: Any) -> Any:
    for name, source, config in (
        ("sums", SUMS, SUMS_CONFIG),
        ("countdown", COUNTDOWN, COUNTDOWN_CONFIG),
        ("once", CRITERIA_SET_ONCE, COUNTDOWN_CONFIG),
    ):
        archive = pack(name, {"h.py": source, "c.yaml": config}, handler="h.py", configFile="c.yaml")
        assert open_server.register(archive).status == 200
    return open_server


def add(server: Any, number: int, sequence: str = "") -> Any:
    headers = {"content-type": "text/plain"}
    if sequence:
        headers["ts_request_sequence_id"] = sequence
    return server.call("POST", "/predictions/sums", str(number).encode(), headers=headers)


def test_a_sequence_keeps_its_state_and_its_order_beside_others(server: Any) -> None:
    sums: dict[str, list[int]] = {}

    def run(name: str) -> None:
        for number in range(1, 6):
            reply = add(server, number, name)
            sums.setdefault(name, []).append(json.loads(reply.body)["sum"])

    threads = [threading.Thread(target=run, args=(f"sequence-{i}",)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {f"sequence-{i}": [1, 3, 6, 10, 15] for i in range(5)}


def test_a_request_without_a_sequence_begins_one_that_can_be_continued(server: Any) -> None:
    first = add(server, 5)
    name = first.headers["ts_request_sequence_id"]
    assert name.startswith("ts-seq-")
    assert add(server, 6, name).json() == {"sum": 11}


@pytest.mark.parametrize("model", ["countdown", "once"])
def test_continuous_batching_streams_until_the_handler_is_done(server: Any, model: str) -> None:
    answers: dict[int, Any] = {}

    def run(number: int) -> None:
        answers[number] = server.call("POST", f"/predictions/{model}", str(number).encode())

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 3, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {number: answer.body for number, answer in answers.items()} == {
        1: b"0 ",
        3: b"2 1 0 ",
        6: b"5 4 3 2 1 0 ",
    }
    assert "content-length" in answers[1].headers  # done at once: an ordinary answer
    assert answers[6].headers["transfer-encoding"] == "chunked"


def test_answers_that_are_under_way_are_finished_by_a_worker_that_is_to_end(
    pack: Any, open_server: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    step = f'            while not row and not os.path.exists("{go}"):\n                time.sleep(0.01)\n'
    source = f"import os, time\n{COUNTDOWN}".replace("            if row:", f"{step}            if row:")
    config = COUNTDOWN_CONFIG.replace("orkers: 1", "orkers: 2").replace("batchSize: 4", "batchSize: 1")
    archive = pack("patient", {"h.py": source, "c.yaml": config}, handler="h.py", configFile="c.yaml")
    assert open_server.register(archive).status == 200
    path = "/models/patient?min_worker=1&max_worker=1"
    with ExitStack() as open_connections:
        streams = []
        for _ in range(2):
            connection = http.client.HTTPConnection(open_server.rest["inference"], timeout=30)
            open_connections.callback(connection.close)
            connection.request("POST", "/predictions/patient", b"4", {"content-type": "text/plain"})
            streams.append(connection.getresponse())  # its head comes with the first part
        assert open_server.call("PUT", path, api="management").status == 202
        until_s = time.monotonic() + 30
        while open_server.call("GET", "/models/patient", api="management").json()[0]["workers"][1:]:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        go.touch()
        assert [stream.read() for stream in streams] == [b"3 2 1 0 "] * 2


def test_describe_shows_how_a_stateful_model_is_set(server: Any) -> None:
    described = server.call("GET", "/models/sums", api="management").json()[0]
    assert (described["stateful"], described["maxNumSequence"], described["sequenceMaxIdleMSec"]) == (
        True,
        8,
        60000,
    )
    assert server.call("GET", "/models/countdown", api="management").json()[0]["continuousBatching"] is True


def test_sequences_that_may_idle_for_ever_are_refused_also_after_the_model_was_loaded_again(
    pack: Any, open_server: Any
) -> None:
    config = "minWorkers: 1\nmaxWorkers: 1\nsequenceBatching: true\n"
    archive = pack("endless", {"h.py": SUMS, "c.yaml": config}, handler="h.py", configFile="c.yaml")
    assert open_server.register(archive).status == 200
    statuses = [open_server.call("POST", "/predictions/endless", b"1").status]
    for count in (0, 1):
        path = f"/models/endless?min_worker={count}&max_worker={count}&synchronous=true"
        assert open_server.call("PUT", path, api="management").status == 200
        statuses.append(open_server.call("POST", "/predictions/endless", b"1").status)
    assert statuses == [503, 503, 503]
