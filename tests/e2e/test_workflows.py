"""Workflows on a real server: statuses and texts as TorchServe 0.12.0 gave them, and what is better here."""

import contextlib
import io
import json
import os
import signal
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from servers import RunningServer

ECHO = """
def handle(data, context):
    if data is None:
        return None
    names = {name: bytes(value).decode() for name, value in data[0].items()}
    return [{"model": context.model_name, "row": names}] * len(data)
"""
TEA = """
def handle(data, context):
    if data is None:
        return None
    context.set_response_content_type(0, "text/x-tea")
    return ["tea"] * len(data)
"""
REFUSES = """
from torchere.handlers.errors import PredictionException
from torchere.handlers.rows import refusal

def handle(data, context):  # as built-in handlers do
    return data and [refusal(context, i, PredictionException("no picture", 400)) for i in range(len(data))]
"""
FUNCTIONS = """
import os, time

def value(row):
    return bytes(row.get("data") or row.get("body") or b"")

def start(data, context):
    return data and [value(row) for row in data]

def left(data, context):
    return data and [value(row) + b"<" for row in data]

def right(data, context):
    return data and [value(row) + b">" for row in data]

def join(data, context):
    return data and [bytes(row["left"]) + bytes(row["right"]) for row in data]

def fails(data, context):
    if data is not None:
        raise ValueError("not today")

def dies(data, context):
    if data is not None:
        os._exit(3)

def ids(data, context):
    return data and [context.get_request_id(i) for i in range(len(data))]

def says_404(data, context):
    if data is not None:
        context.set_response_status(404)
    return data and [b"not here"] * len(data)

def hangs(data, context):
    if data is not None:
        time.sleep(600)

def waits(data, context):  # in the folder that the request names
    if data is None:
        return None
    folder = value(data[0]).decode()
    open(os.path.join(folder, "began"), "w").close()
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.01)
    return [b"went"]

def slow(data, context):
    if data is not None:
        time.sleep(0.3)
    return data and [value(row) for row in data]

tries = 0

def second_time(data, context):
    global tries
    if data is not None:
        tries += 1
        if tries % 2:
            raise ValueError("the first attempt fails")
    return data and [b"done"] * len(data)
"""
MODELS = "models:\n  timeout-ms: 5000\n  echo:\n    url: wf_echo.mar\n  tea:\n    url: wf_tea.mar\n"
REFUSING = f"{MODELS}  refuses:\n    url: wf_refuses.mar\n"


@pytest.fixture(scope="module")
def server(
    store: Path, pack: Callable[..., str], start_server: Callable[..., RunningServer]
) -> RunningServer:
    pack("wf_echo", {"h.py": ECHO}, handler="h.py")
    pack("wf_tea", {"h.py": TEA}, handler="h.py")
    pack("wf_refuses", {"h.py": REFUSES}, handler="h.py")
    return start_server("--disable-token-auth", "--enable-model-api")


@pytest.fixture(scope="module")
def add(server: RunningServer, pack_workflow: Callable[..., str]) -> Callable[..., None]:
    """Packs a workflow and registers it."""

    def adder(name: str, dag: str, models: str = MODELS, **options: object) -> None:
        answer = register(server, pack_workflow(name, f"{models}dag:\n{dag}"), **options)
        assert answer.status == 200, answer.body

    return adder


@pytest.fixture(scope="module")
def pack_workflow(store: Path) -> Callable[..., str]:
    def packer(name: str, spec: str | None, handler: str | None = FUNCTIONS, **members: str) -> str:
        entry = {"workflowName": name, "specFile": "w.yaml", **({"handler": "f.py"} if handler else {})}
        with zipfile.ZipFile(store / f"{name}.war", "w") as archive:
            archive.writestr("WAR-INF/MANIFEST.json", json.dumps({"workflow": {**entry, **members}}))
            if spec is not None:
                archive.writestr("w.yaml", spec)
            if handler:
                archive.writestr("f.py", handler)
        return f"{name}.war"

    return packer


def register(server: RunningServer, archive: str, **options: object):
    query = "&".join([f"url={archive}", *(f"{key}={value}" for key, value in options.items())])
    return server.call("POST", f"/workflows?{query}", api="management")


def managed(server: RunningServer, method: str, path: str):
    return server.call(method, path, api="management")


def models(server: RunningServer) -> list[str]:
    return [each["modelName"] for each in managed(server, "GET", "/models").json()["models"]]


def test_a_workflow_runs_from_registration_to_removal(server, pack_workflow):
    archive = pack_workflow("life", f"{MODELS}dag:\n  start: [echo]\n  echo: [right]\n")
    answer = register(server, archive)
    assert answer.json() == {"status": "Workflow life has been registered and scaled successfully."}
    assert {"workflowName": "life", "workflowUrl": "life.war"} in managed(server, "GET", "/workflows").json()[
        "workflows"
    ]
    assert managed(server, "GET", "/workflows/life").json() == [
        {
            "workflowName": "life",
            "workflowUrl": "life.war",
            "minWorkers": 1,
            "maxWorkers": 1,
            "batchSize": 1,
            "maxBatchDelay": 50,
            "workflowDag": "{start=[echo], echo=[right]}",
        }
    ]
    assert "life__echo" in models(server)
    assert "life__start" not in models(server)  # functions are hidden
    answer = server.call("POST", "/wfpredict/life", b"hello")
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body.removesuffix(b">")) == {"model": "life__echo", "row": {"body": "hello"}}
    answer = managed(server, "DELETE", "/workflows/life")
    assert answer.json() == {"status": 'Workflow "life" unregistered'}
    assert "life__echo" not in models(server)
    assert server.call("POST", "/wfpredict/life").json() == {
        "code": 404,
        "type": "WorkflowNotFoundException",
        "message": "Workflow not found: life",
    }


def test_an_unknown_setting_of_a_model_is_said_and_ignored(server, pack_workflow):
    archive = pack_workflow("odd", f"{MODELS}    response-timeout: 30\ndag:\n  tea: []\n")
    assert register(server, archive).status == 200
    assert server.logs("workflow odd: unknown settings are ignored: 'response-timeout' of the model 'tea'")
    assert managed(server, "DELETE", "/workflows/odd").status == 200


def test_the_models_own_pair_of_workers_counts_before_the_specification(server, pack, pack_workflow):
    config = "minWorkers: 1\nmaxWorkers: 2\nbatchSize: 4\n"
    pack("wf_pair", {"h.py": ECHO, "c.yaml": config}, handler="h.py", configFile="c.yaml")
    shared = "models:\n  max-workers: 3\n  batch-size: 2\n"
    archive = pack_workflow(
        "pair", f"{shared}  own: {{url: wf_pair.mar}}\n  not: {{url: wf_echo.mar}}\ndag:\n  own: [not]\n"
    )
    assert register(server, archive).status == 200
    found = {}
    for step in ("own", "not"):
        (model,) = managed(server, "GET", f"/models/pair__{step}").json()
        found[step] = (model["minWorkers"], model["maxWorkers"], model["batchSize"])
    assert found == {"own": (1, 2, 2), "not": (3, 3, 2)}
    assert managed(server, "DELETE", "/workflows/pair").status == 200


def test_the_first_step_gets_the_request_and_a_join_gets_each_parents_result_by_name(server, add):
    add("diamond", "  start: [left, right]\n  left: [join]\n  right: [join]\n")
    assert server.call("POST", "/wfpredict/diamond", b"x").body == b"x<x>"
    form = {"content_type": "application/x-www-form-urlencoded"}
    assert server.call("POST", "/wfpredict/diamond", b"data=y&other=z", **form).body == b"y<y>"
    assert server.call("GET", "/WFPredict/diamond/more?x=1").body == b"<>"
    add("form", "  echo: []\n")
    assert server.call("POST", "/wfpredict/form", b"a=1&b=2", **form).json()["row"] == {"a": "1", "b": "2"}


def test_several_leaves_answer_an_object(server, add):
    add("leaves", "  start: [echo, left]\n")
    assert server.call("POST", "/wfpredict/leaves", b"x").json() == {
        "echo": {"model": "leaves__echo", "row": {"body": "x"}},
        "left": "x<",
    }


def test_the_handler_of_the_last_step_names_the_content_type(server, add):
    add("tea", "  start: [tea]\n")
    answer = server.call("POST", "/wfpredict/tea", b"x")
    assert (answer.headers["content-type"], answer.body) == ("text/x-tea", b"tea")


@pytest.mark.parametrize("step", ["fails", "dies", "hangs"])
def test_a_step_that_fails_gives_one_error_and_the_server_goes_on(server, add, step):
    quick = MODELS.replace("5000", "400")
    add(
        f"one_{step}",
        f"  start: [left, {step}]\n  left: [join]\n  {step}: [join]\n",
        quick,
        response_timeout=2,
    )
    for _ in range(2):
        answer = server.call("POST", f"/wfpredict/one_{step}", b"x")
        assert (answer.status, answer.json()) == (
            500,
            {"code": 500, "type": "InternalServerException", "message": f"Error executing {step}"},
        )
    assert server.logs(f"workflow one_{step}: step {step} failed: ")
    assert managed(server, "DELETE", f"/workflows/one_{step}").status == 200


def test_steps_have_the_id_that_the_answer_names(server, add):
    add("known", "  ids: [right]\n")
    answer = server.call("POST", "/wfpredict/known", b"x")
    assert answer.body.decode() == answer.headers["x-request-id"] + ">"
    add("unknown", "  fails: []\n")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    answer = server.call("POST", "/wfpredict/unknown", b"x", headers=headers)
    assert server.logs("workflow unknown: step fails failed")
    (line,) = [line for line in server.log().splitlines() if "workflow unknown: step fails failed" in line]
    assert json.loads(line)["request_id"] == answer.headers["x-request-id"]
    assert json.loads(line)["trace_id"] == trace_id


@pytest.mark.parametrize("dag", ["refuses: [echo]", "start: [refuses, left]", "start: [refuses]"])
def test_a_step_whose_built_in_handler_refuses_its_input_ends_the_graph(server, add, dag):
    add("refused", f"  {dag}\n", REFUSING)
    try:
        answer = server.call("POST", "/wfpredict/refused", b"x")
        assert answer.status == 400
        assert answer.json()["message"] == "Error executing refuses: no picture"
    finally:
        managed(server, "DELETE", "/workflows/refused")


def test_a_picture_that_can_not_be_read_ends_the_graph_with_the_reason(server, add, pack):
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), program)
    pack("wf_colours", {"net.pt": program.getvalue()}, handler="image_classifier", serializedFile="net.pt")
    add("pictures", "  colours: [echo]\n", f"{MODELS}  colours:\n    url: wf_colours.mar\n")
    answer = server.call("POST", "/wfpredict/pictures", b"no picture")
    assert answer.status == 400
    assert answer.json()["message"].startswith("Error executing colours: The request ")


def test_a_status_that_a_handler_sets_itself_is_for_clients_not_for_the_next_step(server, add):
    add("odd", "  says_404: [right]\n")
    answer = server.call("POST", "/wfpredict/odd", b"x")
    assert (answer.status, answer.body) == (200, b"not here>")


def test_a_step_is_tried_again_as_often_as_retry_attempts_says(server, add):
    add("again", "  second_time: []\n")
    assert server.call("POST", "/wfpredict/again", b"x").body == b"done"
    add("once", "  second_time: []\n", MODELS.replace("models:\n", "models:\n  retry-attempts: 0\n"))
    assert server.call("POST", "/wfpredict/once", b"x").status == 500


def test_one_deadline_bounds_the_whole_graph(server, add):
    add("long", "  slow: [echo]\n")
    timeout = {"x-torchere-timeout-ms": "100"}
    answer = server.call("POST", "/wfpredict/long", b"x", headers=timeout)
    assert (answer.status, answer.json()["message"]) == (504, "The deadline passed at the step slow.")


def test_branches_run_at_the_same_time(server, pack_workflow):
    functions = """
import threading, time
def start(data, context):
    return data and [b"x"] * len(data)
def meets(data, context):  # both steps wait for each other's file
    import os
    if data is None:
        return None
    own, other = context.model_name[-1], {"a": "b", "b": "a"}[context.model_name[-1]]
    folder = bytes(FOLDER)
    open(os.path.join(folder, own.encode()), "w").close()
    until = time.monotonic() + 20
    while not os.path.exists(os.path.join(folder, other.encode())):
        assert time.monotonic() < until, "the other branch does not run"
        time.sleep(0.01)
    return [own] * len(data)
a = b = meets
"""
    folder = server.folder / "meeting"
    folder.mkdir()
    functions = functions.replace("bytes(FOLDER)", repr(os.fsencode(folder)))
    spec = "models:\n  timeout-ms: 30000\ndag:\n  start: [a, b]\n"
    assert register(server, pack_workflow("meet", spec, functions)).status == 200
    assert server.call("POST", "/wfpredict/meet", b"x").json() == {"a": "a", "b": "b"}


LACKS = "models:\n  a:\n    url: {}\ndag:\n  start: [a]\n"


@pytest.mark.parametrize(
    ("spec", "status_and_kind", "message"),
    [
        ("dag:\n  a: [b]\n  b: [a]\n", (400, "InvalidDAG"), "DAG should have only one start node"),
        ("dag:\n  a: [b]\n  b: [c]\n  c: [b]\n", (400, "InvalidDAG"), "Not a valid DAG"),
        ("dag:\n  start: [left, left]\n", (400, "InvalidDAG"), "loop exception"),
        ("dag: [", (400, "InvalidWorkflow"), "Failed to parse yaml."),
        (
            *("dag:\n  nowhere: []\n", (400, "InvalidWorkflow")),
            "The node 'nowhere' is neither in 'models' nor a function of f.py.",
        ),
        (
            *(LACKS.format("not_there.mar"), (500, "Workflow")),
            "Workflow bad has failed to register. Failures: [Workflow Node bad__a failed to register. "
            "Details: Model not found at: not_there.mar]",
        ),
        (
            *(LACKS.format("wf_broken.mar"), (500, "Workflow")),
            "Workflow bad has failed to register. Failures: [Failed to start workers for model bad__a "
            "version: 1.0]",
        ),
    ],
)
def test_a_workflow_that_can_not_run_is_refused_and_leaves_nothing(
    server, bad_workflow, spec, status_and_kind, message
):
    before = models(server)
    answer = register(server, bad_workflow(spec))
    found = answer.json()
    assert (answer.status, found["type"].removesuffix("Exception")) == status_and_kind
    assert found["message"] == message
    assert models(server) == before
    assert managed(server, "GET", "/workflows/bad").status == 404


@pytest.fixture
def bad_workflow(pack, pack_workflow) -> Callable[[str], str]:
    pack("wf_broken", {"h.py": "raise ValueError('broken')"}, handler="h.py")
    return lambda spec: pack_workflow("bad", spec)


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("", 400, "Parameter url is required."),
        ("?url=", 404, "Workflow not found at: "),
        ("?url=none.war", 404, "Workflow not found in workflow store: none.war"),
        ("?url=../x.war", 404, "Relative path is not allowed in url: ../x.war"),
        ("?url=http://127.0.0.1:1/x.war", 404, None),
        ("?url=named.war&workflow_name=a%2Fb", 400, None),
    ],
)
def test_a_registration_without_a_workflow_is_refused(server, pack_workflow, query, status, message):
    pack_workflow("named", "dag:\n  start: []\n")
    answer = managed(server, "POST", f"/workflows{query}")
    assert answer.status == status
    assert message in (None, answer.json()["message"])


def test_a_name_is_given_once_and_may_differ_from_the_manifests(server, pack_workflow):
    archive = pack_workflow("twin", "dag:\n  start: [left]\n")
    with ThreadPoolExecutor(4) as pool:
        statuses = sorted(answer.status for answer in pool.map(lambda _: register(server, archive), range(4)))
    assert statuses == [200, 409, 409, 409]
    answer = register(server, archive)
    assert answer.json()["message"] == "Workflow twin is already registered."
    assert register(server, archive, workflow_name="other", response_timeout=7).status == 200
    described = managed(server, "GET", "/models/other__left").json()[0]
    assert described["responseTimeout"] == 7
    assert server.call("POST", "/wfpredict/other", b"x").body == b"x<"
    paged = managed(server, "GET", "/workflows?limit=1").json()
    assert paged["nextPageToken"] == "1"


def test_other_methods_are_not_allowed(server):
    for method, path in (("PUT", "/workflows"), ("DELETE", "/workflows"), ("PUT", "/workflows/x")):
        assert managed(server, method, path).status == 405


def test_requests_under_way_are_answered_when_the_workflow_is_removed(server, add, tmp_path):
    add("leaving", "  waits: [left]\n  left: [right]\n")
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(server.call, "POST", "/wfpredict/leaving", os.fsencode(tmp_path))
        while not (tmp_path / "began").exists():
            assert not answer.done()
            time.sleep(0.01)
        removal = pool.submit(managed, server, "DELETE", "/workflows/leaving")
        while managed(server, "GET", "/workflows/leaving").status != 404:
            time.sleep(0.01)
        again = register(server, "leaving.war")
        assert (again.status, again.json()["message"]) == (
            409,
            "Workflow leaving is being removed, and still has requests. Try again later.",
        )
        (tmp_path / "go").touch()
        assert answer.result().body == b"went<>"
        assert removal.result().status == 200
    assert register(server, "leaving.war").status == 200


def test_many_requests_at_once_each_get_their_own_answer(server, add):
    batched = MODELS.replace("models:\n", "models:\n  batch-size: 8\n  max-batch-delay: 2\n")
    add("many", "  start: [left, right]\n  left: [join]\n  right: [join]\n", batched)

    def ask(number: int) -> bool:
        text = b"%d" % number
        return server.call("POST", "/wfpredict/many", text).body == text + b"<" + text + b">"

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(400)))


def test_batches_are_for_models_and_functions_get_one_request_at_a_time(server, add):
    batched = MODELS.replace("models:\n", "models:\n  batch-size: 8\n  max-batch-delay: 2\n")
    add("parted", "  start: [echo]\n", batched)
    described = [managed(server, "GET", f"/models/parted__{step}").json()[0] for step in ("start", "echo")]
    assert [(each["batchSize"], each["maxBatchDelay"]) for each in described] == [(1, 0), (8, 2)]


def test_workers_may_be_killed_while_a_workflow_runs(server, add):
    add(
        "killed",
        "  start: [left]\n  left: [right]\n",
        MODELS.replace("models:\n", "models:\n  retry-attempts: 20\n"),
    )
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.2):
            for worker in managed(server, "GET", "/models/killed__left").json()[0]["workers"]:
                if worker["status"] == "READY" and worker["pid"] > 0:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    statuses = [server.call("POST", "/wfpredict/killed", b"x").status for _ in range(30)]
    over.set()
    killer.join()
    assert set(statuses) <= {200, 500, 503}
    assert 200 in statuses


def test_without_the_model_api_workflows_are_read_only(start_server, server, store):
    closed = start_server("--disable-token-auth")
    assert register(closed, "life.war").status == 405
    assert managed(closed, "DELETE", "/workflows/life").status == 405
    assert managed(closed, "GET", "/workflows").json() == {"workflows": []}


def test_a_start_restores_the_workflows_of_a_snapshot(server, start_server, pack_workflow):
    pack_workflow("kept", "dag:\n  start: [left]\n")
    kept = {"workflowUrl": "kept.war", "workflowName": "kept", "responseTimeout": 9}
    lost = {"workflowUrl": "lost.war", "workflowName": "lost"}
    snapshot = json.dumps({"models": {}, "torchere": {"workflows": [kept, lost]}})
    again = start_server(
        "--disable-token-auth", "--enable-model-api", properties=f"model_snapshot={snapshot}\n"
    )
    assert again.call("POST", "/wfpredict/kept", b"x").body == b"x<"
    assert managed(again, "GET", "/models/kept__left").json()[0]["responseTimeout"] == 9
    answer = again.call("GET", "/readyz")
    assert answer.status == 503
    assert "lost could not be registered" in answer.body.decode()
    assert managed(again, "DELETE", "/workflows/lost").status == 200  # no longer wanted
    assert again.call("GET", "/readyz").status == 200


def test_a_start_restores_steps_that_the_operator_replaced_and_default_versions(
    server, start_server, pack, pack_workflow
):
    other = "def handle(data, context):\n    return data and [b'other'] * len(data)\n"
    for archive, version in (("wf_same", "1.0"), ("wf_next", "2.0")):
        pack(archive, {"h.py": other}, handler="h.py", modelVersion=version)
    pack_workflow("replaced", f"{MODELS}dag:\n  echo: [left]\n")
    entry = {"marName": "wf_next.mar", "minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 1}
    table = {
        "same__echo": {"1.0": entry | {"marName": "wf_same.mar", "defaultVersion": True}},
        "trial__echo": {"2.0": entry | {"defaultVersion": False}},
        "moved__echo": {"2.0": entry | {"defaultVersion": True}},
    }
    flows = [{"workflowUrl": "replaced.war", "workflowName": name} for name in ("same", "trial", "moved")]
    snapshot = json.dumps({"models": table, "torchere": {"workflows": flows}})
    again = start_server(
        "--disable-token-auth", "--enable-model-api", properties=f"model_snapshot={snapshot}\n"
    )
    assert again.call("GET", "/readyz").status == 200
    assert again.call("POST", "/wfpredict/same", b"x").body == b"other<"
    assert b'"model": "trial__echo"' in again.call("POST", "/wfpredict/trial", b"x").body
    assert again.call("POST", "/wfpredict/moved", b"x").body == b"other<"


def test_a_workflow_of_models_only_needs_no_handler(server, pack_workflow):
    archive = pack_workflow("plain", f"{MODELS}dag:\n  echo: [tea]\n", None)
    assert register(server, archive).status == 200
    assert server.call("POST", "/wfpredict/plain", b"x").body == b"tea"
