"""SageMaker's model folders: answers beside those of its toolkit, one model or several on an endpoint."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from servers import RunningServer, follow, free_ports

from torchere.serving.commands.sagemaker import properties_of, run_sagemaker
from torchere.serving.commands.serve_options import LaunchRefused

HERE = Path(__file__).parent / "sagemaker"
RECORDED = json.loads((HERE / "recorded.json").read_text())


def _folders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sagemaker_folders", HERE / "folders.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folders = _folders()
SERVED = [name for name in folders.FOLDERS if name not in ("arity", "both")]


def started(base: Path, **variables: str) -> RunningServer:
    """A container's server: `torchere sagemaker` with the variables that SageMaker sets."""
    temporary = base / "tmp"
    temporary.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SAGEMAKER_")}
    environ |= {
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_BIND_TO_PORT": str(free_ports(1)[0]),  # both APIs are on it, so it can't be 0
        "TMPDIR": str(temporary),
    }
    environ |= variables
    with (base / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchere.serving", "sagemaker"],
            cwd=base,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    server = RunningServer(process, base)
    follow(server, "Model server started.")
    for line in server.log().splitlines():
        message = json.loads(line).get("message", "") if line.startswith("{") else ""
        api, found, address = message.partition(" API: http://0.0.0.0:")
        if found:
            server.rest[api.lower()] = f"127.0.0.1:{address}"
    return server


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """An endpoint for several models, with all the folders below its models."""
    base = tmp_path_factory.mktemp("sagemaker")
    for name in folders.FOLDERS:
        folders.write(name, base / "models" / name / "model")
    server = started(base, SAGEMAKER_MULTI_MODEL="true")
    yield server
    server.stop()


def load(server: RunningServer, name: str, model: str | None = None):
    body = {"model_name": model or name, "url": str(server.folder / "models" / name / "model")}
    return server.call("POST", "/models", json.dumps(body).encode(), content_type="application/json")


def ask(server: RunningServer, path: str, content_type: str | None, body: bytes, accept: str | None):
    request = urllib.request.Request(f"http://{server.rest['inference']}{path}", body, method="POST")
    request.add_header("Content-Type", content_type or "")
    if accept:
        request.add_header("Accept", accept)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers.get("content-type"), answer.read()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, err.headers.get("content-type"), err.read()


def words(text: str) -> str:
    """A text without the traceback behind it, and without regard to white space."""
    return " ".join(text.split("\nTraceback", maxsplit=1)[0].split())


@pytest.mark.parametrize("name", SERVED)
def test_a_folder_answers_as_with_the_toolkit_on_torchserve(endpoint: RunningServer, name: str) -> None:
    assert load(endpoint, name).status == 200
    requests = folders.REQUESTS[folders.FOLDERS[name].requests]
    for (content_type, body, accept), expected in zip(requests, RECORDED[name], strict=True):
        status, answered_type, answer = ask(endpoint, f"/models/{name}/invoke", content_type, body, accept)
        wanted_type = expected[1]
        if answered_type == folders.CSV:  # here it is the one that was written, there the whole header
            wanted_type = (wanted_type or "").partition(",")[0]
        text = words(answer.decode("latin-1"))
        if name == "context":  # it answers with the model's name, which was `model` in all recordings
            text = text.replace(name, "model")
        found = (status, answered_type, text)
        assert found == (expected[0], wanted_type, words(expected[2])), (content_type, accept, body)
    assert endpoint.call("DELETE", f"/models/{name}").status == 200


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("arity", "model_fn takes 3 arguments but 1 were given."),
        ("both", "Cannot use transform_fn implementation in conjunction with input_fn"),
    ],
)
def test_a_script_that_breaks_the_contract_does_not_load(endpoint, name, cause) -> None:
    answer = load(endpoint, name)
    assert answer.status == 500
    assert endpoint.logs(cause)
    assert endpoint.call("GET", f"/models/{name}").status == 404


def test_an_endpoint_for_several_models_loads_lists_invokes_and_evicts(endpoint: RunningServer) -> None:
    assert ask(endpoint, "/models/first/invoke", folders.JSON, b"[[1, 2]]", None)[0] == 404
    assert load(endpoint, "plain", "first").status == 200
    assert load(endpoint, "plain", "first").status == 409
    listed = endpoint.call("GET", "/models").json()["models"]
    url = str(endpoint.folder / "models" / "plain" / "model")
    assert {"modelName": "first", "modelUrl": url} in listed
    assert endpoint.call("GET", "/models/first").json()[0]["modelUrl"] == url
    assert ask(endpoint, "/models/first/invoke", folders.JSON, b"[[1, 2]]", None)[::2] == (200, b"[[3.25]]")
    assert endpoint.call("DELETE", "/models/first").status == 200
    assert endpoint.call("DELETE", "/models/first").status == 404
    assert ask(endpoint, "/models/first/invoke", folders.JSON, b"[[1, 2]]", None)[0] == 404


def test_a_model_that_lacks_memory_is_507_so_that_another_is_evicted(endpoint: RunningServer) -> None:
    folder = endpoint.folder / "models" / "large" / "model"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "inference.py").write_text("def model_fn(folder): raise MemoryError('too large')\n")
    assert load(endpoint, "large").status == 507


def test_a_folder_elsewhere_is_not_loaded(endpoint: RunningServer, tmp_path: Path) -> None:
    folders.write("plain", tmp_path / "model")
    body = json.dumps({"model_name": "stranger", "url": str(tmp_path / "model")}).encode()
    assert endpoint.call("POST", "/models", body, content_type="application/json").status == 404


def test_a_numpy_file_with_pickled_objects_is_refused(endpoint: RunningServer) -> None:
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert load(endpoint, "plain", "pickles").status == 200
    status, _, answer = ask(endpoint, "/models/pickles/invoke", folders.NPY, buffer.getvalue(), None)
    assert status == 500
    assert (
        words(answer.decode())
        == "the body: found a .npy file of object, expected values that are no Python objects"
    )


def test_a_number_alone_is_no_size_of_unused_memory(endpoint: RunningServer) -> None:
    folder = endpoint.folder / "models" / "echo" / "model"
    (folder / "code").mkdir(parents=True)
    script = "def model_fn(folder): pass\ndef predict_fn(data, model): return data\n"
    (folder / "code" / "inference.py").write_text(script)
    assert load(endpoint, "echo").status == 200
    for content_type in (folders.JSON, folders.CSV):
        answer = ask(endpoint, "/models/echo/invoke", content_type, b"500", folders.JSON)
        assert answer[::2] == (200, b"500.0")


def test_a_container_for_one_model_takes_the_variables_and_the_requirements(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folders.write("beside", folder)
    (folder / "code" / "inference.py").rename(folder / "code" / "serving.py")
    (folder / "code" / "requirements.txt").write_text("numpy\n")  # installed already
    server = started(
        tmp_path,
        SAGEMAKER_MODEL_SERVER_WORKERS="1",
        SAGEMAKER_PROGRAM="serving.py",
        SAGEMAKER_TS_BATCH_SIZE="4",
        SAGEMAKER_TS_MAX_BATCH_DELAY="7",
        SAGEMAKER_TS_RESPONSE_TIMEOUT="33",
        SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT="text/x-number",
        SAGEMAKER_MAX_PAYLOAD_IN_MB="1",
    )
    try:
        assert server.call("GET", "/ping").json() == {"status": "Healthy"}
        assert ask(server, "/invocations", folders.JSON, b"2.5", None) == (200, "text/x-number", b"10.0")
        assert ask(server, "/invocations", folders.JSON, b" " * 1_100_000, None)[0] == 413
        assert server.call("POST", "/models", b"{}", content_type="application/json").status in (404, 405)
        assert "Requirement already satisfied: numpy" in server.log()
        (properties,) = re.findall(r"Config file: (/dev/fd/\d+)", server.log())
        text = Path(f"/proc/{server.process.pid}", *Path(properties).parts[2:]).read_text()
        assert '"batchSize": 4, "maxBatchDelay": 7, "responseTimeout": 33' in text
    finally:
        server.stop()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_requirements_are_installed_where_the_environment_of_the_server_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, info = tmp_path / "model" / "code", "tiny_dependency-1.0.dist-info"
    code.mkdir(parents=True)
    wheel = code / "tiny_dependency-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        metadata = "Metadata-Version: 2.1\nName: tiny-dependency\nVersion: 1.0\n"
        archive.writestr("tiny_dependency.py", "")
        archive.writestr("pathlib.py", "raise ImportError('it is behind that of Python')")
        archive.writestr(f"{info}/METADATA", f"{metadata}Requires-Dist: numpy\n")  # of the server
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        listed = ("tiny_dependency.py", "pathlib.py", f"{info}/METADATA", f"{info}/WHEEL")
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in listed))
    (code / "requirements.txt").write_text(f"--no-index\n{wheel}\n")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    packages, access = sysconfig.get_path("purelib"), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != packages and access(path, mode))
    asks = "import numpy, pathlib, tiny_dependency, torchere.serving; print(tiny_dependency.__file__)"
    found: list[str] = []
    monkeypatch.setattr(
        os, "execv", lambda python, _: found.append(subprocess.check_output([python, "-c", asks], text=True))
    )
    run_sagemaker(argparse.Namespace())
    assert found[0].startswith(str(tmp_path / "tmp"))


def test_packages_of_a_private_repository_are_not_taken_from_the_public_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, commands = tmp_path / "model" / "code", []
    code.mkdir(parents=True)
    (code / "requirements.txt").write_text("a-private-package\n")
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setenv("CA_REPOSITORY_ARN", "arn:aws:codeartifact:eu-west-1:1:repository/domain/name")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)

    def done(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(os, "access", lambda _, mode: True)
    monkeypatch.setattr(subprocess, "run", done)
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    with pytest.raises(LaunchRefused, match="set PIP_INDEX_URL to the address of the repository"):
        run_sagemaker(argparse.Namespace())
    assert commands == []
    monkeypatch.setenv("PIP_INDEX_URL", "https://aws:token@codeartifact.example/simple/")
    run_sagemaker(argparse.Namespace())
    assert [command[1:3] for command in commands[:-1]] == [["-m", "pip"]]


def test_workers_at_least_are_workers_at_most_if_no_variable_says_more(tmp_path: Path) -> None:
    properties = properties_of({"SAGEMAKER_TS_MIN_WORKERS": "3"}, tmp_path, several=False)
    assert '"minWorkers": 3, "maxWorkers": 3' in properties


@pytest.mark.parametrize(
    ("variables", "several", "workers"),
    [
        ({}, True, ["1"]),
        ({"SAGEMAKER_MODEL_SERVER_WORKERS": "3"}, True, ["3"]),
        ({}, False, []),
    ],
)
def test_each_of_several_models_has_a_worker_if_no_variable_says_more(
    tmp_path: Path, variables: dict[str, str], several: bool, workers: list[str]
) -> None:
    properties = properties_of(variables, tmp_path, several)
    assert re.findall(r"^default_workers_per_model=(.*)$", properties, re.MULTILINE) == workers


def test_the_configuration_is_in_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("SAGEMAKER_BASE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    run_sagemaker(argparse.Namespace())
    written = Path(commands[0][commands[0].index("--ts-config") + 1])
    assert written.is_file()
    assert "inference_address=http://0.0.0.0:8080" in written.read_text()
    assert written.stat().st_mode & 0o077 == 0
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "model not found: expected the folder in which SageMaker puts models"),
        ({"SAGEMAKER_BIND_TO_PORT": "many"}, "SAGEMAKER_BIND_TO_PORT is 'many', expected a whole number"),
    ],
)
def test_what_can_not_be_started_says_why(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    if variables:
        (tmp_path / "model").mkdir()
    environ = {**os.environ, "SAGEMAKER_BASE_DIR": str(tmp_path), **variables}
    command = [sys.executable, "-m", "torchere.serving", "sagemaker"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert said in done.stdout
