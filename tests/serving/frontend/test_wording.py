import dataclasses
import json
import os

import psutil
import pytest

from torchere.serving.config.server_settings import ModelSettings, SnapshotWorkflow
from torchere.serving.config.workflow_spec import read_workflow_spec
from torchere.serving.frontend import wording
from torchere.serving.frontend.control import Progress, Registered
from torchere.serving.frontend.wording import customized_text, page_text, versions_text, workflow_text
from torchere.serving.frontend.workflows import Page
from torchere.serving.registry.workflows import Workflow
from torchere.serving.types import InferResponse, ModelKey
from torchere.serving.workers.executor import ExecutorState

FIELDS = [
    *("modelName", "modelVersion", "modelUrl", "runtime", "minWorkers", "maxWorkers", "batchSize"),
    *("maxBatchDelay", "responseTimeout", "startupTimeout", "maxRetryTimeoutInSec", "clientTimeoutInMills"),
    *("parallelType", "parallelLevel", "deviceType", "continuousBatching", "useJobTicket", "useVenv"),
    *("stateful", "sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize"),
    *("loadedAtStartup", "workers", "jobQueueStatus"),
]

KEY = ModelKey("noop", "1.11")
NO_PROCESS = 2**22 + 1  # a number that none can have


def described(planes, **changes):
    changed = dataclasses.replace(planes.control.description, **changes)
    return json.loads(versions_text([changed]))[0]


def test_the_fields_come_in_the_known_order_and_ours_follow(planes):
    assert [*described(planes)] == [*FIELDS, "torchere"]


def test_a_ready_executor_is_a_ready_worker_with_its_start_in_utc(planes):
    executor = dataclasses.replace(planes.control.description.executors[0], pid=NO_PROCESS)
    worker = described(planes, executors=(executor,))["workers"][0]
    assert worker == {
        "id": "7",
        "startTime": "2026-01-02T03:04:05.678Z",
        "status": "READY",
        "memoryUsage": 0,
        "pid": NO_PROCESS,
        "gpu": False,
        "gpuUsage": "N/A",
    }


def test_threads_have_the_memory_of_the_server_which_is_looked_at_once(planes, monkeypatch):
    looked_at = []
    process = psutil.Process

    def look_at(pid):
        looked_at.append(pid)
        return process(pid)

    monkeypatch.setattr(psutil, "Process", look_at)
    thread = dataclasses.replace(planes.control.description.executors[0], pid=os.getpid())
    gone = dataclasses.replace(thread, pid=NO_PROCESS)
    workers = described(planes, executors=(thread, thread, thread, gone))["workers"]
    *of_threads, of_nothing = (worker["memoryUsage"] for worker in workers)
    assert len(set(of_threads)) == 1
    assert of_threads[0] > 0
    assert of_nothing == 0
    assert sorted(looked_at) == [os.getpid(), NO_PROCESS]


def test_an_executor_in_any_other_state_is_called_unloading(planes):
    executor = planes.control.description.executors[0]
    for state in set(ExecutorState) - {ExecutorState.READY}:
        other = dataclasses.replace(executor, state=state)
        assert described(planes, executors=(other,))["workers"][0]["status"] == "UNLOADING"


def test_a_version_on_gpus_says_so_and_each_executor_which(planes):
    executor = dataclasses.replace(planes.control.description.executors[0], gpu_id=1)
    found = described(planes, executors=(executor,), settings=ModelSettings(gpu_ids=(0, 1)))
    assert found["deviceType"] == "gpu"
    assert found["workers"][0]["gpuUsage"] == "gpuId::1"


def test_device_ids_stand_only_where_they_were_configured(planes):
    assert "deviceIds" not in described(planes)
    assert described(planes, settings=ModelSettings(device_ids=(0, 2)))["deviceIds"] == [0, 2]


def test_the_cause_of_a_failure_is_told(planes):
    found = described(planes, failure="exit code 7")
    assert found["torchere"] == {"state": "ready", "isolation": "thread", "failure": "exit code 7"}


def test_the_signer_of_the_archive_is_told_where_signatures_are_required(planes):
    assert "signer" not in described(planes)["torchere"]
    assert described(planes, signer="certificate CN=a")["torchere"]["signer"] == "certificate CN=a"


def test_a_ready_version_without_an_executor_in_service_tells_what_they_do(planes):
    assert described(planes, condition="restarting")["torchere"]["state"] == "restarting"


def test_a_handler_that_describes_itself_with_an_object_is_quoted(planes):
    text = customized_text(planes.control.description, InferResponse(b'{"a": 1}'))
    assert json.loads(text)[0]["customizedMetadata"] == {"a": 1}


def test_what_is_no_json_object_is_quoted_as_an_empty_one(planes):
    for body in (b"null", b"[1]", b"not json", b"\xff", b'{"a": "\xff"}', b"[" * 10_000):
        text = customized_text(planes.control.description, InferResponse(body))
        assert json.loads(text)[0]["customizedMetadata"] == {}


def test_an_empty_answer_is_left_out(planes):
    text = customized_text(planes.control.description, InferResponse(b""))
    assert "customizedMetadata" not in json.loads(text)[0]


def test_a_page_has_its_token_first_and_only_when_there_is_one():
    assert page_text(Page((), None)) == '{\n  "models": []\n}'
    page = json.loads(page_text(Page((("a", "a.mar"),), "1")))
    assert [*page] == ["nextPageToken", "models"]
    assert page["models"] == [{"modelName": "a", "modelUrl": "a.mar"}]


def test_the_url_of_a_model_is_shown_without_the_signature_in_its_query(planes):
    url = "https://bucket.s3.amazonaws.com/m.mar?X-Amz-Signature=0f"
    (listed,) = json.loads(page_text(Page((("m", url),), None)))["models"]
    shown = "https://bucket.s3.amazonaws.com/m.mar"
    assert described(planes, url=url)["modelUrl"] == listed["modelUrl"] == shown
    assert described(planes, url="a?b.mar")["modelUrl"] == "a?b.mar"  # a name in the store


def test_the_url_of_a_workflow_is_shown_without_the_signature_in_its_query():
    url = "https://bucket.s3.amazonaws.com/w.war?X-Amz-Signature=0f"
    spec = read_workflow_spec("models:\n  a: {url: a.mar}\ndag:\n  a: []\n")
    (workflow,) = json.loads(workflow_text(Workflow("w", SnapshotWorkflow(url), spec)))
    (listed,) = json.loads(page_text(Page((("w", url),), None), "workflow"))["workflows"]
    assert workflow["workflowUrl"] == listed["workflowUrl"] == "https://bucket.s3.amazonaws.com/w.war"


def test_a_file_name_that_is_not_utf_8_is_escaped_and_comes_back_as_it_is(planes):
    name = os.fsdecode(b"mod\xe9le.mar")
    listed = page_text(Page((("a", name), ("b", "b.mar")), None))
    text = versions_text([dataclasses.replace(planes.control.description, url=name)])
    assert '"mod\\udce9le.mar"' in listed
    assert listed.isascii()
    assert [model["modelUrl"] for model in json.loads(listed)["models"]] == [name, "b.mar"]
    assert json.loads(text)[0]["modelUrl"] == name


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (
            Registered(KEY, 0, Progress.DONE),
            'Model "noop" Version: 1.11 registered with 0 initial workers. '
            "Use scale workers API to add workers for the model.",
        ),
        (Registered(KEY, 2, Progress.DONE), 'Model "noop" Version: 1.11 registered with 2 initial workers'),
        (Registered(KEY, 2, Progress.STARTED), "Processing worker updates..."),
        (Registered(KEY, 2, Progress.PARTIAL), "Workers scaling in progress..."),
    ],
)
def test_registering_is_told_as_clients_know_it(result, sentence):
    assert wording.registered(result) == sentence


def test_scaling_names_the_version_only_when_one_was_given():
    assert wording.scaled(Progress.DONE, "noop", None, 2) == "Workers scaled to 2 for model: noop"
    assert (
        wording.scaled(Progress.DONE, "noop", "1.0", 2) == "Workers scaled to 2 for model: noop, version: 1.0"
    )
    assert wording.scaled(Progress.STARTED, "noop", None, 2) == "Processing worker updates..."
    assert wording.scaled(Progress.PARTIAL, "noop", None, 2) == "Workers scaling in progress..."


def test_the_other_sentences_name_the_model():
    assert wording.unregistered("noop") == 'Model "noop" unregistered'
    assert wording.default_set(KEY) == 'Default version successfully updated for model "noop" to "1.11"'
