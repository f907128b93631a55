"""`torch-workflow-archiver`: what it packs, and what it refuses in one line."""

import json
import os
import signal
import zipfile
from pathlib import Path

import pytest

from torchere.archiver import workflow
from torchere.serving.commands.workflow_archiver import main

SPEC = "models:\n  m:\n    url: m.mar\ndag:\n  before: [m]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    Path("w.yaml").write_text(SPEC)
    Path("h.py").write_text("def before(data, context): return data\n")
    Path("more.txt").write_text("more")
    return tmp_path


def run(*more: str) -> int:
    return main(["--workflow-name", "w", "--spec-file", "w.yaml", *more])


def test_a_workflow_is_packed_in_torchserves_layout(folder):
    assert run("--handler", "h.py", "--extra-files", "more.txt") == 0
    with zipfile.ZipFile("w.war") as archive:
        assert sorted(archive.namelist()) == ["WAR-INF/MANIFEST.json", "h.py", "more.txt", "w.yaml"]
        manifest = json.loads(archive.read("WAR-INF/MANIFEST.json"))
    assert manifest == {
        "createdOn": "01/01/1980 00:00:00",
        "workflow": {"workflowName": "w", "specFile": "w.yaml", "handler": "h.py"},
        "archiverVersion": "0.2.15",
    }


def test_an_unknown_setting_of_a_model_is_packed_with_a_warning(folder, caplog):
    Path("w.yaml").write_text(SPEC.replace("m.mar\n", "m.mar\n    max-worker: 2\n"))
    assert run("--handler", "h.py") == 0
    (told,) = caplog.messages
    assert told == (
        "w.yaml: unknown settings are ignored: 'max-worker' of the model 'm' (did you mean max-workers?)"
    )


def test_the_same_files_give_the_same_bytes(folder):
    run("--handler", "h.py")
    first = Path("w.war").read_bytes()
    Path("h.py").touch()
    run("--handler", "h.py", "--force")
    assert Path("w.war").read_bytes() == first


@pytest.mark.parametrize(
    ("change", "more", "told"),
    [
        ("dag:\n  a: [b]\n  b: [a]\n", ["--handler", "h.py"], "the graph has a cycle: a -> b -> a"),
        (
            "dag:\n  after: []\n",
            ["--handler", "h.py"],
            "'after' is neither in 'models' nor a function of h.py",
        ),
        (SPEC, [], "the workflow has no handler"),
        ("dag: [", ["--handler", "h.py"], "Failed to parse yaml."),
        (SPEC, ["--handler", "none.py"], "No such file or directory: 'none.py'"),
        (SPEC, ["--handler", "h.py", "--extra-files", "none"], "File does not exist: none"),
        (SPEC, ["--handler", "h.py", "--export-path", "none"], "export-path none is not a directory"),
        (SPEC, ["--handler", "h.py", "--workflow-name", "a/b"], "Workflow name contains special characters."),
        (SPEC, ["--handler", "h.py", "--workflow-name", "a."], "a..war: no server loads an archive"),
    ],
)
def test_what_can_not_be_packed_is_one_error_and_leaves_no_file(folder, capsys, change, more, told):
    Path("w.yaml").write_text(change)
    assert run(*more) == 1
    assert told in capsys.readouterr().err
    assert list(folder.glob("**/*.war")) == []


def test_an_existing_file_is_kept_without_force(folder, capsys):
    Path("w.war").write_text("mine")
    assert run("--handler", "h.py") == 1
    assert "w.war already exists.\nPlease specify --force/-f option" in capsys.readouterr().err
    assert Path("w.war").read_text() == "mine"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_ended_by_a_signal_it_leaves_no_file_behind(folder, monkeypatch, sent):
    def ended(_request: object) -> str:
        assert any(name.endswith(".part") for name in os.listdir())
        signal.raise_signal(sent)
        return "{}"

    monkeypatch.setattr(workflow, "_manifest", ended)
    before = set(os.listdir())
    usual = signal.default_int_handler if sent == signal.SIGINT else lambda *_: None
    ours = signal.signal(sent, usual)
    try:
        status: object = run("--handler", "h.py")
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        status = None
    finally:
        signal.signal(sent, ours)
    assert status == 128 + sent
    assert set(os.listdir()) == before
