"""What TorchServe's tests check of snapshots, logs, metrics, envelopes and workflows."""

from __future__ import annotations

import json
import zipfile
from functools import partial
from pathlib import Path

from suite.checks import Check, is_ready, row_check
from suite.deployment import OPEN, Deployment
from suite.rows import Row

# Files: test_snapshot.py, test_metrics.py, test_metrics_kf.py


def start_with_snapshots(at: Deployment) -> None:
    at.start(*OPEN, ncs=False)


def logs_and_metrics(at: Deployment) -> None:
    names = ("access_log", "model_log", "ts_log", "model_metrics", "ts_metrics")
    missing = [name for name in names if not at.files(f"logs/{name}.log")]
    assert missing == []


def snapshots(at: Deployment) -> None:
    assert len(at.files("logs/config/*startup.cfg")) == 1
    assert at.register("ok.mar", "kept").status == 200
    at.wait_for(lambda: len(at.files("logs/config/*snapshot.cfg")) >= 1, 10)
    at.stop()
    assert len(at.files("logs/config/*shutdown.cfg")) == 1


def start_from_a_snapshot(at: Deployment) -> None:
    snapshot = at.files("logs/config/*snapshot.cfg")[-1]
    at.start(*OPEN, ncs=False, file=str(snapshot))
    assert _port_of_the_snapshot(at, snapshot)
    assert _names(at) == ["kept"]
    at.stop()


def start_from_the_newest(at: Deployment) -> None:
    at.start(*OPEN, ncs=False, file=None)
    assert _port_of_the_snapshot(at, at.files("logs/config/*.cfg")[-1])
    assert _names(at) == ["kept"]
    at.stop()


def _port_of_the_snapshot(at: Deployment, snapshot: Path) -> bool:
    for line in snapshot.read_text().splitlines():
        name, _, value = line.partition("=")
        if name.endswith("_address") and name.partition("_")[0] in at.ports:
            at.ports[name.partition("_")[0]] = int(value.replace("\\", "").rpartition(":")[2])
    return True


def _names(at: Deployment) -> list[str]:
    return [model["modelName"] for model in at.manage("GET", "/models").json["models"]]


def no_snapshots(at: Deployment) -> None:
    for path in at.files("logs/config/*"):
        path.unlink()
    at.start(*OPEN)
    assert _names(at) == []
    at.stop()
    assert at.files("logs/config/*.cfg") == []


def locations(at: Deployment) -> None:
    at.variables |= {
        "LOG_LOCATION": str(at.folder / "elsewhere"),
        "METRICS_LOCATION": str(at.folder / "metrics"),
    }
    at.start(*OPEN, ncs=False, properties="async_logging=true\n")
    at.register("ok.mar", "kept")
    assert len(at.files("elsewhere/*.log")) == 3, at.files("elsewhere/*")
    assert len(at.files("metrics/*_metrics.log")) == 2, at.files("metrics/*")
    at.stop()
    kinds = {path.name.partition("-")[2] for path in at.files("elsewhere/config/*.cfg")}
    assert {"startup.cfg", "snapshot.cfg", "shutdown.cfg"} <= kinds
    at.variables.clear()


def odd_properties(at: Deployment) -> None:
    at.start(*OPEN, properties="async_logging=2\nno_such_key=1\nnon-keyvaluepair\n")
    assert at.ask("GET", "/ping").json == {"status": "Healthy"}


def metrics_of_a_prediction(at: Deployment) -> None:
    at.register("metric.mar", "metric")
    at.ask("POST", "/predictions/metric", b"1")
    path = at.folder / "logs" / "model_metrics.log"
    at.wait_for(lambda: "PredictionTime.ms:" in path.read_text(), 10)
    line = next(line for line in path.read_text().splitlines() if "PredictionTime" in line)
    assert "|#ModelName:metric,Level:Model|#hostname:" in line, line


# Envelopes of KServe: kf_inference_data.json, kfv2_inference_data.json


def start_with_envelope(name: str, at: Deployment) -> None:
    at.start(
        *OPEN,
        "--models",
        "lengths=lengths.mar",
        properties=f"service_envelope={name}\ndefault_workers_per_model=1\n",
    )
    at.wait_for(lambda: is_ready(at, "lengths"))


def kserve_v1(at: Deployment) -> None:
    reply = at.ask("POST", "/v1/models/lengths:predict", b'{"instances": [{"data": "ab"}, {"data": "abc"}]}')
    assert (reply.status, reply.json) == (200, {"predictions": [2, 3]})


def kserve_v2(at: Deployment) -> None:
    tensor = {"name": "input-0", "shape": [2], "datatype": "INT64", "data": [66, 108]}
    reply = at.ask("POST", "/v2/models/lengths/infer", json.dumps({"id": "d3b", "inputs": [tensor]}).encode())
    assert (reply.status, reply.json["id"], reply.json["model_name"]) == (200, "d3b", "lengths"), reply.text
    assert reply.json["model_version"] == "1.0"
    assert [output["datatype"] for output in reply.json["outputs"]] == ["INT64"]


# Workflows: workflow_data.json, workflow_inference_data.json


def start_for_workflows(at: Deployment) -> None:
    spec = (
        "models:\n  min-workers: 1\n  max-workers: 1\n  batch-size: 1\n  max-batch-delay: 10\n"
        "  middle:\n    url: upper.mar\ndag:\n  before: [middle]\n  middle: [after]\n"
    )
    functions = (
        "def before(data, context):\n"
        "    return [(row.get('data') or row.get('body')) for row in data] if data else None\n"
        "def after(data, context):\n"
        "    values = [row.get('data') or row.get('body') for row in data or []]\n"
        "    return [{'seen': value.decode()} for value in values] if data else None\n"
    )
    manifest = {
        "createdOn": "x",
        "archiverVersion": "0.2.15",
        "workflow": {
            "workflowName": "flow",
            "specFile": "spec.yaml",
            "handler": "functions.py",
        },
    }
    (at.folder / "flows").mkdir()
    with zipfile.ZipFile(at.folder / "flows" / "flow.war", "w") as archive:
        archive.writestr("spec.yaml", spec)
        archive.writestr("functions.py", functions)
        archive.writestr("WAR-INF/MANIFEST.json", json.dumps(manifest))
    at.start(*OPEN, "--workflow-store", "flows", properties="default_workers_per_model=1\n")


WORKFLOW_ROWS = (
    ("register", "POST", "/workflows?url=flow.war", 200, "registered"),
    ("list", "GET", "/workflows", 200, "flow"),
    ("describe", "GET", "/workflows/flow", 200, "flow"),
    ("register again", "POST", "/workflows?url=flow.war", 409, ""),
    ("describe an unknown workflow", "GET", "/workflows/none", 404, ""),
    ("unregister an unknown workflow", "DELETE", "/workflows/none", 404, ""),
    ("a malformed URL", "POST", "/workflows?url=malformed_url,?", 404, ""),
    ("a URL of nothing", "POST", "/workflows?url={downloads}/none.war", 400, ""),
)


def workflow_prediction(at: Deployment) -> None:
    reply = at.ask("POST", "/wfpredict/flow", b"abc", headers={"Content-Type": "application/octet-stream"})
    assert (reply.status, reply.json) == (200, {"seen": "ABC"}), reply.text


def workflow_leaves(at: Deployment) -> None:
    assert at.manage("DELETE", "/workflows/flow").status == 200
    assert at.manage("GET", "/workflows/flow").status == 404


def workflow_row(row: tuple[str, str, str, int, str]) -> Check:
    title, method, path, status, holds = row
    given = Row("workflow_data.json", title, method, path, (status,), holds)
    return Check(given.file, title, partial(row_check, given))
