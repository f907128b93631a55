"""The migration check: one verdict for each thing a TorchServe deployment holds, and nothing of it is run."""

import ast
import errno
import importlib.metadata
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchere.archiver.request import ArchiveRequest
from torchere.archiver.writer import write_archive
from torchere.serving.commands import cli
from torchere.serving.commands.archive_check import missing_imports
from torchere.serving.commands.migrate import MigrationReport, check_migration
from torchere.serving.config.properties import ConfigurationError

ARCHIVES = Path(__file__).resolve().parents[2] / "conformance" / "archives"
ENTRY = (
    '{"defaultVersion":true,"marName":"%s","minWorkers":1,"maxWorkers":1,"batchSize":1,"maxBatchDelay":100}'
)


HANDLE = "def handle(data, context): ...\n"


def pack(path: Path, files: dict[str, str] | None = None, runtime: str = "python", **model: str) -> Path:
    manifest = {"runtime": runtime, "model": {"modelName": "m", "modelVersion": "1.0", **model}}
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files or {}).items():
            archive.writestr(name, text)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
    return path


def verdicts(report: MigrationReport) -> dict[str, str]:
    return {finding.item: finding.verdict for finding in report.findings}


def of_config(tmp_path: Path, text: str, **environ: str) -> dict[str, str]:
    (tmp_path / "config.properties").write_text(text)
    return verdicts(check_migration(tmp_path / "config.properties", None, None, environ))


def of_store(store: Path) -> MigrationReport:
    return check_migration(None, store, None, {})


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ("inference_address=http://0.0.0.0:8080", "same"),
        ("number_of_netty_threads=32", "differs"),
        ("no_such_key=***", "differs"),
        ("keystore=a.p12", "unsupported"),
        ("plugins_path=plugins", "unsupported"),
        ("job_queue_size=many", "unsupported"),
        ("install_py_dep_per_model=true", "differs"),
        ("allowed_urls=https://a/.*", "differs"),
    ],
)
def test_each_line_of_a_configuration_has_a_verdict(tmp_path: Path, line: str, verdict: str) -> None:
    assert of_config(tmp_path, line)[line] == verdict


def test_defaults_that_are_others_are_told(tmp_path: Path) -> None:
    assert of_config(tmp_path, "") == {
        "allowed_urls": "differs",
        "metrics_mode": "differs",
        "disable_token_authorization": "same",
        "enable_model_api": "same",
    }
    report = check_migration(tmp_path / "config.properties", None, None, {}).as_text()
    assert "clients send a key of key_file.json in the header Authorization" in report
    told = of_config(tmp_path, "disable_token_authorization=true\nenable_model_api=true")
    assert "disable_token_authorization" not in told
    assert told["enable_model_api=true"] == "same"
    explicit = of_config(tmp_path, "allowed_urls=file://.*\nmetrics_mode=log")
    assert "metrics_mode" not in explicit


def test_the_environment_counts_as_at_a_start(tmp_path: Path) -> None:
    found = of_config(tmp_path, "enable_envvars_config=true", TS_JOB_QUEUE_SIZE="7")
    assert found["job_queue_size=7"] == "same"


def test_an_archive_that_was_changed_after_packing_is_the_same_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "h.py").write_text(HANDLE)
    request = ArchiveRequest(
        model_name="m", version="1.0", handler=str(tmp_path / "h.py"), export_path=tmp_path
    )
    with zipfile.ZipFile(write_archive(request), "a") as archive:
        archive.writestr("models/1.bin", "weights")
    report = of_store(tmp_path)
    assert report.count("unsupported") == report.count("differs") == 0
    assert "; changed after packing: models/1.bin" in report.as_text()


def test_archives_of_torchserve_are_all_the_same() -> None:
    report = of_store(ARCHIVES)
    assert report.count("unsupported") == report.count("differs") == 0
    assert report.count("same") >= 2 * len(list(ARCHIVES.glob("*.mar")))


def test_the_store_of_the_configuration_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text(f"model_store={ARCHIVES}")
    report = check_migration(tmp_path / "config.properties", None, None, {})
    assert str(ARCHIVES / "mlp.mar") in report.as_text()


@pytest.mark.parametrize(
    ("handler", "verdict"),
    [
        ("h.py", "same"),
        ("h:handle", "same"),
        ("/home/me/h.py", "unsupported"),  # a manifest that points outside of its archive
        ("image_classifier", "same"),
        ("sagemaker_pytorch_serving_container.handler_service:handle", "same"),
        ("vllm_handler", "unsupported"),
        ("installed.module:handle", "unsupported"),
    ],
)
def test_a_handler_is_in_the_archive_or_built_in(tmp_path: Path, handler: str, verdict: str) -> None:
    pack(tmp_path / "m.mar", {"h.py": "def handle(data, context): ...\n"}, handler=handler)
    found = {finding.verdict for finding in of_store(tmp_path).findings}
    assert verdict in found
    assert ("unsupported" in found) is (verdict == "unsupported")


TWO = "class A: ...\nclass B:\n    def handle(self, data, context): ...\n"


@pytest.mark.parametrize(
    ("source", "handler", "verdict"),
    [
        ("class A: ...\n", "h.py", "same"),
        (TWO, "h.py", "unsupported"),
        (TWO + "def handle(data, context): ...\n", "h.py", "same"),
        (TWO + "_one = B()\nhandle = _one.handle\n", "h.py", "same"),
        (TWO + "async def run(data, context): ...\n", "h.py:run", "same"),
        ("from os import *\n", "h.py", "same"),
        ("from os import fork as handle\n", "h.py", "same"),
        ("try:\n    class A: ...\nexcept ImportError:\n    pass\n", "h.py", "same"),
        ("x = 1\n", "h.py", "unsupported"),
        ("def handle(data, context): ...\n", "h.py:serve", "unsupported"),
    ],
    ids=range(10),
)
def test_a_handler_file_needs_an_entry_point(tmp_path: Path, source: str, handler: str, verdict: str) -> None:
    pack(tmp_path / "m.mar", {"h.py": source}, handler=handler)
    found = {finding.verdict for finding in of_store(tmp_path).findings}
    assert ("unsupported" in found) is (verdict == "unsupported")


def test_weights_of_a_built_in_handler_have_to_be_in_the_archive(tmp_path: Path) -> None:
    pack(tmp_path / "m.mar", handler="image_classifier", serializedFile="model.pt")
    assert verdicts(of_store(tmp_path))["model.pt"] == "unsupported"


@pytest.mark.parametrize(
    ("default", "verdict"),
    [("image_classifier", "same"), ("package.service:handle", "same"), ("vllm_handler", "unsupported")],
)
def test_an_archive_without_handler_needs_a_default_one(tmp_path: Path, default: str, verdict: str) -> None:
    pack(tmp_path / "m.mar")
    assert verdicts(of_store(tmp_path))["handler"] == "unsupported"
    (tmp_path / "c.properties").write_text(f"default_service_handler={default}")
    report = check_migration(tmp_path / "c.properties", tmp_path, None, {})
    assert verdicts(report)["handler"] == verdict


def test_keys_of_a_model_config_are_told_one_by_one(tmp_path: Path) -> None:
    text = "batchSize: 4\nuseVenv: true\nparallelType: pp\nparallelLevel: 2\nmine: [1]\n"
    pack(tmp_path / "m.mar", {"h.py": "", "c.yaml": text}, handler="h.py", configFile="c.yaml")
    found = verdicts(of_store(tmp_path))
    assert found["c.yaml batchSize"] == found["c.yaml mine"] == found["c.yaml parallelLevel"] == "same"
    assert (found["c.yaml useVenv"], found["c.yaml parallelType"]) == ("differs", "same")


def test_a_key_that_neither_server_uses_is_told_as_such(tmp_path: Path) -> None:
    pack(tmp_path / "m.mar", {"h.py": "", "c.yaml": "minWorkers: many"}, handler="h.py", configFile="c.yaml")
    assert "minWorkers: is 'many', expected an integer; it is ignored" in of_store(tmp_path).as_text()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"modelName": "a name"}, "Model name 'a name' contains special characters."),
        ({"modelVersion": "1/2"}, "Model version '1/2' of m.mar is not usable"),
    ],
)
def test_a_name_that_registering_refuses_is_unsupported(
    tmp_path: Path, named: dict[str, str], said: str
) -> None:
    pack(tmp_path / "m.mar", {"h.py": ""}, handler="h.py", **named)
    report = of_store(tmp_path)
    assert verdicts(report)["name"] == "unsupported"
    assert said in report.as_text()


def test_a_folder_of_snapshots_that_is_not_there_is_no_clean_report(tmp_path: Path) -> None:
    report = check_migration(None, ARCHIVES, tmp_path / "nosuch", {})
    assert verdicts(report)["snapshots"] == "differs"
    assert str(ARCHIVES / "mlp.mar") in report.as_text()


def test_python_that_is_nested_too_deeply_is_told_beside_the_rest(tmp_path: Path) -> None:
    pack(tmp_path / "deep.mar", {"h.py": "-" * 20_000 + "1"}, handler="h.py")
    pack(tmp_path / "m.mar", {"h.py": "import nosuch"}, handler="h.py")
    said = of_store(tmp_path).as_text()
    assert "does not compile" in said
    assert "nosuch" in said


def test_python_that_does_not_parse_is_told_by_line(tmp_path: Path) -> None:
    pack(tmp_path / "m.mar", {"h.py": "x = 1\nprint 'two'\n"}, handler="h.py")
    (line,) = [line for line in of_store(tmp_path).as_text().splitlines() if "does not compile" in line]
    assert line.endswith(" in line 2")


def test_what_cannot_be_used_at_all_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "bad.mar").write_text("no zip")
    (tmp_path / "flow.war").write_text("no zip")
    pack(tmp_path / "cpp.mar", {"h.py": HANDLE}, runtime="LSP", handler="h.py")
    pack(tmp_path / "old.mar", {"h.py": "print 'two'\n"}, handler="h.py")
    pack(tmp_path / "yaml.mar", {"h.py": HANDLE, "c.yaml": "a: ["}, handler="h.py", configFile="c.yaml")
    (tmp_path / ".hidden.mar").write_text("")
    report = of_store(tmp_path)
    found = {(Path(one.subject).name, one.item) for one in report.findings if one.verdict == "unsupported"}
    assert found == {
        ("bad.mar", "archive"),
        ("flow.war", "workflow"),
        ("cpp.mar", "runtime"),
        ("old.mar", "h.py"),
        ("yaml.mar", "c.yaml"),
    }


@pytest.mark.parametrize("named", ["by the configuration", "by the caller"])
def test_workflows_are_read_from_their_own_store(tmp_path: Path, named: str) -> None:
    models, workflows = tmp_path / "models", tmp_path / "workflows"
    models.mkdir()
    workflows.mkdir()
    (workflows / "flow.war").write_text("no zip")
    config = tmp_path / "config.properties"
    config.write_text(f"workflow_store={workflows}" if named == "by the configuration" else "")
    given = workflows if named == "by the caller" else None
    report = check_migration(config, models, None, {}, given)
    found = [(one.subject, one.verdict) for one in report.findings if one.item == "workflow"]
    assert found == [(str(workflows / "flow.war"), "unsupported")]


def test_a_workflow_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="gone: expected the folder of the workflow store"):
        check_migration(None, None, None, {}, tmp_path / "gone")
    config = tmp_path / "config.properties"
    config.write_text(f"workflow_store={tmp_path / 'gone'}")
    unsupported = {one.item for one in check_migration(config, None, None, {}).findings}
    assert f"workflow_store={tmp_path / 'gone'}" in unsupported


STAMP = b"torchere handler, interface 1, torch %b\0" % importlib.metadata.version("torch").encode()


@pytest.mark.parametrize(
    ("library", "verdict", "said"),
    [
        (b"\0allocatorMine\0deleterMine\0", "differs", "compile it again: g++ -shared -fPIC HANDLER.cc"),
        (STAMP + b"\0allocatorMine\0deleterMine\0", "same", "Mine in libmine.so, compiled for torchere"),
        (STAMP, "differs", "exports no allocatorMine()"),
        (None, "unsupported", "libmine.so is not in the archive"),
    ],
)
def test_a_handler_in_cpp_has_to_be_compiled_for_torchere(
    tmp_path: Path, library: bytes | None, verdict: str, said: str
) -> None:
    files = {"libmine.so": library.decode("latin-1")} if library is not None else {}
    pack(tmp_path / "m.mar", files, runtime="LSP", handler="libmine:Mine")
    report = of_store(tmp_path)
    assert verdicts(report)["handler"] == verdict
    assert said in report.as_text()
    assert "runtime" not in verdicts(report)


def test_requirements_are_installed_only_when_asked_for(tmp_path: Path) -> None:
    pack(tmp_path / "m.mar", {"h.py": "", "r.txt": "numpy"}, handler="h.py", requirementsFile="r.txt")
    assert verdicts(of_store(tmp_path))["r.txt"] == "same"
    (tmp_path / "c.properties").write_text("install_py_dep_per_model=true")
    assert verdicts(check_migration(tmp_path / "c.properties", tmp_path, None, {}))["r.txt"] == "differs"


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("import ts\nimport ts.context as c\nimport tsfresh\n", []),
        ("from ts.torch_handler.base_handler import BaseHandler\n", []),
        ("from ts.torch_handler import base_handler\n", []),
        ("from ts.context import *\n", []),
        ("from ts.metrics.dimension import Dimension\nfrom . import ts\n", []),
        (
            "from ts.torch_handler.base_handler import Nobody\n",
            ["base_handler has no Nobody"],
        ),
        (
            "def f():\n    import ts.torch_handler.vllm_handler\n",
            ["line 2: ts.torch_handler.vllm_handler"],
        ),
        ("from ts.torch_handler import vllm_handler\n", ["ts.torch_handler.vllm_handler is not part"]),
        (
            "from ts.model_loader import ModelLoaderFactory\n",
            ["ts.model_loader is an internal of"],
        ),
    ],
)
def test_imports_of_torchserve_are_looked_up(source: str, missing: list[str]) -> None:
    found = missing_imports(ast.parse(source))
    assert len(found) == len(missing)
    assert all(wanted in text for wanted, text in zip(missing, found, strict=True))


def test_packages_that_a_handler_needs_have_to_be_installed(tmp_path: Path) -> None:
    source = (
        "import json, os.path, torch.nn, helper, lib.deep, sagemaker_inference.errors\n"
        "from ts.torch_handler import base_handler\n"
        "try:\n    import no_such_accelerator\nexcept ImportError:\n    pass\n"
        "from no_such_package.sub import thing\nimport no_such_package.other\n"
        "def handle(data, context):\n    import no_such_late\n"
    )
    files = {"h.py": source, "helper.py": "", "lib/deep.py": "", "requirements.txt": "no-such-package"}
    pack(tmp_path / "m.mar", files, handler="h.py", requirementsFile="requirements.txt")
    missing = [finding for finding in of_store(tmp_path).findings if "not installed here" in finding.text]
    assert [(finding.item, finding.verdict) for finding in missing] == [("h.py", "unsupported")], missing
    assert missing[0].text.startswith("line 7: no_such_package is not installed here")
    (tmp_path / "config.properties").write_text("install_py_dep_per_model=true")
    report = check_migration(tmp_path / "config.properties", tmp_path, None, {})
    assert "is not installed here" not in report.as_text()


def test_the_newest_snapshot_is_read_as_a_start_would(tmp_path: Path) -> None:
    store, snapshots = tmp_path / "store", tmp_path / "config"
    store.mkdir()
    snapshots.mkdir()
    pack(store / "here.mar", {"h.py": ""}, handler="h.py")
    models = f'"a":{{"1.0":{ENTRY % "here.mar"}}},"b":{{"1.0":{ENTRY % "gone.mar"}}}'
    text = f'model_store={store}\nfoo=1\nmodel_snapshot={{"models":{{{models}}}}}\n'
    (snapshots / "20250101000000000-shutdown.cfg").write_text(text)
    (snapshots / "20240101000000000-shutdown.cfg").write_text("model_snapshot=bad")
    found = verdicts(check_migration(None, None, snapshots, {}))
    assert (found["a 1.0"], found["b 1.0"], found["foo=1"]) == ("same", "unsupported", "differs")


@pytest.mark.parametrize(
    ("text", "item", "verdict"),
    [
        ('model_snapshot={"models":{"a":{"1.0":%s}}}' % (ENTRY % "a.mar"), "a 1.0", "same"),
        ('model_snapshot={"models":{"b":{"1.0":%s}}}' % (ENTRY % "b.mar"), "b 1.0", "unsupported"),
        ("load_models=a.mar,x=b.mar,https://h/c.mar", "load_models b.mar", "differs"),
        (
            'model_snapshot={"models":{},"torchere":{"missing":[{"marName":"b.mar"},'
            '{"marName":"a.mar","modelName":"x"}]}}',
            "missing b.mar",
            "differs",
        ),
    ],
)
def test_archives_that_the_configuration_loads_are_looked_for(
    tmp_path: Path, text: str, item: str, verdict: str
) -> None:
    pack(tmp_path / "a.mar", {"h.py": "def handle(data, context): ..."}, handler="h.py")
    found = of_config(tmp_path, f"model_store={tmp_path}\n{text}\n")
    assert found[item] == verdict
    assert not found.keys() & {"load_models a.mar", "load_models https://h/c.mar", "missing a.mar"}
    assert "unsupported" not in found.values() or verdict == "unsupported"


@pytest.mark.parametrize(("name", "verdict"), [("net", "same"), ("gone", "unsupported")])
def test_a_folder_outside_of_the_store_is_found_by_its_path(tmp_path: Path, name: str, verdict: str) -> None:
    for folder in ("store", "elsewhere/net"):
        (tmp_path / folder).mkdir(parents=True)
    entry = json.loads(ENTRY % name) | {"torchere": {"path": str(tmp_path / "elsewhere" / name)}}
    snapshot = json.dumps({"models": {"f": {"1.0": entry}}})
    found = of_config(tmp_path, f"model_store={tmp_path / 'store'}\nmodel_snapshot={snapshot}\n")
    assert found["f 1.0"] == verdict


def test_folders_that_are_no_archives_are_passed_over_as_at_a_start(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "unpacked" / "MAR-INF").mkdir(parents=True)
    (tmp_path / "unpacked" / "MAR-INF" / "MANIFEST.json").write_text(
        '{"model": {"modelName": "m", "handler": "base_handler"}}'
    )
    assert {finding.subject for finding in of_store(tmp_path).findings} == {str(tmp_path / "unpacked")}


def test_a_folder_without_snapshots_restores_nothing(tmp_path: Path) -> None:
    assert verdicts(check_migration(None, None, tmp_path, {})) == {"snapshots": "same"}


@pytest.mark.parametrize("text", ["", "job_queue_size=7\n", 'model_snapshot={"models":{}}\nplugins_path=/u'])
def test_a_snapshot_that_is_cut_off_is_refused_as_by_the_start(tmp_path: Path, text: str) -> None:
    snapshot = tmp_path / "20250101000000000-shutdown.cfg"
    snapshot.write_text(text)
    assert verdicts(check_migration(None, None, tmp_path, {}))["snapshot"] == "unsupported"
    assert verdicts(check_migration(snapshot, None, None, {}))["snapshot"] == "unsupported"


def test_the_command_exits_with_1_for_what_is_not_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["migrate", "check", "--model-store", str(ARCHIVES)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("0 differs, 0 unsupported")
    (tmp_path / "bad.mar").write_text("no zip")
    assert cli.main(["migrate", "check", "--json", "--model-store", str(tmp_path)]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["counts"] == {"same": 0, "differs": 0, "unsupported": 1}
    assert printed["findings"][0]["subject"] == str(tmp_path / "bad.mar")


@pytest.mark.parametrize("arguments", [[], ["--model-store", "nowhere"], ["--ts-config", "nowhere"]])
def test_what_cannot_be_read_is_said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["migrate", "check", *arguments]) == 1
    assert capsys.readouterr().err


def unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_folder: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)


@pytest.mark.parametrize("option", ["--model-store", "--snapshots", "--workflow-store"])
def test_a_folder_that_this_user_may_not_list_is_said(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unlisted(monkeypatch)
    assert cli.main(["migrate", "check", option, str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path}: can't be read: Permission denied\n"


def test_a_folder_below_one_that_this_user_may_not_look_into_is_said(
    closed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unlisted(monkeypatch)
    assert cli.main(["migrate", "check", "--snapshots", "/closed/x"]) == 1
    assert cli.main(["migrate", "check", "--model-store", "/closed/x"]) == 1
    assert capsys.readouterr().err == "/closed/x: can't be read: Permission denied\n" * 2
    assert cli.main(["migrate", "check", "--workflow-store", "/closed/x"]) == 1
    assert capsys.readouterr().err == "/closed/x: expected the folder of the workflow store\n"


def test_an_archive_that_this_user_may_not_look_for_counts_as_not_there(closed: None, tmp_path: Path) -> None:
    entry = json.loads(ENTRY % "net") | {"torchere": {"path": "/closed/net"}}
    snapshot = json.dumps({"models": {"f": {"1.0": entry}}})
    assert (
        of_config(tmp_path, f"model_store={tmp_path}\nmodel_snapshot={snapshot}\n")["f 1.0"] == "unsupported"
    )


def test_nothing_at_all_is_no_check() -> None:
    with pytest.raises(ConfigurationError, match="nothing to check"):
        check_migration(None, None, None, {})
