"""Environments of versions, built with the real pip and venv from a wheel that lies in the archive."""

import asyncio
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from torchere.serving.errors import DependenciesFailed
from torchere.serving.store.environment import (
    Environment,
    EnvironmentBuilder,
    _errors_in,
)

WHEEL = "tiny_dependency-1.0-py3-none-any.whl"
REQUIREMENTS = f"--no-index\n./{WHEEL}\n"
BROKEN = "--no-index\nno-such-package==1.0\n"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An unpacked archive with a wheel of its own."""
    folder = tmp_path / "unpacked" / "model"
    folder.mkdir(parents=True)
    info = "tiny_dependency-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_dependency.py", "VALUE = 'from the wheel'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-dependency\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"tiny_dependency.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")
    (folder / "requirements.txt").write_text(REQUIREMENTS)
    (folder / "broken.txt").write_text(BROKEN)
    return folder


def build(
    archive: Path, *, venv: bool = False, requirements: str | None = None, timeout_s: float = 120.0
) -> Environment | None:
    builder = EnvironmentBuilder(os.environ, timeout_s, installs=True)
    manifest = {"model": {"requirementsFile": requirements}}
    return asyncio.run(builder.build("m", archive, manifest, {"useVenv": venv}))


def output(python: str, code: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [python, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("installs", "model", "config", "built"),
    [
        (False, {"requirementsFile": "r.txt"}, {}, []),
        (True, {"requirementsFile": "r.txt"}, {}, ["r.txt"]),
        (True, {}, {"useVenv": True}, ["venv"]),
        (False, {"requirementsFile": "r.txt"}, {"useVenv": True}, ["venv"]),
        (True, {"requirementsFile": "r.txt"}, {"useVenv": "yes"}, ["r.txt"]),
        (True, {"requirementsFile": 1}, {"useVenv": 1}, []),
        (True, {"requirementsFile": ""}, {}, []),
    ],
)
def test_what_is_built_is_what_archive_and_server_say(
    *,
    installs: bool,
    model: dict[str, object],
    config: dict[str, object],
    built: list[str],
    archive: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    async def make_venv(self: EnvironmentBuilder, model: str, place: Path) -> Environment:
        done.append(place.name)
        return Environment(python=str(place))

    async def install(self: EnvironmentBuilder, model: str, directory: Path, file: str, *_: object) -> None:
        done.append(file)

    monkeypatch.setattr(EnvironmentBuilder, "_make_venv", make_venv)
    monkeypatch.setattr(EnvironmentBuilder, "_install", install)
    builder = EnvironmentBuilder(os.environ, 120.0, installs)
    environment = asyncio.run(builder.build("m", archive, {"model": model}, config))
    assert done == built
    assert (environment is None) == (not built)


def test_nothing_is_built_without_a_plan(archive: Path) -> None:
    assert build(archive) is None
    assert list(archive.parent.iterdir()) == [archive]


def test_requirements_go_into_a_folder_of_the_version(
    archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    environment = build(archive, requirements="requirements.txt")
    packages = archive.parent / "packages"
    assert environment == Environment(packages=str(packages))
    code = "import tiny_dependency; print(tiny_dependency.VALUE)"
    assert output(sys.executable, code, PYTHONPATH=str(packages)) == "from the wheel"
    assert "Installed custom pip packages for model m" in caplog.messages
    assert not list(archive.glob("tiny_dependency*.py"))


def test_a_venv_has_its_own_packages_and_sees_the_servers(
    archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    build(archive, venv=True, requirements="requirements.txt")
    python = str(archive.parent / "venv" / "bin" / "python")
    code = "import tiny_dependency, msgspec, torchere.serving; print(tiny_dependency.__file__)"
    assert output(python, code).startswith(str(archive.parent / "venv"))
    made = f"Created virtual environment for model m: {archive.parent / 'venv'}"
    said = [message for message in caplog.messages if "waits for pip" not in message]
    assert said == [made, "Installed custom pip packages for model m"]


def test_what_cannot_be_installed_is_said_with_pips_last_words(archive: Path) -> None:
    with pytest.raises(DependenciesFailed) as caught:
        build(archive, requirements="broken.txt")
    assert caught.value.message == "Custom pip package installation failed for model m"
    assert "No matching distribution found for no-such-package" in caught.value.detail
    assert caught.value.detail.startswith("pip install -r broken.txt: exit status 1: ERROR: ")
    assert "\n" not in caught.value.detail


def test_of_a_build_that_failed_all_of_pips_words_are_kept() -> None:
    text = "  error: subprocess-exited-with-error\n  x.c:1: no such header\nERROR: Failed building wheel"
    assert _errors_in(text) == text


def test_what_pip_says_about_its_error_in_further_lines_is_kept() -> None:
    text = (
        "Collecting a\nERROR: Cannot install a and b because these package versions have conflicting "
        "dependencies.\n\nThe conflict is caused by:\n    a 1 depends on c==1\n    b 1 depends on c==2\n\n"
        "ERROR: ResolutionImpossible: for help visit the pages of pip"
    )
    said = _errors_in(text)
    assert said.startswith("ERROR: Cannot install a and b") and "\n" not in said
    assert "a 1 depends on c==1 b 1 depends on c==2 ERROR: ResolutionImpossible" in said
    assert _errors_in("ERROR: Exception:\nTraceback\n  x\nReadTimeoutError: late").endswith("late")


def test_a_venv_that_cannot_be_made_is_said(archive: Path) -> None:
    (archive.parent / "venv").write_text("in the way")
    with pytest.raises(DependenciesFailed) as caught:
        build(archive, venv=True)
    assert caught.value.message == "Virtual environment creation failed for model m"


def test_an_installation_that_hangs_is_ended(archive: Path) -> None:
    with pytest.raises(DependenciesFailed) as caught:
        build(archive, requirements="requirements.txt", timeout_s=0.01)
    said = "pip install -r requirements.txt: not done within install_timeout_s=0.01"
    assert caught.value.detail == said


def test_cancelling_ends_the_installation(archive: Path) -> None:
    before = children()  # left by other tests, perhaps

    async def cancelled() -> None:
        builder = EnvironmentBuilder(os.environ, 120.0, installs=True)
        manifest = {"model": {"requirementsFile": "requirements.txt"}}
        task = asyncio.ensure_future(builder.build("m", archive, manifest, {}))
        while not task.done() and children() == before:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert children() == before


def children() -> list[str]:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
