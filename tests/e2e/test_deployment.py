"""Deployments made for TorchServe, started with their own command lines and configuration files."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers import free_ports

from torchere.serving.commands.torchserve import running

ARCHIVES = Path(__file__).resolve().parents[1] / "conformance" / "archives"
TORCHSERVE = str(Path(sys.executable).with_name("torchserve"))
STARTED = "Model server started."
DEADLINE_S = 60.0
# As in the images, but for the addresses: tests bind to this machine only.
IMAGE_CONFIG = """
inference_address=http://127.0.0.1:0
management_address=http://127.0.0.1:0
metrics_address=http://127.0.0.1:0
grpc_inference_port=0
grpc_management_port=0
number_of_netty_threads=32
job_queue_size=1000
model_store=model-store
workflow_store=wf-store
default_workers_per_model=1
"""
ROW = json.dumps({"x": [0.5] * 8}).encode()


@dataclass
class Deployment:
    """A directory with a model store and configuration files, and what runs in it."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def start(self, *command: str) -> int:
        """Run a command to its end and return its status; a server it leaves writes to `server.log`."""
        with (self.folder / "server.log").open("w") as log:
            return subprocess.run(
                command, cwd=self.folder, env=self.environ, stdout=log, stderr=log, timeout=60, check=False
            ).returncode

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command that leaves nothing behind."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.folder / "tmp"), **self.variables}

    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    @property
    def pid(self) -> int:
        return int((self.folder / "tmp" / ".model_server.pid").read_text())

    def wait_until_started(self) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while STARTED not in self.log():
            assert psutil.pid_exists(self.pid), self.log()
            assert time.monotonic() < deadline_s, self.log()
            time.sleep(0.02)

    def address(self, api: str) -> str:
        found = re.findall(rf"{api} API: (http://[\d.:]+)", self.log())
        return str(found[-1])

    def call(
        self, method: str, path: str, body: bytes | None = None, api: str = "Inference"
    ) -> tuple[int, Any]:
        headers = {"content-type": "application/json"} if body is not None else {}
        request = urllib.request.Request(f"{self.address(api)}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as err:
            with err:
                return err.code, json.loads(err.read())

    def stop(self) -> str:
        return self.ask(TORCHSERVE, "--stop", "--foreground").stdout


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    for name in ("model-store", "wf-store", "tmp"):
        (tmp_path / name).mkdir()
    for name in ("echo.mar", "mlp.mar", "mlp_v2.mar"):
        shutil.copy(ARCHIVES / name, tmp_path / "model-store")
    (tmp_path / "config.properties").write_text(IMAGE_CONFIG)
    deployment = Deployment(tmp_path)
    yield deployment
    if (tmp_path / "tmp" / ".model_server.pid").exists() and psutil.pid_exists(deployment.pid):
        os.kill(deployment.pid, signal.SIGKILL)


def test_the_images_command_line_starts_answers_and_stops(deployment: Deployment) -> None:
    command = [TORCHSERVE, "--start", "--ts-config", "config.properties", "--disable-token-auth"]
    assert deployment.start(*command, "--models", "mlp=mlp.mar", "echo.mar") == 0
    deployment.wait_until_started()
    status, answer = deployment.call("POST", "/predictions/mlp", ROW)
    assert (status, list(answer)) == (200, ["y"])
    assert deployment.call("POST", "/predictions/echo", b"x")[0] == 200
    pid = deployment.pid
    assert "org.pytorch.serve.ModelServer" in psutil.Process(pid).cmdline()  # the very word
    again = deployment.ask(*command)
    assert (again.returncode, "already running" in again.stdout) == (1, True)
    assert deployment.stop() == "TorchServe has stopped.\n"
    assert not running(pid)  # whoever started it may not have asked what became of it
    logs = deployment.folder / "logs"
    assert '"POST /predictions/mlp HTTP/1.1" 200' in (logs / "access_log.log").read_text()
    assert "mlp:1.0 is ready" in (logs / "ts_log.log").read_text()
    assert (logs / "model_log.log").exists()


def test_a_restart_restores_what_was_changed_over_the_api(deployment: Deployment) -> None:
    flags = ["--disable-token-auth", "--enable-model-api"]
    deployment.start(TORCHSERVE, "--start", "--ts-config", "config.properties", *flags)
    deployment.wait_until_started()
    query = "url=mlp.mar&model_name=net&initial_workers=1&batch_size=3&max_batch_delay=7"
    assert deployment.call("POST", f"/models?{query}", api="Management")[0] == 200
    query = "url=mlp_v2.mar&model_name=net&initial_workers=0"
    status, answer = deployment.call("POST", f"/models?{query}", api="Management")
    assert status == 200, answer
    second = re.search(r"Version: (\S+)", answer["status"])[1]  # type: ignore[index]
    assert deployment.call("PUT", f"/models/net/{second}/set-default", api="Management")[0] == 200
    deployment.stop()
    kinds = [name.rpartition("-")[2] for name in sorted(os.listdir(deployment.folder / "logs" / "config"))]
    assert kinds == ["startup.cfg", "snapshot.cfg", "snapshot.cfg", "snapshot.cfg", "shutdown.cfg"]

    assert deployment.start(TORCHSERVE, "--start", "--disable-token-auth") == 0  # no --ts-config
    deployment.wait_until_started()
    status, described = deployment.call("GET", "/models/net/all", api="Management")
    first = next(one for one in described if one["modelVersion"] == "1.0")
    assert (first["batchSize"], first["maxBatchDelay"], first["minWorkers"]) == (3, 7, 1)
    assert deployment.call("POST", "/predictions/net/1.0", ROW)[0] == 200
    (default,) = deployment.call("GET", "/models/net", api="Management")[1]
    assert (default["modelVersion"], default["minWorkers"]) == (second, 0)
    # A door that one command line opened is not open for ever.
    assert deployment.call("DELETE", "/models/net/1.0", api="Management")[0] == 405


def test_a_snapshot_whose_archive_is_gone_stops_the_start(deployment: Deployment) -> None:
    config = deployment.folder / "logs" / "config"
    config.mkdir(parents=True)
    entry = {"defaultVersion": True, "minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}
    models = {name: {"1.0": {**entry, "marName": f"{name}.mar"}} for name in ("mlp", "gone")}
    snapshot = IMAGE_CONFIG + f"model_snapshot={json.dumps({'models': models})}\n"
    (config / "20250101000000000-shutdown.cfg").write_text(snapshot)
    done = deployment.ask(TORCHSERVE, "--start", "--foreground")
    assert done.returncode == 1
    assert "not in the model store: gone.mar (gone 1.0)" in done.stdout
    assert STARTED not in done.stdout
    left = {path.name for path in (deployment.folder / "tmp").iterdir()}
    assert left <= {".model_server.pid", ".model_server.pid.lock"}  # an orphan, which the next start removes


def test_kserves_single_port_configuration_with_a_model_snapshot(deployment: Deployment) -> None:
    entry = {
        "defaultVersion": True,
        "marName": "mlp.mar",
        "minWorkers": 1,
        "maxWorkers": 5,
        "batchSize": 1,
        "maxBatchDelay": 10,
        "responseTimeout": 120,
    }
    snapshot = {"name": "startup.cfg", "modelCount": 1, "models": {"net": {"1.0": entry}}}
    (port,) = free_ports(1)
    (deployment.folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{port}\nmanagement_address=http://127.0.0.1:{port}\n"
        "metrics_address=http://127.0.0.1:0\ngrpc_inference_port=0\ngrpc_management_port=0\n"
        "enable_envvars_config=true\ninstall_py_dep_per_model=true\nenable_metrics_api=true\n"
        "metrics_mode=prometheus\nNUM_WORKERS=1\nnumber_of_netty_threads=4\njob_queue_size=10\n"
        f"model_store=$$STORE$$\nmodel_snapshot={json.dumps(snapshot)}\n"
    )
    deployment.variables = {
        "TS_CONFIG_FILE": "config.properties",
        "STORE": str(deployment.folder / "model-store"),
        "TS_DISABLE_TOKEN_AUTHORIZATION": "true",
        "TS_JOB_QUEUE_SIZE": "11",
        "TS_SERVICE_ENVELOPE": "kserve",
        "LOG_LOCATION": str(deployment.folder / "elsewhere"),
    }
    with (deployment.folder / "server.log").open("w") as log:
        process = subprocess.Popen(  # as a container's first process
            [TORCHSERVE, "--start", "--foreground"],
            cwd=deployment.folder,
            env=deployment.environ,
            stdout=log,
            stderr=log,
        )
    pid_file = deployment.folder / "tmp" / ".model_server.pid"
    while not pid_file.exists():
        assert process.poll() is None, deployment.log()
        time.sleep(0.01)
    deployment.wait_until_started()
    assert deployment.pid == process.pid  # signals of the container's runtime reach the server
    (model,) = deployment.call("GET", "/models/net?customized=false")[1]
    assert (model["maxWorkers"], model["jobQueueStatus"]["remainingCapacity"]) == (5, 11)
    instances = json.dumps({"instances": [{"data": {"x": [0.5] * 8}}]}).encode()
    status, answer = deployment.call("POST", "/predictions/net", instances)
    assert status == 200, answer
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert (deployment.folder / "elsewhere" / "access_log.log").exists()
    assert not (deployment.folder / "logs").exists()


def test_sagemakers_command_line_with_a_folder_as_the_model(deployment: Deployment) -> None:
    model = deployment.folder / "ml" / "model"
    (model / "code").mkdir(parents=True)
    service = "def handle(data, context):\n    return None if data is None else ['served'] * len(data)\n"
    (model / "service.py").write_text(service)
    (port,) = free_ports(1)
    (deployment.folder / "sagemaker-ts.properties").write_text(
        "enable_envvars_config=true\ndecode_input_request=false\nload_models=ALL\n"
        f"inference_address=http://127.0.0.1:{port}\nmanagement_address=http://127.0.0.1:{port}\n"
        "metrics_address=http://127.0.0.1:0\ngrpc_inference_port=0\ngrpc_management_port=0\n"
        "default_service_handler=service.py:handle\ndefault_workers_per_model=1\n"
        'models={"model":{"1.0":{"defaultVersion":true,"marName":"model.mar","minWorkers":1,"maxWorkers":1,'
        '"batchSize":$$SAGEMAKER_TS_BATCH_SIZE$$,"maxBatchDelay":100,"responseTimeout":60}}}\n'
        "disable_token_authorization=true\nenable_model_api=true\n"
    )
    (deployment.folder / "log4j2.xml").write_text("<Configuration/>")
    deployment.variables = {"SAGEMAKER_TS_BATCH_SIZE": "2"}
    command = [TORCHSERVE, "--start", "--model-store", "model-store", "--log-config", "log4j2.xml"]
    command += ["--ts-config", "sagemaker-ts.properties", "--models", f"model={model}"]
    assert deployment.start(*command) == 0
    deployment.wait_until_started()
    (described,) = deployment.call("GET", "/models/model")[1]
    assert (described["batchSize"], described["modelUrl"]) == (2, str(model))
    request = urllib.request.Request(f"{deployment.address('Inference')}/invocations", b"x")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read() == b"served"
    # The end of the server leaves the folder alone.
    deployment.stop()
    assert (model / "service.py").exists()
