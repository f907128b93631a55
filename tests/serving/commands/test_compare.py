"""`torchere compare`: two archives on the same inputs."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from torchere.archiver.models.verify import compare as verify
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.signature import Signature, TensorSpec
from torchere.archiver.writer import write_archive
from torchere.serving.commands.cli import main
from torchere.serving.commands.compare import names_of


class Mean(nn.Module):
    """The mean of each colour, times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) * self.factor


@pytest.fixture
def measured_memory() -> None:
    """The memory of both models is measured."""


@pytest.fixture(autouse=True)
def memory_is_not_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare without the memory, but for `measured_memory`: its process imports torch each time."""
    if "measured_memory" not in request.fixturenames:
        monkeypatch.setattr(verify, "with_memory", lambda report, *_: report)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Archives `one.mar`, `close.mar` and `far.mar`, and a folder `data` with an array and a picture."""
    monkeypatch.setattr(verify, "_BUDGET_S", 0.01)
    for name, factor in (("one", 1.0), ("close", 1.01), ("far", 2.0)):
        pack(tmp_path, name, factor)
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "array.npy", np.random.default_rng(0).random((1, 3, 4, 4), np.float32))
    Image.new("RGB", (20, 10), (255, 0, 51)).save(tmp_path / "data" / "picture.png")
    return tmp_path


SIGNATURE = Signature(
    (TensorSpec("x", "FP32", (-1, 3, 4, 4)),), (TensorSpec("y", "FP32", (-1, 3)),)
).to_json()
IMAGE = "handler: {image: {resize: 8, crop: 8, mean: [0, 0, 0], std: [1, 1, 1]}}\n"


def pack(
    folder: Path, name: str, factor: float, settings: str = IMAGE, extra_files: tuple[str, ...] = ()
) -> None:
    weights, config = folder / f"{name}.pt", folder / "model-config.yaml"
    torch.jit.trace(Mean(factor).eval(), torch.zeros(1, 3, 4, 4)).save(str(weights))
    config.write_text(settings)
    write_archive(
        ArchiveRequest(
            model_name=name,
            version="1.0",
            handler="base_handler",
            serialized_file=weights,
            config_file=config,
            export_path=folder,
            extra_files=extra_files,
        )
    )


@pytest.mark.usefixtures("measured_memory")
def test_models_that_are_close_are_accepted_and_drawn(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        [
            *("compare", str(folder / "one.mar"), str(folder / "close.mar")),
            *("--data", str(folder / "data"), "--picture", str(folder / "p.svg"), "--json"),
        ]
    )

    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert report["difference"]["drift"] == pytest.approx(0.01, rel=1e-3)
    # The picture is red all over: 1, 0 and 0.2, prepared as the archive says.
    assert report["difference"]["largest_abs"] == pytest.approx(0.01, rel=1e-3)
    assert report["samples"] == 2
    assert report["packed"]["memory_bytes"] is not None
    assert (folder / "p.svg").read_text().startswith("<svg")


def test_models_that_are_far_apart_end_with_status_2_and_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(
        ["compare", str(folder / "one.mar"), str(folder / "far.mar"), "--data", str(folder / "data")]
    )

    assert status == 2
    assert "drift 1, at most 0.25 wanted: REFUSED" in capsys.readouterr().out


def test_a_picture_that_cannot_be_written_is_one_line_behind_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archives = (str(folder / "one.mar"), str(folder / "close.mar"))
    picture = str(folder / "none" / "p.svg")

    status = main(["compare", *archives, "--data", str(folder / "data"), "--picture", picture])

    assert status == 2
    said = capsys.readouterr()
    assert "drift 0.01" in said.out
    assert said.err == f"torchere compare: {picture}: No such file or directory\n"


def test_a_full_disk_leaves_the_picture_as_it_was(
    folder: Path, fill_disk: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    picture = folder / "p.svg"
    picture.write_text("old")
    before = set(os.listdir(folder))
    fill_disk()
    archives = (str(folder / "one.mar"), str(folder / "close.mar"))

    status = main(["compare", *archives, "--data", str(folder / "data"), "--picture", str(picture)])

    assert status == 2
    assert capsys.readouterr().err == f"torchere compare: {picture}: No space left on device\n"
    assert picture.read_text() == "old"
    assert set(os.listdir(folder)) == before


@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_picture_that_no_other_file_can_replace_is_written_in_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    picture = folder / "p.svg"
    picture.write_text("old")
    number, write_text, replace = picture.stat().st_ino, Path.write_text, os.replace

    def no_file_made(path: Path, text: str, **options: str) -> int:
        if path.name.endswith(".part"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return write_text(path, text, **options)

    def busy(source: Path, target: Path) -> None:
        if target.name == "p.svg":
            raise OSError(errno.EBUSY, "Device or resource busy", str(source), None, str(target))
        replace(source, target)

    if call == "open":
        monkeypatch.setattr(Path, "write_text", no_file_made)
    else:
        monkeypatch.setattr(os, "replace", busy)
    before = set(os.listdir(folder))
    archives = (str(folder / "one.mar"), str(folder / "close.mar"))
    assert main(["compare", *archives, "--data", str(folder / "data"), "--picture", str(picture)]) == 0
    assert (picture.read_text()[:4], picture.stat().st_ino) == ("<svg", number)
    assert set(os.listdir(folder)) == before


def test_a_picture_goes_to_standard_output_behind_the_report(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    archives = (str(folder / "one.mar"), str(folder / "close.mar"))
    assert main(["compare", *archives, "--data", str(folder / "data"), "--picture", "/dev/stdout"]) == 0
    report, _, picture = capfd.readouterr().out.partition("<svg")
    assert "drift 0.01" in report
    assert picture.endswith("</svg>\n")


def test_a_picture_may_go_to_a_pipe(folder: Path) -> None:
    reading, writing = os.pipe()
    archives = (str(folder / "one.mar"), str(folder / "close.mar"))
    try:
        picture = f"/dev/fd/{writing}"
        assert main(["compare", *archives, "--data", str(folder / "data"), "--picture", picture]) == 0
        assert os.read(reading, 4) == b"<svg"
    finally:
        os.close(reading)
        os.close(writing)


def test_ended_by_a_signal_it_leaves_no_unpacked_model_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder / "tmp"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))

    def ended(*_: object, **__: object) -> None:
        assert len(list(place.iterdir())) == 2
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the comparison went on")

    monkeypatch.setattr(verify, "verify", ended)
    archives = (str(folder / "one.mar"), str(folder / "close.mar"))
    ours = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(SystemExit) as end:
            main(["compare", *archives, "--data", str(folder / "data")])
    finally:
        signal.signal(signal.SIGTERM, ours)
    assert end.value.code == 128 + signal.SIGTERM
    assert list(place.iterdir()) == []


def test_ctrl_c_while_torch_is_imported_is_not_lost(tmp_path: Path) -> None:
    dropping = (  # as the start of torch in C does
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    (tmp_path / "torch.py").write_text(dropping)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "torchere.serving", "compare", "a.mar", "b.mar", "--data", "x"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_inputs_that_a_model_fails_on_are_one_line_and_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(folder / "data" / "array.npy", np.zeros((2, 2), np.float32))

    status = main(
        ["compare", str(folder / "one.mar"), str(folder / "far.mar"), "--data", str(folder / "data")]
    )

    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "running one.mar and far.mar on" in line


def test_an_input_without_a_batch_is_told_the_shape_that_is_expected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "signature.json").write_text(SIGNATURE)
    for name, factor in (("signed", 1.0), ("too", 1.01)):
        pack(folder, name, factor, extra_files=(str(folder / "signature.json"),))
    np.save(folder / "data" / "array.npy", np.zeros((3, 4, 4), np.float32))
    (folder / "data" / "picture.png").unlink()
    archives = (str(folder / "signed.mar"), str(folder / "too.mar"))
    assert main(["compare", *archives, "--data", str(folder / "data")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"torchere compare: {folder}/data/array.npy, for signed.mar: the example of 'x' is (3, 4, 4); the "
        "model takes (-1, 3, 4, 4), in which -1 is any size: give it a batch dimension: (1, 3, 4, 4)"
    ]


def test_a_configuration_that_prepares_no_picture_is_one_line_and_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack(folder, "odd", 1.0, "handler: {image: 5}\n")

    status = main(
        ["compare", str(folder / "odd.mar"), str(folder / "one.mar"), "--data", str(folder / "data")]
    )

    assert status == 2
    assert "handler.image in model-config.yaml is 5; expected a mapping" in capsys.readouterr().err


def test_data_that_is_no_input_is_one_line_and_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data" / "notes.txt").write_text("no tensor")

    status = main(
        ["compare", str(folder / "one.mar"), str(folder / "far.mar"), "--data", str(folder / "data")]
    )

    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "notes.txt" in line


def test_the_data_may_be_one_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archives = (str(folder / "one.mar"), str(folder / "close.mar"))

    status = main(["compare", *archives, "--data", str(folder / "data" / "array.npy"), "--json"])

    assert (status, json.loads(capsys.readouterr().out)["samples"]) == (0, 1)


def test_models_of_doubles_get_their_data_as_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NumPy makes FP64 unasked, so that for other models it becomes FP32."""
    monkeypatch.setattr(verify, "_BUDGET_S", 0.01)
    signature = Signature((TensorSpec("x", "FP64", (-1, 2)),), (TensorSpec("y", "FP64", (-1, 1)),))
    (tmp_path / "signature.json").write_text(signature.to_json())
    module = torch.jit.trace(nn.Linear(2, 1, dtype=torch.float64).eval(), torch.zeros(1, 2).double())
    module.save(str(tmp_path / "net.pt"))
    request = ArchiveRequest(
        model_name="net",
        version="1.0",
        handler="tensor",
        serialized_file=tmp_path / "net.pt",
        export_path=tmp_path,
        extra_files=(str(tmp_path / "signature.json"),),
    )
    write_archive(request)
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "array.npy", np.ones((3, 2)))
    (tmp_path / "data" / "row.json").write_text("[[1.0, 2.5]]")

    archive = str(tmp_path / "net.mar")
    status = main(["compare", archive, archive, "--data", str(tmp_path / "data")])

    assert (status, capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize("wrong", ["no archive", "no data"])
def test_what_is_missing_is_one_line_and_status_2(
    wrong: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = folder / ("none.mar" if wrong == "no archive" else "one.mar")
    data = folder / ("none" if wrong == "no data" else "data")

    status = main(["compare", str(folder / "one.mar"), str(archive), "--data", str(data)])

    assert status == 2
    said = capsys.readouterr().err
    assert said.startswith("torchere compare: ")
    assert "Errno" not in said
    assert (f"--data {data}: no such file or folder" in said) == (wrong == "no data")


def test_a_model_whose_own_code_raises_is_one_line_and_status_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.py").write_text("import not_there\n")
    torch.save({}, folder / "broken.pt")
    write_archive(
        ArchiveRequest(
            model_name="broken",
            version="1.0",
            handler="base_handler",
            model_file=folder / "model.py",
            serialized_file=folder / "broken.pt",
            export_path=folder,
        )
    )

    status = main(
        ["compare", str(folder / "one.mar"), str(folder / "broken.mar"), "--data", str(folder / "data")]
    )

    assert status == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "broken.mar failed: ModuleNotFoundError: No module named 'not_there'" in line


@pytest.mark.parametrize("settings", ["a: !!bool maybe", "- 1", "batchSize: 65537"])
def test_a_configuration_that_the_server_refuses_is_refused_here_too(
    folder: Path, capsys: pytest.CaptureFixture[str], settings: str
) -> None:
    pack(folder, "odd", 1.0, settings)
    data = ("--data", str(folder / "data"))
    assert main(["compare", str(folder / "one.mar"), str(folder / "odd.mar"), *data]) == 2
    assert "odd.mar: model-config.yaml: " in capsys.readouterr().err


OWN = """
import pathlib
from torchere.handlers.vision.tasks import ImageClassifier

pathlib.Path({sign!r}).touch()


class Own(ImageClassifier):
    pass
"""


def test_a_handler_of_the_archives_own_prepares_pictures_only_when_it_is_trusted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sign = folder / "ran"
    (folder / "own.py").write_text(OWN.format(sign=str(sign)))
    for name in ("one", "close"):
        write_archive(
            ArchiveRequest(
                model_name=name,
                version="1.0",
                handler=str(folder / "own.py"),
                serialized_file=folder / f"{name}.pt",
                config_file=folder / "model-config.yaml",
                export_path=folder,
                force=True,
            )
        )
    command = ["compare", str(folder / "one.mar"), str(folder / "close.mar"), "--data", str(folder / "data")]

    assert main(command) == 2
    assert "say --allow-code if you trust the archive" in capsys.readouterr().err
    assert not sign.exists()

    assert main([*command, "--allow-code"]) == 0
    assert sign.exists()


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ("old/net.mar", "new/net.mar", ("old/net.mar", "new/net.mar")),
        ("net.mar", "net8.mar", ("net.mar", "net8.mar")),
        ("net.mar", "./net.mar", ("net.mar (A)", "net.mar (B)")),
        ("a/x/net.mar", "b/x/net.mar", ("a/x/net.mar", "b/x/net.mar")),
    ],
)
def test_the_names_of_two_archives_differ(one: str, other: str, names: tuple[str, str]) -> None:
    assert names_of(Path(one), Path(other)) == names
