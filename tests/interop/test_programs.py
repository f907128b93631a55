"""Programs that were written for TorchServe, against `torchserve --start` without a switch of torchere's.

`make tools` installs the small ones, and `python tests/interop/programs.py` all; a test whose program is not
installed is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
DRIVERS = HERE / "drivers"
BIN = Path(sys.executable).parent  # has `torchserve` and `torch-model-archiver`
# What these programs ask of TorchServe 0.12, too: they know no tokens, and register models.
OPEN = ("--disable-token-auth", "--enable-model-api")
HANDLER = """
import json
import torch
from ts.torch_handler.base_handler import BaseHandler

class Sums(BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def preprocess(self, rows):
        rows = [row.get("data") or row.get("body") or row for row in rows]
        rows = [json.loads(row) if isinstance(row, (bytes, bytearray, str)) else row for row in rows]
        return [row["data"] if isinstance(row, dict) and "data" in row else row for row in rows]

    def inference(self, rows):
        return [float(torch.tensor(row, dtype=torch.float64).sum()) for row in rows]

    def postprocess(self, sums):
        return [{"sum": each} for each in sums]

    def explain_handle(self, data, raw):
        return [{"explained": True} for _ in raw]
"""


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"interop_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


programs = _module("programs")


def installed(name: str) -> Path:
    """The interpreter of a program; skips the test when it is not installed."""
    found = programs.python_of(name)
    if found is None:
        pytest.skip(f"{name} is not installed: `python tests/interop/programs.py {name}` fetches it")
    return Path(found)


@dataclass
class Launched:
    """A folder with a configuration of free ports, from which `torchserve` is started and stopped."""

    folder: Path
    ports: dict[str, int]

    @property
    def properties(self) -> Path:
        return self.folder / "config.properties"

    @property
    def log(self) -> str:
        return (self.folder / "console.log").read_text()

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.folder / "bin"), str(BIN), os.environ["PATH"]])
        names = {"PATH": path, "TMPDIR": str(self.folder / "tmp")}
        return {**os.environ, **names}

    def url(self, api: str) -> str:
        return f"http://localhost:{self.ports[api]}"

    def start(self, *flags: str) -> None:
        """Start it in the background, and wait until it is up."""
        with (self.folder / "console.log").open("wb") as log:
            command = ["torchserve", "--start", "--model-store", "store", "--ts-config", "config.properties"]
            self.run([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
        self.wait_until(lambda: "Model server started." in self.log)

    def stop(self) -> None:
        self.run(["torchserve", "--stop", "--foreground"], stdout=subprocess.DEVNULL)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **options.pop("variables", {})}
        return subprocess.run(
            command, cwd=self.folder, env=environment, text=True, check=True, timeout=150, **options
        )

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.05)

    def call(self, method: str, api: str, path: str, body: bytes | None = None) -> Any:
        headers = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url(api)}{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{error.code}: {error.read().decode()}\n{self.log}") from None


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """A deployment that is not started yet; stopped at the end if the test has started it."""
    for folder in ("bin", "store", "tmp"):
        (tmp_path / folder).mkdir()
    apis = ("inference", "management", "metrics", "grpc_inference", "grpc_management", "other")
    sockets = [socket.socket() for _ in apis]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = {api: each.getsockname()[1] for api, each in zip(apis, sockets, strict=True)}
    for each in sockets:
        each.close()
    lines = [f"{api}_address=http://localhost:{ports[api]}" for api in apis[:3]]
    lines += [f"{api}_port={ports[api]}" for api in apis[3:5]]
    deployment = Launched(tmp_path, ports)
    deployment.properties.write_text("\n".join(lines) + "\n")
    (tmp_path / "handler.py").write_text(HANDLER)
    # A program that passes on a few variables alone still starts and stops the server of this folder.
    launcher = tmp_path / "bin" / "torchserve"
    launcher.write_text(f'#!/bin/sh\nTMPDIR={tmp_path}/tmp exec {BIN}/torchserve "$@"\n')
    launcher.chmod(0o755)
    yield deployment
    deployment.stop()


def pack(launched: Launched, export_path: str = "store") -> None:
    command = ["torch-model-archiver", "--model-name", "net", "--version", "1.0", "--handler", "handler.py"]
    launched.run([*command, "--export-path", export_path])


def driven(launched: Launched, program: str, driver: str, *arguments: str, **variables: str) -> Any:
    """Run a driver with the interpreter of its program; its last line is JSON."""
    command = [str(installed(program)), str(DRIVERS / f"{driver}.py"), *arguments]
    printed = launched.run(command, stdout=subprocess.PIPE, variables=variables).stdout
    return json.loads(printed.splitlines()[-1])


def test_mlflow_torchserve_deploys_and_asks(launched):
    installed("mlflow-torchserve")
    import torch

    torch.save({}, launched.folder / "weights.pt")
    launched.start(*OPEN)
    steps = driven(
        launched,
        "mlflow-torchserve",
        "mlflow_deploy",
        "weights.pt",
        "handler.py",
        CONFIG_PROPERTIES=str(launched.properties),
        EXPORT_PATH=str(launched.folder / "store"),
    )
    assert steps["create"] == {"name": "net/1.0", "flavor": None}
    assert [version["modelVersion"] for version in steps["get"]] == ["1.0", "2.0"]
    assert [list(model) for model in steps["list"]] == [["net"]]
    assert json.loads(steps["tensor"]) == {"sum": 3.0}
    assert json.loads(steps["frame"]) == {"sum": 4.0}  # sent as a form: the last of equal names counts
    assert [model["net"]["modelName"] for model in steps["left"]] == ["net"]


def test_sagemakers_toolkit_starts_it_in_the_place_of_torchserve(launched):
    packages = installed("sagemaker")
    import torch

    code = launched.folder / "base" / "model" / "code"
    code.mkdir(parents=True)
    net = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.zeros_(net.bias)
    torch.jit.script(net).save(str(code.parent / "model.pt"))
    (code / "inference.py").write_text(
        "def output_fn(prediction, accept):\n    return str(prediction.tolist())"
    )
    script = (
        "import os, psutil\n"
        "from sagemaker_pytorch_serving_container import serving, torchserve\n"
        # It takes every server of the machine for its own, those of other tests too.
        "look = psutil.process_iter\n"
        "psutil.process_iter = lambda: filter(is_here, look())\n"
        "def is_here(process):\n"
        "    try:\n"
        "        return process.cwd() == os.getcwd()\n"
        "    except psutil.Error:\n"
        "        return False\n"
        "torchserve.TS_CONFIG_FILE = 'sagemaker.properties'\n"  # for /etc, which is the container's
        "serving.main()\n"
    )
    port = launched.ports["inference"]
    names = {
        **launched.environment,
        "PYTHONPATH": str(packages),
        "SAGEMAKER_BASE_DIR": str(launched.folder / "base"),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
        "TS_METRICS_ADDRESS": f"http://127.0.0.1:{launched.ports['metrics']}",
        "TS_GRPC_INFERENCE_PORT": str(launched.ports["grpc_inference"]),
        "TS_GRPC_MANAGEMENT_PORT": str(launched.ports["grpc_management"]),
    }
    with (launched.folder / "console.log").open("wb") as log:
        toolkit = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script],
            cwd=launched.folder,
            env=names,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    launched.wait_until(lambda: "model:1.0 is ready" in launched.log or toolkit.poll() is not None)
    assert toolkit.poll() is None, launched.log
    assert launched.call("GET", "inference", "/ping") == {"status": "Healthy"}
    assert launched.call("POST", "inference", "/invocations", b"[[1, 2]]") == [[1.5]]
    toolkit.send_signal(signal.SIGTERM)  # which the toolkit passes on to the server
    assert toolkit.wait(60) == 0
    launched.wait_until(lambda: "1 predictions accepted, 1 answered" in launched.log)  # it ends in order


def test_kserves_wrapper_waits_for_its_models_and_passes_requests_on(launched):
    installed("kserve")
    pack(launched)
    version = {"defaultVersion": True, "marName": "net.mar", "minWorkers": 1, "maxWorkers": 1, "batchSize": 1}
    models = {"net": {"1.0": {**version, "maxBatchDelay": 10, "responseTimeout": 60}}}
    snapshot = json.dumps({"name": "startup.cfg", "modelCount": 1, "models": models})
    inference, metrics = launched.ports["inference"], launched.ports["metrics"]
    launched.properties.write_text(
        f"inference_address=http://0.0.0.0:{inference}\nmanagement_address=http://0.0.0.0:{inference}\n"
        f"metrics_address=http://0.0.0.0:{metrics}\n"
        f"grpc_inference_port={launched.ports['grpc_inference']}\n"
        f"grpc_management_port={launched.ports['grpc_management']}\n"
        "enable_envvars_config=true\ninstall_py_dep_per_model=true\nenable_metrics_api=true\n"
        "disable_token_authorization=true\nmetrics_mode=prometheus\nNUM_WORKERS=1\n"
        "number_of_netty_threads=4\njob_queue_size=10\nservice_envelope=kservev2\n"
        f"model_store={launched.folder}/store\nmodel_snapshot={snapshot}\n"
    )
    launched.start()
    port = launched.ports["other"]
    wrapper = subprocess.Popen(
        [str(installed("kserve")), str(DRIVERS / "kserve_wrapper.py"), str(port)],
        env={**launched.environment, "CONFIG_PATH": str(launched.properties)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    launched.ports["wrapper"] = port
    try:
        launched.wait_until(lambda: wrapper.poll() is not None or _answers(launched.url("wrapper")))
        tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]}
        body = json.dumps({"id": "7", "inputs": [tensor]}).encode()
        v1 = launched.call("POST", "wrapper", "/v1/models/net:predict", body)
        assert v1["outputs"][0]["data"] == [{"sum": 3.0}]
        assert launched.call("POST", "wrapper", "/v1/models/net:explain", body)["outputs"]
        v2 = launched.call("POST", "wrapper", "/v2/models/net/infer", body)
        assert "3.0" in str(v2["outputs"][0]["data"])  # KServe makes a text of it
    finally:
        wrapper.terminate()
        wrapper.communicate(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models/net", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_torchx_deploys_an_archive_that_it_serves_itself(launched):
    python = installed("torchx")
    pack(launched, ".")
    launched.start(*OPEN)
    arguments = (
        str(launched.folder / "net.mar"),
        launched.url("management"),
        str(launched.ports["other"]),
    )
    # Its application runs `python`, which has to be the one that has torchx.
    path = f"{python.parent}{os.pathsep}{launched.environment['PATH']}"
    deployed = driven(launched, "torchx", "torchx_serve", *arguments, PATH=path)
    assert deployed["state"] == "SUCCEEDED", deployed["log"]
    assert launched.call("POST", "inference", "/predictions/net", b'{"data": [1, 2]}') == {"sum": 3.0}


def test_torchserve_dashboard_starts_manages_and_stops_it(launched):
    installed("torchserve-dashboard")
    pack(launched)
    lines = "disable_token_authorization=true\nenable_model_api=true\n"
    launched.properties.write_text(launched.properties.read_text() + lines)
    arguments = ("store", str(launched.properties), str(launched.folder / "logs"), launched.url("management"))
    steps = driven(launched, "torchserve-dashboard", "dashboard", *arguments)
    assert "TorchServe Version is 0.12.0" in steps["version"]
    assert "Torchserve is starting" in steps["start"]
    assert "already started" in steps["again"]
    assert "Processing worker updates" in steps["register"]["status"]
    assert [version["modelVersion"] for version in steps["describe"]] == ["1.0"]
    assert steps["all"] == steps["describe"] or len(steps["all"]) == 1
    assert "Default version successfully updated" in steps["default"]["status"]
    assert steps["workflows"] == {"workflows": []}
    assert steps["page"] == ""
    assert "unregistered" in steps["delete"]["status"]
    assert steps["loaded"] == {"models": []}
    assert "TorchServe has stopped" in steps["stop"]


METRICS = {
    "predict.txt": "PredictionTime",
    "handler_time.txt": "HandlerTime",
    "waiting_time.txt": "QueueTime",
    "worker_thread.txt": "WorkerThreadTime",
    "cpu_percentage.txt": "CPUUtilization",
    "memory_percentage.txt": "MemoryUtilization",
}


@pytest.mark.parametrize("source", ["console", "file"])
def test_benchmark_ab_finds_its_numbers(launched, source, tool):
    """TorchServe's benchmarks/benchmark-ab.py is no package: these are its calls, in its order.

    It reads the console of `torchserve`, redirected to a file; older ones read model_metrics.log.
    """
    ab = tool("ab")
    pack(launched, ".")
    (launched.folder / "input").write_text("[1, 2]")
    management, inference = launched.ports["management"], launched.ports["inference"]
    launched.properties.write_text(
        launched.properties.read_text()
        + f"inference_address=http://0.0.0.0:{inference}\nmanagement_address=http://0.0.0.0:{management}\n"
        "number_of_netty_threads=32\njob_queue_size=1000\n"
        "vmargs=-Xmx4g -XX:+ExitOnOutOfMemoryError\nprefer_direct_buffer=True\n"
    )
    launched.run(["torchserve", "--stop"], stdout=subprocess.DEVNULL)
    launched.start("--enable-model-api", "--disable-token", "--workflow-store", "store")
    assert launched.call("GET", "inference", "/ping") == {"status": "Healthy"}
    query = f"model_name=benchmark&url=file://{launched.folder}/net.mar&batch_delay=200&batch_size=1"
    launched.call("POST", "management", f"/models?{query}&initial_workers=1&synchronous=true")
    for requests in (10, 100):
        before = launched.log.splitlines()
        result = _ab(launched, ab, requests)
    assert re.search(r"Failed requests: +0$", result, re.MULTILINE)
    launched.call("DELETE", "management", "/models/benchmark")
    launched.stop()
    lines = launched.log.splitlines()[len(before) :]
    if source == "file":
        lines = (launched.folder / "logs" / "model_metrics.log").read_text().splitlines()
    for metric in METRICS.values():
        values = [line.split("|")[0].split(":")[3].strip() for line in lines if re.search(metric, line)]
        if metric.endswith("Utilization") or (source, metric) == ("file", "WorkerThreadTime"):
            continue  # once a minute; and the server's own are in ts_metrics.log
        if (source, metric) == ("file", "QueueTime"):
            continue
        assert len([float(value) for value in values]) >= 100, metric


def _ab(launched: Launched, ab: str, requests: int) -> str:
    target = f"http://127.0.0.1:{launched.ports['inference']}/predictions/benchmark"
    command = [
        ab,
        "-c",
        "10",
        "-s",
        "300",
        "-n",
        str(requests),
        "-k",
        "-p",
        "input",
        "-T",
        "application/jpg",
    ]
    return launched.run([*command, target], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
