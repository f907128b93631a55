"""The Dockerfile and what goes with it."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from torchere.serving.config.properties import read_properties
from torchere.serving.config.resolve import configure


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> str:
    return (root / "deploy/Dockerfile").read_text()


def copied(dockerfile: str) -> list[str]:
    """The sources of every COPY from the build context."""
    lines = re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE)
    return [word for line in lines for word in line.split()[:-1] if not word.startswith("--")]


def test_what_it_copies_is_there_and_let_through(root: Path, dockerfile: str) -> None:
    ignored = (root / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    let_through = [line[1:] for line in ignored if line.startswith("!")]

    sources = copied(dockerfile)

    assert len(sources) > 5
    assert [name for name in sources if not (root / name).exists()] == []
    assert [name for name in sources if not any(fnmatch.fnmatch(name, each) for each in let_through)] == []


def test_every_folder_of_the_package_is_copied(root: Path, dockerfile: str) -> None:
    folders = re.findall(r'^"torchere\.\w+" = "(\w+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)

    assert "serving" in folders
    assert set(folders) - set(copied(dockerfile)) == set()  # pip ends the build without one


def index(folder: Path, **wheels: str) -> Path:
    """A package index of empty wheels, by name and version; torch needs filelock."""
    for name, version in wheels.items():
        (folder / name).mkdir(parents=True)
        file = folder / name / f"{name}-{version}-py3-none-any.whl"
        needs = "Requires-Dist: filelock\n" if name == "torch" else ""
        with zipfile.ZipFile(file, "w") as wheel:
            info = f"{name}-{version}.dist-info"
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        (folder / name / "index.html").write_text(
            f'<a href="{file.name.replace("+", "%2B")}">{file.name}</a>'
        )
    return folder


@pytest.mark.parametrize(
    ("document", "command"),
    [("deploy/Dockerfile", r"^RUN (pip install .*) torch "), ("README.md", r"^/\S+/(pip install .*?INDEX) ")],
)
def test_an_index_of_torch_gives_torch_and_the_pinned_rest_comes_from_the_usual_one(
    root: Path, tmp_path: Path, document: str, command: str
) -> None:
    usual = index(tmp_path / "usual", torch="2.13.0", filelock="4.2.11")
    of_torch = index(
        tmp_path / "torch", torch="2.13.0+cpu", filelock="3.20.0"
    )  # has old versions of the rest
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\nfilelock==4.2.11\n")
    install = re.search(command, (root / document).read_text(), re.MULTILINE)
    assert install
    bare = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    indexes = {"TORCH_INDEX": of_torch.as_uri(), "PIP_INDEX_URL": usual.as_uri()}
    words = install[1].replace(" INDEX", ' "$TORCH_INDEX"')  # which people read off a page
    shell = f'"{sys.executable}" -m {words} torch --dry-run --ignore-installed --report report.json'

    done = subprocess.run(
        ["bash", "-euc", shell], cwd=tmp_path, env={**os.environ, **bare, **indexes},
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())["install"]
    versions = {each["metadata"]["name"]: each["metadata"]["version"] for each in found}
    assert versions == {"torch": "2.13.0+cpu", "filelock": "4.2.11"}


def test_the_bundled_configuration_has_neither_errors_nor_warnings_and_the_exposed_ports(
    root: Path, dockerfile: str
) -> None:
    configuration = configure(read_properties(root / "deploy/config.properties"))

    assert configuration.of_level("error") + configuration.of_level("warning") == ()
    settings = configuration.settings
    addresses = (settings.inference_address, settings.management_address, settings.metrics_address,
                 settings.grpc_inference_address, settings.grpc_management_address)  # fmt: skip
    exposed = re.search(r"^EXPOSE (.*)$", dockerfile, re.MULTILINE)
    assert exposed
    assert [str(address.port) for address in addresses if address] == exposed.group(1).split()


def test_the_stores_that_it_makes_are_those_that_the_configuration_names(root: Path, dockerfile: str) -> None:
    settings = configure(read_properties(root / "deploy/config.properties")).settings

    made = re.findall(r"/home/model-server/\w+-store", dockerfile)

    assert made == [str(settings.model_store), str(settings.workflow_store)]


def test_it_runs_as_nobody_in_particular_and_is_asked_how_it_is(dockerfile: str) -> None:
    last_stage = dockerfile.rpartition("\nFROM ")[2]

    assert "\nUSER 1000:1000\n" in last_stage
    assert "HEALTHCHECK" in last_stage
    assert 'CMD ["python", "/usr/local/lib/torchere/healthcheck.py"]' in last_stage
    assert 'CMD ["serve"]' in last_stage


def test_it_is_entered_by_the_name_that_images_made_from_torchserves_replace(dockerfile: str) -> None:
    (link,) = re.findall(r"ln -s entrypoint.sh (\S+)", dockerfile)
    (entered,) = re.findall(r"^ENTRYPOINT (.*)$", dockerfile, re.MULTILINE)

    assert json.loads(entered) == ["/usr/bin/tini", "--", link]
    assert link == "/usr/local/bin/dockerd-entrypoint.sh"


def test_the_base_of_both_stages_is_pinned_by_digest(dockerfile: str) -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)

    assert re.fullmatch(r"python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base)
    assert re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE) == ["${BASE}", "${BASE}"]


def test_what_settings_ask_for_is_installed_without_an_argument(root: Path, dockerfile: str) -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", dockerfile, re.MULTILINE)
    known = re.findall(r"^(\w+) = \[", (root / "pyproject.toml").read_text(), re.MULTILINE)

    # tracing=true, s3:// archives, the handler of text embeddings, `torchere predict`, worker_sandbox=strict
    assert set(extras.split(",")) == {"otel", "s3", "tokenizers", "client", "sandbox"} <= set(known)
    assert 'pip install -c constraints.txt ".[$EXTRAS]"' in dockerfile


def test_bytecode_stays_and_that_of_the_standard_library_is_made(dockerfile: str, tmp_path: Path) -> None:
    (clean,) = re.findall(r"&& (find /opt/torchere .*)$", dockerfile, re.MULTILINE)
    (compiled,) = re.findall(r"&& (python -m compileall .*) \\\n", dockerfile)
    for folder in ("package/__pycache__", "package/tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "package/tests/old.py").write_text("print 1")
    (tmp_path / "package/module.py").write_text("")
    (tmp_path / "package/__pycache__/kept.pyc").write_text("")

    # the tests are left out of the second, too
    shell = f"{compiled} {tmp_path}; {clean.replace('/opt/torchere', str(tmp_path))}".replace(
        "python ", f"{sys.executable} ", 1
    )
    subprocess.run(["bash", "-euc", shell], check=True, timeout=60)

    left = {path.name.partition(".")[0] for path in (tmp_path / "package/__pycache__").iterdir()}
    assert left == {"kept", "module"}
    assert not (tmp_path / "package/tests").exists()


@pytest.mark.parametrize(
    "named",
    [
        "HEALTH_URL",
        "TS_CONFIG_FILE",
        "its TS_CONFIG_FILE",
        "--ts-config",
        "in its folder",
        "config.properties",
    ],
)
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("answers", [200, 503])
def test_the_health_check_asks_by_http_or_https(
    root: Path, tmp_path: Path, certificate: Callable[[Path], None], *, named: str, tls: bool, answers: int
) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answers if self.path == "/livez" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        if tls:
            certificate(tmp_path)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        file = tmp_path / ("config.properties" if named == "config.properties" else "other.properties")
        file.write_text(f"inference_address={'https' if tls else 'http'}://0.0.0.0:{port}\n")
        environ = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
                   "TMPDIR": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # fmt: skip
        environ |= {"HEALTH_URL": f"http://127.0.0.1:{port}/livez"} if named == "HEALTH_URL" else {}
        environ |= {"TS_CONFIG_FILE": str(file)} if named == "TS_CONFIG_FILE" else {}
        options = ["--ts-config", str(file)] if named == "--ts-config" else []
        options = ["--ts-config", file.name] if named == "in its folder" else options
        own = {"TS_CONFIG_FILE": str(file)} if named == "its TS_CONFIG_FILE" else {}
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        with subprocess.Popen(
            ["sh", "-c", "read end", *options], stdin=subprocess.PIPE, cwd=tmp_path, env={**os.environ, **own}
        ) as running:
            (tmp_path / ".model_server.pid").write_text(f"{running.pid}\n")
            asked = subprocess.run(
                [sys.executable, root / "deploy/healthcheck.py"],
                env=environ, cwd=elsewhere, check=False, timeout=30,
            )  # fmt: skip
        server.shutdown()

    assert asked.returncode == (answers != 200)


@pytest.mark.parametrize("written", [None, "inference_address=nonsense", "no line of a file: \\u12"])
def test_the_health_check_asks_the_usual_address_without_a_usable_configuration(
    root: Path, tmp_path: Path, written: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("healthcheck", root / "deploy/healthcheck.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if written:
        (tmp_path / "config.properties").write_text(written)
    monkeypatch.chdir(tmp_path)

    assert module.configured_url({"TMPDIR": str(tmp_path)}) == "http://127.0.0.1:8080/livez"


def test_any_other_user_of_group_0_may_write_where_user_1000_does(dockerfile: str, tmp_path: Path) -> None:
    home = tmp_path / "model-server"
    home.mkdir(mode=0o755)  # as useradd leaves it
    (options,) = re.findall(r"&& install -d -o 1000 -g 0 ((?:.*\\\n)*.*)", dockerfile)
    words = options.replace("\\\n", " ").replace("/home/model-server", str(home)).split()

    subprocess.run(["install", "-d", *words], check=True, timeout=30)

    temp = re.search(r"TEMP=/home/model-server/(\w+)", dockerfile)
    assert temp
    written = [home, *(home / name for name in ("logs", "model-store", temp.group(1)))]
    assert [path for path in written if not path.stat().st_mode & 0o020] == []
    assert "HOME=/home/model-server " in dockerfile  # or it were /, where such a user may not write


def test_copies_avoid_the_slow_instruction_of_amds_processors(dockerfile: str) -> None:
    run_stage = dockerfile.rpartition("FROM ")[2]
    assert "GLIBC_TUNABLES=glibc.cpu.x86_rep_movsb_threshold=1000000000 " in run_stage


def test_the_environment_keeps_its_pip(dockerfile: str) -> None:
    # It installs what models require; without it `RUN pip` finds the base image's, of another environment.
    assert re.search(r"^RUN python -m venv --system-site-packages /opt/torchere$", dockerfile, re.MULTILINE)
    assert "pip uninstall" not in dockerfile
    assert "/opt/torchere/bin:$PATH" in dockerfile.rpartition("\nFROM ")[2]


def test_the_user_of_the_container_may_install_packages_that_the_server_imports(
    dockerfile: str, tmp_path: Path
) -> None:
    (made,) = re.findall(r"^RUN python (-m venv .*)/opt/torchere$", dockerfile, re.MULTILINE)
    (base,) = re.findall(r"PYTHONUSERBASE=(\S+)", dockerfile)
    index(tmp_path / "index", colours="1.0")
    python, environ = tmp_path / "venv/bin/python", {**os.environ, "PYTHONUSERBASE": str(tmp_path / "user")}
    (wheel,) = tmp_path.glob("index/colours/*.whl")
    # As pip does by itself where the user may not write to the environment, but root may.
    install = ["-m", "pip", "--python", str(python), "install", "--user", "--no-index", str(wheel)]
    code = "import importlib.metadata as found; print(found.version('colours'))"

    for words in ([*made.split(), "--without-pip", str(tmp_path / "venv")], install):
        subprocess.run([sys.executable, *words], env=environ, check=True, timeout=120)
    told = subprocess.run([python, "-P", "-c", code], env=environ, check=True, capture_output=True, text=True)

    assert told.stdout == "1.0\n"
    assert base == "/home/model-server/.local"


def test_hadolint_has_nothing_to_say(root: Path, tool: Callable[[str], str]) -> None:
    checked = subprocess.run(
        [tool("hadolint"), root / "deploy/Dockerfile"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (checked.returncode, checked.stdout) == (0, "")


def test_shellcheck_has_nothing_to_say(root: Path, tool: Callable[[str], str]) -> None:
    scripts = sorted((root / "deploy").glob("*.sh"))

    checked = subprocess.run(
        [tool("shellcheck"), *scripts], check=False, capture_output=True, text=True, timeout=60
    )

    assert len(scripts) == 3
    assert (checked.returncode, checked.stdout) == (0, "")


def test_systemd_accepts_the_unit(root: Path, tool: Callable[[str], str], tmp_path: Path) -> None:
    unit = (root / "deploy/systemd/torchere.service").read_text()
    # The program is not installed where the unit says, and systemd would look.
    (tmp_path / "torchere.service").write_text(unit.replace("/opt/torchere/bin/torchere", "/bin/true"))

    checked = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", tmp_path / "torchere.service"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert "torchere.service" not in checked.stdout + checked.stderr
    stop_s = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    settings = configure(read_properties(root / "deploy/config.properties")).settings
    assert stop_s and int(stop_s.group(1)) > settings.drain_delay_s + settings.drain_timeout_s


def test_the_unit_leaves_ranks_the_sockets_by_which_they_find_each_other(root: Path) -> None:
    unit = (root / "deploy/systemd/torchere.service").read_text()

    (families,) = re.findall(r"^RestrictAddressFamilies=(.*)$", unit, re.MULTILINE)

    # gloo and NCCL call getifaddrs(), for which the C library opens a socket of AF_NETLINK.
    assert set(families.split()) == {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"}


def test_the_configuration_that_the_unit_installs_loads_the_store_and_listens_on_loopback_alone(
    root: Path, tmp_path: Path
) -> None:
    unit = (root / "deploy/systemd/torchere.service").read_text()
    said = re.search(r"^#   (sed .*?)  +#.*\n#     (install .*)$", unit, re.MULTILINE)
    assert said
    command = f"{said[1]} {said[2]}".replace("-g torchere", "").replace("/etc/", f"{tmp_path}/")

    subprocess.run(["sh", "-euc", command], cwd=root, check=True, timeout=30)

    settings = configure(read_properties(tmp_path / "torchere/config.properties")).settings
    rest = (settings.inference_address, settings.management_address, settings.metrics_address)
    grpc = (settings.grpc_inference_address, settings.grpc_management_address)
    assert {address.host for address in (*rest, *grpc) if address} == {"127.0.0.1"}
    assert settings.load_models == ("all",)
    assert settings.workflow_store is None  # the unit names the model store, in which workflows are then
