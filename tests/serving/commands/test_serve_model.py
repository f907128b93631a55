from __future__ import annotations

import argparse
import errno
import importlib.metadata
import importlib.util
import multiprocessing
import os
import pwd
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.archiver import open_archive
from torchere.archiver.signature import SIGNATURE_NAME
from torchere.serving.commands import cli, serve_model
from torchere.serving.commands.serve_model import NotPacked
from torchere.serving.commands.serve_options import LaunchRefused

# Python 3.12 warns of forks in a process with threads; a server that starts has none.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
MODEL = "import torch\nimport sizes\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n"
MODEL += "        super().__init__(sizes.WIDTH, 2)\n"
ONNX = (  # y = relu(x) for FP32 x of [n, 8]
    b'\x08\x08\x12\x07by hand::\n\x0c\n\x01x\x12\x01y"\x04Relu'
    b"Z\x14\n\x01x\x12\x0f\n\r\x08\x01\x12\t\n\x03\x12\x01n\n\x02\x08\x08"
    b"b\x14\n\x01y\x12\x0f\n\r\x08\x01\x12\t\n\x03\x12\x01n\n\x02\x08\x08B\x04\n\x00\x10\x11"
)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with a model, and a cache, of this test alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TS_CONFIG_FILE", raising=False)
    Path("net.pt").write_bytes(b"weights")
    Path("handler.py").write_text("def handle(data, context):\n    return data\n")


def served(*arguments: str) -> argparse.Namespace:
    """Return the options of the server that `torchere serve` would start; the model is packed."""
    options = cli._parser(["serve", *arguments]).parse_args(["serve", *arguments])
    serve_model.serve_model(options, os.environ)
    return options


def archive_of(options: argparse.Namespace) -> Path:
    return Path(options.model_store, options.models[0].partition("=")[2])


def packings(capfd: pytest.CaptureFixture[str]) -> bool:
    """Whether a model was packed, not taken from the cache."""
    return "packed before" not in capfd.readouterr().err


def test_a_model_is_packed_under_the_name_of_its_file(tmp_path: Path) -> None:
    shutil.copy("net.pt", "My net (2).pt")
    options = served("My net (2).pt", "--handler", "handler.py", "--version", "3")
    assert options.models == ["My-net-2=My-net-2.mar"] and options.no_config_snapshots
    manifest = open_archive(archive_of(options)).manifest
    assert (manifest.model_name, manifest.model_version, manifest.handler) == ("My-net-2", "3", "handler.py")
    assert archive_of(options).is_relative_to(tmp_path / "cache" / "torchere")


def test_the_same_model_with_the_same_options_is_packed_once(capfd: pytest.CaptureFixture[str]) -> None:
    first = archive_of(served("net.pt", "--handler", "handler.py"))
    assert packings(capfd)
    assert archive_of(served("net.pt", "--handler", "handler.py")) == first
    assert not packings(capfd)


@pytest.mark.parametrize("changed", ["net.pt", "handler.py", "extra/file", "the options"])
def test_a_change_of_what_is_packed_makes_another_archive(changed: str) -> None:
    Path("extra").mkdir()
    Path("extra/file").write_text("1")
    arguments = ["net.pt", "--handler", "handler.py", "--extra-files", "extra"]
    first = archive_of(served(*arguments))
    if changed == "the options":
        arguments += ["--model-name", "other"]
    else:
        Path(changed).write_text("# another")
    assert archive_of(served(*arguments)) != first


def test_python_that_the_model_imports_makes_the_archive_anew(capfd: pytest.CaptureFixture[str]) -> None:
    Path("model.py").write_text(MODEL)
    Path("sizes.py").write_text("WIDTH = 3\n")
    Path("x.json").write_text("[[1.0, 2.0, 3.0]]")
    torch.save(torch.nn.Linear(3, 2).state_dict(), "net.pt")
    arguments = ("net.pt", "--model-file", "model.py", "--example", "x.json")
    first = archive_of(served(*arguments))
    assert packings(capfd) and archive_of(served(*arguments)) == first and not packings(capfd)
    Path("sizes.py").write_text("WIDTH = 1 + 2\n")
    assert archive_of(served(*arguments)) == first and packings(capfd)
    assert open_archive(first).read_text("sizes.py") == "WIDTH = 1 + 2\n"


def test_a_class_made_by_a_factory_becomes_torchscript(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("made.py").write_text(MODEL.replace("sizes.WIDTH", "3").replace("import sizes\n", ""))
    Path("x.json").write_text("[[1.0, 2.0, 3.0]]")
    torch.save(torch.nn.Linear(3, 2).state_dict(), "net.pt")
    archive = archive_of(served("net.pt", "--factory", "made:Net", "--example", "x.json", "--no-verify"))
    found = open_archive(archive)
    assert found.manifest.serialized_file == "model.pt" and found.entry(SIGNATURE_NAME)


def test_weights_without_a_class_are_refused_with_what_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    torch.save(torch.nn.Linear(3, 2).state_dict(), "net.pt")
    with pytest.raises(NotPacked) as refused:
        served("net.pt")
    assert refused.value.status == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("torchere serve: net.pt: a state dict") and "--model-file" in said
    assert not list(Path("cache").rglob("net*"))


def test_the_status_of_a_refusal_is_that_of_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    torch.jit.script(torch.nn.Linear(3, 2)).save("net.pt")
    assert cli.main(["serve", "net.pt"]) == 2
    assert "give --example" in capfd.readouterr().err


@pytest.fixture
def without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def spec(name: str, package: str | None = None) -> Any:
        return None if name == "onnxruntime" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", spec)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version("absent" if "onnxruntime" in name else name)
    )


@pytest.mark.usefixtures("without_onnxruntime")
def test_onnx_that_no_server_here_can_run_is_refused_before_it_is_packed() -> None:
    Path("relu.bin").write_bytes(ONNX)
    said = r"^relu\.bin is ONNX, which needs onnxruntime, and it is not installed; install torchere\[onnx\]$"
    with pytest.raises(LaunchRefused, match=said):
        served("relu.bin")
    assert not Path("cache").exists()
    assert archive_of(served("relu.bin", "--handler", "handler.py")).is_file()  # runs it in its own way
    Path("requirements.txt").write_text("onnxruntime\n")
    assert archive_of(served("relu.bin", "--requirements-file", "requirements.txt")).is_file()


def test_onnx_is_packed_anew_once_onnxruntime_is_installed(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("onnxruntime", reason="has no release for Python 3.10")
    Path("relu.onnx").write_bytes(ONNX)
    tried = archive_of(served("relu.onnx", "--handler", "handler.py"))
    request.getfixturevalue("without_onnxruntime")
    assert archive_of(served("relu.onnx", "--handler", "handler.py")) != tried


@pytest.mark.parametrize("form", ["default", "tgz", "no-archive"])
def test_an_archive_is_served_where_it_lies(form: str, tmp_path: Path) -> None:
    command = ["archive", "--model-name", "net", "--serialized-file", "net.pt", "--handler", "handler.py"]
    assert cli.main([*command, "--archive-format", form]) == 0
    name = {"default": "net.mar", "tgz": "net.tar.gz", "no-archive": "net"}[form]
    options = served(name)
    assert (options.model_store, options.models) == (str(tmp_path), [name])
    assert served(name, "--model-name", "other").models == [f"other={name}"]
    with pytest.raises(LaunchRefused, match=r"is an archive already, and --handler says how a model is"):
        served(name, "--handler", "handler.py")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.pt"], "absent.pt: no such file or folder; check the path"),
        (["net.pt", "--models", "a=a.mar"], "leave --models and --model-store out"),
        (["net.pt", "--model-store", "."], "leave --models and --model-store out"),
    ],
)
def test_what_does_not_go_with_a_model_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(LaunchRefused, match=said):
        served(*arguments)


def test_options_for_packing_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--example", "x.json", "--model-store", "."]) == 1
    assert capsys.readouterr().out == "no MODEL is given, and --example says how a model is packed\n"


def test_the_cache_keeps_what_was_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other.pt").write_bytes(b"other weights")
    old, kept = (archive_of(served(name, "--handler", "handler.py")) for name in ("net.pt", "other.pt"))
    os.utime(old, (0, 0))
    monkeypatch.setattr(serve_model, "MAX_CACHE_BYTES", 2 * kept.stat().st_size)
    used = archive_of(served("net.pt", "--handler", "handler.py", "--model-name", "third"))
    assert not old.parent.exists() and kept.exists() and used.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
def test_a_cache_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "cache/torchere/archives"
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    with pytest.raises(LaunchRefused, match="belongs to another user; set XDG_CACHE_HOME"):
        served("net.pt", "--handler", "handler.py")


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(LaunchRefused, match=r"cache/torchere/archives can't be made: .*set XDG_CACHE_HOME"):
        served("net.pt", "--handler", "handler.py")


def test_a_folder_that_the_cache_has_no_room_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path.mkdir

    def full(folder: Path, *arguments: Any, **named: Any) -> None:
        if folder.parent.name == "archives":
            raise OSError(errno.ENOSPC, "No space left on device")
        make(folder, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(LaunchRefused, match="can't be made: No space left on device"):
        served("net.pt", "--handler", "handler.py")


def test_a_user_without_a_home_directory_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(user_id: int) -> None:
        raise KeyError(user_id)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(LaunchRefused, match=r"no home directory.*: set XDG_CACHE_HOME"):
        served("net.pt", "--handler", "handler.py")


def test_a_current_directory_that_was_deleted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LaunchRefused, match="current directory is not there"):
        served("../net.pt", "--handler", "../handler.py")


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOENT])
def test_a_cache_that_cannot_be_tidied_serves_all_the_same(
    error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read-only, or another server has just deleted an archive of it."""
    first = archive_of(served("net.pt", "--handler", "handler.py"))

    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    place = (os, "utime") if error == errno.EROFS else (serve_model, "_prune")
    monkeypatch.setattr(*place, refuse)
    assert archive_of(served("net.pt", "--handler", "handler.py")) == first


def test_a_packing_that_is_stopped_leaves_no_child_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Any] = []

    class Stopped(Exception):
        pass

    def join(self: Any, timeout: float | None = None) -> None:
        if not stopped:
            stopped.append(self)
            raise Stopped
        original(self, timeout)

    process = multiprocessing.get_context("fork").Process
    original = process.join
    monkeypatch.setattr(process, "join", join)
    with pytest.raises(Stopped):
        served("net.pt")
    assert not stopped[0].is_alive() and not list(Path("cache/torchere/archives").iterdir())
