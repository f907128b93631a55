"""Archives from URLs, and archives that bring requirements: registered over the API of a real server."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

ECHO = "def handle(data, context):\n    return None if data is None else ['served'] * len(data)\n"
USES_DEPENDENCY = """
import tiny_dependency
def handle(data, context):
    return None if data is None else [tiny_dependency.VALUE] * len(data)
"""
WHEEL = "tiny_dependency-1.0-py3-none-any.whl"


def wheel_bytes(folder: Path) -> bytes:
    info = "tiny_dependency-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_dependency.py", "VALUE = 'from the wheel'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-dependency\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"tiny_dependency.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    return (folder / WHEEL).read_bytes()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that file URLs may name."""
    return tmp_path_factory.mktemp("shop")


@pytest.fixture(scope="module")
def server(start_server: Any, shop: Path) -> Any:
    properties = f"allowed_urls=file://{shop}/.*\ninstall_py_dep_per_model=true\n"
    return start_server("--disable-token-auth", "--enable-model-api", properties=properties)


def pack(path: Path, config: str = "", requirements: str = "", handler: str = ECHO) -> None:
    model = {"modelName": path.stem, "modelVersion": "1.0", "handler": "h.py"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("h.py", handler)
        if requirements:
            archive.writestr("requirements.txt", requirements)
            archive.writestr(WHEEL, wheel_bytes(path.parent))
            model["requirementsFile"] = "requirements.txt"
        if config:
            archive.writestr("c.yaml", config)
            model["configFile"] = "c.yaml"
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_archive_from_a_url_lives_in_the_store_as_long_as_its_model(
    server: Any, shop: Path, store: Path
) -> None:
    pack(shop / "bought.mar")
    url = f"file://{shop}/bought.mar"
    assert server.register(url, initial_workers=1).status == 200
    assert "bought.mar" in names(store)
    again = server.register(url, model_name="second")
    assert (again.status, again.json()["message"]) == (500, "Model file already exists bought.mar")
    assert server.call("GET", "/predictions/bought").body == b"served"
    described = server.call("GET", "/models/bought", api="management").json()
    assert described[0]["modelUrl"] == url
    assert server.call("DELETE", "/models/bought", api="management").status == 200
    assert "bought.mar" not in names(store)


def test_a_refused_or_broken_url_leaves_nothing(server: Any, shop: Path, store: Path) -> None:
    (shop / "page.mar").write_text("<html>sorry</html>")
    before = names(store)
    refused = server.register("file:///etc/passwd")
    assert (refused.status, refused.json()["type"]) == (404, "ModelNotFoundException")
    assert refused.json()["message"] == "Given URL file:///etc/passwd does not match any allowed URL(s)"
    assert server.register("http://169.254.169.254/latest/x.mar").status == 404
    assert server.register(f"file://{shop}/missing.mar").json()["type"] == "DownloadArchiveException"
    assert server.register(f"file://{shop}/page.mar").json()["type"] == "InvalidModelException"
    pack(shop / "twin.mar")
    pack(store / "original.mar")
    assert server.register("original.mar", model_name="twin").status == 200
    assert server.register(f"file://{shop}/twin.mar").status == 409
    assert names(store) == sorted([*before, "original.mar"])


@pytest.mark.parametrize("config", ["", "useVenv: true\n"])
def test_a_model_gets_what_it_requires_and_its_neighbours_do_not(
    server: Any, store: Path, config: str
) -> None:
    name = "venv" if config else "packages"
    requirements = f"--no-index\n./{WHEEL}\n"
    pack(store / f"{name}.mar", config=config, requirements=requirements, handler=USES_DEPENDENCY)
    pack(store / "bare.mar", handler=USES_DEPENDENCY)
    answer = server.register(f"{name}.mar", initial_workers=1)
    assert answer.status == 200, server.log()
    assert server.call("GET", f"/predictions/{name}").body == b"from the wheel"
    assert f"Installed custom pip packages for model {name}" in server.log()
    assert server.register("bare.mar", initial_workers=1).status == 500
    assert server.logs("No module named 'tiny_dependency'")


def test_a_model_whose_requirements_fail_is_not_registered(server: Any, store: Path) -> None:
    pack(store / "failing.mar", requirements="--no-index\nno-such-package==1.0\n")
    answer = server.register("failing.mar", initial_workers=1)
    assert answer.status == 400
    assert answer.json()["message"] == "Custom pip package installation failed for model failing"
    assert server.call("GET", "/models/failing", api="management").status == 404
