"""Servers whose workers are in a sandbox, as an operator starts them: hostile handlers, and normal models."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import RunningServer, start

from torchere.serving.commands.cli import main
from torchere.serving.process import confinement
from torchere.serving.process.confinement import SCOPES_ABI

NOBODY = 65_534
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
KERNEL = confinement.kernel()
LACKS = KERNEL.why_no_seccomp or (
    f"Landlock ABI {KERNEL.landlock_abi}, needs {SCOPES_ABI}" if KERNEL.landlock_abi < SCOPES_ABI else ""
)
pytestmark = pytest.mark.skipif(bool(LACKS), reason=f"strict is not possible here: {LACKS}")

HOSTILE = """
import json, os, resource, signal, socket

class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [self.tried(row["body"]) for row in data]

    def tried(self, attack):
        try:
            return json.dumps(["done", str(eval(attack["source"], globals()))])
        except Exception as err:
            return json.dumps([type(err).__name__, str(err)])
"""
COMPILING = """
import torch

class Handler:
    def initialize(self, context):
        self.model = torch.compile(torch.nn.Linear(4, 2))
        with torch.no_grad():
            self.model(torch.zeros(2, 4))

    def handle(self, data, context):
        with torch.no_grad():
            return [self.model(torch.ones(2, 4)).shape[1]] * len(data)
"""
REQUIRING = """
import tiny_dependency

def handle(data, context):
    return None if data is None else [tiny_dependency.NAME] * len(data)
"""
MODEL = """
import torch


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 8)

    def forward(self, x):
        return self.layer(x)
"""
FORMATS = {
    "torchscript": ["--format=torchscript"],
    "export": ["--format=export"],
    "int8": ["--format=torchscript", "--quantize=int8-dynamic", "--accept-drift"],
    "aoti": ["--format=aoti"],
}
# Multiplies no matrices: AOTInductor compiles it once, and measures no second build.
MODEL_OF_AOTI = """
import torch


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 64))

    def forward(self, x):
        return (x[:, None] * self.weight).sum(-1)
"""


@pytest.fixture(scope="module")
def grounds() -> Iterator[Path]:
    """A folder that every user may enter, with the model store; pytest's own folders are root's."""
    folder = Path(tempfile.mkdtemp(prefix="torchere-sandbox-"))
    folder.chmod(0o755)
    (folder / "store").mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def python(grounds: Path) -> str:
    """An interpreter with this project's packages that other users may run, where the tests run as root."""
    if not IS_ROOT or _is_open(Path(sys.base_prefix)):
        return sys.executable
    system = shutil.which("python{}.{}".format(*sys.version_info[:2]), path="/usr/bin:/usr/local/bin")
    if system is None:
        pytest.skip(
            f"root's workers can't change their user: {sys.base_prefix} is root's, and no other Python"
        )
    subprocess.run([system, "-m", "venv", "--without-pip", grounds / "venv"], check=True)
    (packages,) = (grounds / "venv").glob("lib/python*/site-packages")
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "torchere.pth").write_text("".join(f"import site; site.addsitedir({f!r})\n" for f in folders))
    return str(grounds / "venv/bin/python")


def _is_open(path: Path) -> bool:
    return all(each.stat().st_mode & stat.S_IXOTH for each in (path, *path.parents))


@pytest.fixture(scope="module")
def start_confined(grounds: Path, python: str) -> Iterator[Callable[..., RunningServer]]:
    """Starts a server for each setting: as the user of the tests, or where this is root, as another one."""
    servers: dict[tuple[str, int | None], RunningServer] = {}

    def starter(properties: str, user: int | None = None) -> RunningServer:
        if (properties, user) in servers:
            return servers[properties, user]
        folder = Path(tempfile.mkdtemp(dir=grounds))
        if user is not None:
            shutil.chown(folder, user, user)
        arguments = ("--enable-model-api", "--disable-token-auth")
        started = start(folder, *arguments, properties=properties, python=python, user=user)
        servers[properties, user] = started
        (folder / "key_file.json").write_text("the keys")
        return started

    yield starter
    for server in servers.values():
        assert server.stop() == 0


@pytest.fixture(scope="module", params=["user of its own", "user of the server"])
def strict(request: pytest.FixtureRequest, start_confined: Callable[..., RunningServer]) -> RunningServer:
    properties = settings("strict")
    if request.param == "user of the server":
        return start_confined(properties, NOBODY if IS_ROOT else None)
    if not IS_ROOT:
        pytest.skip("only root can give workers a user of their own")
    return start_confined(properties + OWN_USER)


OWN_USER = "worker_user=nobody\nworker_memory_limit=4294967296\n"


def settings(level: str) -> str:
    return f"worker_sandbox={level}\ninstall_py_dep_per_model=true\n"


def pack(store: Path, name: str, files: dict[str, str | bytes], **model: str) -> str:
    described = {"modelName": name, "modelVersion": "1.0", "handler": "handler.py", **model}
    with zipfile.ZipFile(store / f"{name}.mar", "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": described}))
    return f"{name}.mar"


def tried(server: RunningServer, source: str) -> list[str]:
    body = json.dumps({"source": source}).encode()
    reply = server.call("POST", "/predictions/hostile", body, content_type="application/json")
    assert reply.status == 200, server.log()
    answer: list[str] = reply.json()
    return answer


def test_a_hostile_handler_reaches_nothing_of_the_server(strict: RunningServer, grounds: Path) -> None:
    for name in ("hostile", "other"):
        archive = pack(grounds / "store", name, {"handler.py": HOSTILE})
        assert strict.register(archive, initial_workers=1, synchronous="true").status == 200, strict.log()
    (pid,) = {worker["pid"] for worker in workers(strict, "hostile")}
    (other,) = {worker["pid"] for worker in workers(strict, "other")}
    unpacked = Path(os.readlink(f"/proc/{other}/cwd"))
    server, folder = strict.process.pid, strict.folder
    attacks = {
        f"open('{folder}/key_file.json').read()": "PermissionError",
        f"open('{folder}/config.properties').read()": "PermissionError",
        "open('/etc/shadow').read()": "PermissionError",
        f"open('{unpacked}/handler.py').read()": "PermissionError",
        f"open('{grounds}/store/other.mar', 'rb').read()": "PermissionError",
        f"open('{folder}/new', 'w')": "PermissionError",
        "open('/tmp/new-file-of-a-hostile-handler', 'w')": "PermissionError",
        f"socket.create_connection(('127.0.0.1', {strict.rest['management'].rpartition(':')[2]}))": (
            "PermissionError"
        ),
        "[open('handler.py') for _ in range(10_000)]": "OSError",
        f"os.kill({server}, signal.SIGTERM)": "PermissionError",
        f"os.kill({other}, signal.SIGTERM)": "PermissionError",
        f"os.setpriority(os.PRIO_PROCESS, {server}, 19)": "PermissionError",
        f"resource.prlimit({server}, resource.RLIMIT_NOFILE, (0, 0))": "PermissionError",
        f"open('/proc/{server}/environ', 'rb').read(1)": "PermissionError",
        f"open('/proc/{other}/environ', 'rb').read(1)": "PermissionError",
        f"open('/proc/{server}/fd/1', 'w').write('forged')": "PermissionError",
        f"open('/proc/{other}/mem', 'rb').read(1)": "PermissionError",
        "os.listdir('/home')": "PermissionError",
    }
    assert {attack: tried(strict, attack)[0] for attack in attacks} == attacks
    assert tried(strict, "open(os.environ['TMPDIR'] + '/mine', 'w').write('mine')") == ["done", "4"]
    assert {worker["pid"] for worker in workers(strict, "hostile")} == {pid}
    assert strict.call("GET", "/ping").status == 200
    for name in ("hostile", "other"):
        assert strict.call("DELETE", f"/models/{name}", api="management").status == 200
    assert not unpacked.exists()


def workers(server: RunningServer, model: str) -> list[dict[str, Any]]:
    described = server.call("GET", f"/models/{model}", api="management").json()
    found: list[dict[str, Any]] = described[0]["workers"]
    return found


@pytest.fixture(scope="module")
def models(grounds: Path) -> list[str]:
    """The model of one source in each format, in the store."""
    (grounds / "scale.py").write_text(MODEL)
    (grounds / "aoti.py").write_text(MODEL_OF_AOTI)
    (grounds / "example.json").write_text(json.dumps([[0.5] * 64, [1.0] * 64]))
    torch.save(
        {"layer.weight": torch.full((8, 64), 0.5), "layer.bias": torch.zeros(8)}, grounds / "scale.pth"
    )
    torch.save({"weight": torch.full((8, 64), 0.5)}, grounds / "aoti.pth")
    made = []
    for name, flags in FORMATS.items():
        if name == "aoti" and shutil.which("g++") is None:
            continue
        arguments = ["archive", f"--model-name={name}", f"--export-path={grounds}/store", *flags]
        source = grounds / ("aoti" if name == "aoti" else "scale")
        arguments += [f"--model-file={source}.py", f"--serialized-file={source}.pth"]
        arguments += [f"--example={grounds}/example.json", "--dynamic-batch=1:16", "--no-verify"]
        assert main(arguments) == 0
        made.append(name)
    return made


@pytest.fixture(scope="module", params=["off", "basic", "strict"])
def level(request: pytest.FixtureRequest, start_confined: Callable[..., RunningServer]) -> RunningServer:
    """A server of each level; with a user of its own where this is possible."""
    own_user = OWN_USER if IS_ROOT and request.param != "off" else ""
    return start_confined(settings(request.param) + own_user)


def test_models_of_every_format_are_served_at_every_level(level: RunningServer, models: list[str]) -> None:
    for name in models:
        reply = level.register(f"{name}.mar", initial_workers=2, synchronous="true", batch_size=4)
        assert reply.status == 200, level.log()
        body = json.dumps([1.0] * 64).encode()
        answer = level.call("POST", f"/predictions/{name}", body, content_type="application/json")
        assert answer.status == 200, level.log()
        assert answer.json() == pytest.approx([32.0] * 8, rel=0.05)
    assert "using a temporary folder" not in level.log()  # of a .pt2: its workers share one library


def test_a_model_with_packages_of_its_own_is_served_at_every_level(
    level: RunningServer, grounds: Path
) -> None:
    wheel = "tiny_dependency-1.0-py3-none-any.whl"
    files: dict[str, str | bytes] = {
        "handler.py": REQUIRING,
        "requirements.txt": f"--no-index\n./{wheel}\n",
        wheel: wheel_bytes(grounds / wheel, {"tiny_dependency.py": "NAME = 'from the wheel'\n"}),
    }
    archive = pack(grounds / "store", "requiring", files, requirementsFile="requirements.txt")
    assert level.register(archive, initial_workers=1, synchronous="true").status == 200, level.log()
    assert level.call("GET", "/predictions/requiring").body == b"from the wheel"


ATTACKING_AT_THE_START = """
import os
try:
    open({path!r}).read()
    os.environ["OUTCOME"] = "read"
except OSError as err:
    os.environ["OUTCOME"] = type(err).__name__
"""
TELLING = """
import os

def handle(data, context):
    return None if data is None else [os.environ["OUTCOME"]] * len(data)
"""


def test_packages_run_in_the_sandbox_from_the_start_of_the_interpreter(
    strict: RunningServer, grounds: Path
) -> None:
    wheel = "tiny_dependency-1.0-py3-none-any.whl"
    attack = ATTACKING_AT_THE_START.format(path=f"{strict.folder}/key_file.json")
    files: dict[str, str | bytes] = {
        "handler.py": TELLING,
        "model-config.yaml": "useVenv: true\n",
        "requirements.txt": f"--no-index\n./{wheel}\n",
        wheel: wheel_bytes(grounds / wheel, {"attack.py": attack, "attack.pth": "import attack\n"}),
    }
    archive = pack(
        grounds / "store",
        "starting",
        files,
        requirementsFile="requirements.txt",
        configFile="model-config.yaml",
    )
    assert strict.register(archive, initial_workers=1, synchronous="true").status == 200, strict.log()
    assert strict.call("GET", "/predictions/starting").body == b"PermissionError"


def wheel_bytes(path: Path, modules: dict[str, str]) -> bytes:
    info = "tiny_dependency-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, source in modules.items():
            wheel.writestr(name, source)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny_dependency\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_handler_compiles_in_a_strict_sandbox(strict: RunningServer, grounds: Path) -> None:
    archive = pack(grounds / "store", "compiling", {"handler.py": COMPILING})
    assert strict.register(archive, initial_workers=1, synchronous="true").status == 200, strict.log()
    assert strict.call("GET", "/predictions/compiling").body == b"2"


def test_the_log_names_the_parts_in_effect(strict: RunningServer) -> None:
    log = strict.log()
    assert "worker_sandbox=strict: no new privileges; " in log
    assert f"files by Landlock ABI {KERNEL.landlock_abi}; system calls by seccomp" in log


@pytest.mark.skipif(not IS_ROOT, reason="the server is not root's")
def test_strict_as_root_without_a_user_does_not_start(grounds: Path, python: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=grounds))
    with pytest.raises(AssertionError, match="the server ended with 1") as failed:
        start(folder, properties="worker_sandbox=strict\n", python=python)
    text = "The sandbox of workers is not possible here. worker_sandbox=strict needs worker_user, because "
    assert text in str(failed.value)
