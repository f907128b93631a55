"""What `config check` and `migrate check` say of values that are valid and do not work."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from torchere.serving.commands import cli
from torchere.serving.commands.serve_options import LaunchRefused, plan_from

USELESS = {
    "model_store": ("none", "error", "the start is refused; make the folder"),
    "workflow_store": ("none", "warning", "no workflow can be registered; make it"),
    "audit_log": ("store", "error", "store is a folder, expected a file; the start is refused"),
    "key_file": ("none/keys.json", "error", "there is no none on this machine; without it, the start is ref"),
    "metrics_config": ("broken.yaml", "error", "not YAML"),
    "token_keys_file": ("broken.json", "error", "The file of token_keys_file can't be used."),
    "default_service_handler": ("no_package.handler:handle", "error", "no_package is not installed beside"),
    "system_metrics_cmd": ("no.py --gpu 0", "warning", "the host is not sampled"),
    "preload_modules": ("json, no_package.part", "error", "no_package is not installed beside"),
    "rendezvous_address": ("0.0.0.0", "error", "Set rendezvous_secret_file to a file with the same random"),
    "rendezvous_secret_file": ("short", "error", "rendezvous_secret_file short holds 5 bytes, expected at"),
    "grpc_inference_port": ("8080", "error", "inference_address listens on 127.0.0.1:8080 already"),
    "worker_memory_limit": ("1", "error", "some 230 MiB before it loads a model, so that none starts"),
    "worker_user": ("no-such-user", "error", "'no-such-user' is none"),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.json").chmod(0o600)
    (tmp_path / "short").write_text("short")
    (tmp_path / "broken.pem").write_text("no certificate")
    (tmp_path / "store" / "junk.mar").write_text("junk")
    monkeypatch.chdir(tmp_path)


def checked(text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    Path("c.properties").write_text(text)
    return cli.main(["config", "check", "c.properties"]), capsys.readouterr().out


@pytest.mark.parametrize("key", sorted(USELESS))
def test_a_value_that_can_not_work_is_named_with_what_happens(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, level, text = USELESS[key]
    status, report = checked(f"{key}={value}\n", capsys)
    assert f"{level}: " in report
    assert text in report
    assert status == (1 if level == "error" else 0)


@pytest.mark.parametrize("key", ["model_store", "workflow_store"])
def test_a_store_that_is_missing_is_an_error_if_the_start_is_refused_and_else_a_warning(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"model_store": "store", "workflow_store": "store", key: "none"}
    status, report = checked("".join(f"{each}={value}\n" for each, value in values.items()), capsys)
    arguments = ["serve", "--ncs", "--ts-config", "c.properties"]
    try:
        plan_from(cli._parser(arguments).parse_args(arguments), {})
    except LaunchRefused:
        assert status == 1
    else:
        assert status == 0
        assert "the start is refused" not in report


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("audit_log=none/below/audit.log", None),  # a start makes the folders
        ("audit_log=broken.yaml/audit.log", "broken.yaml is a file, expected a folder; the start"),
        ("audit_log=broken.yaml/b/audit.log", "broken.yaml is a file, expected a folder; the start"),
        ("audit_log=store/audit.log", "this user may not write to"),
        ("audit_log=store/below/audit.log", "there is no store/below on this machine; without it, the start"),
        ("audit_log=store/junk.mar", None),  # it is there, and a start appends to it
        ("key_file=store", "store is a folder, expected a file; the start is refused"),
        ("key_file=store/keys.json", "this user may not write to"),
        ("key_file=none/below/keys.json", "there is no none/below on this machine; without it, the start is"),
        ("key_file=none/keys.json\ndisable_token_authorization=true", None),
    ],
)
def test_a_file_that_a_start_can_not_write_is_named(
    text: str, told: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, access = Path("store").absolute(), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    _, report = checked(f"{text}\n", capsys)
    assert ("the start is refused" in report) == (told is not None), report
    assert told is None or told in report


@pytest.mark.parametrize(("limit", "warned"), [("200MiB", True), ("230MiB", False), ("0", False)])
def test_a_memory_limit_that_may_be_too_small_for_a_worker_is_a_warning(
    limit: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = checked(f"worker_memory_limit={limit}\n", capsys)
    assert status == 0
    assert ("so that none may start; set more bytes" in report) == warned


def test_a_certificate_that_can_not_be_used_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    files = "certificate_file=broken.pem\nprivate_key_file=broken.pem\n"
    status, report = checked(f"inference_address=https://127.0.0.1:1\n{files}", capsys)
    assert status == 1
    assert "The TLS certificate can't be used. broken.pem and broken.pem: " in report
    status, report = checked(f"{files.replace('broken', 'none')}client_ca_file=/none/ca.pem\n", capsys)
    assert status == 1
    assert report.count("there is no none.pem on this machine") == 2
    assert "warning: there is no /none/ca.pem" in report


def test_signatures_without_a_trusted_signer_are_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = checked("require_signed=true\n", capsys)
    assert status == 1
    assert report.count("error: ") == 1
    assert "error: no signer is trusted; set trusted_signing_keys" in report


@pytest.mark.usefixtures("closed")
def test_a_path_that_this_user_may_not_look_into_is_reported_with_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root might make the folder of the audit log
    folders = ["model_store", "workflow_store", "audit_log"]
    tls = ["certificate_file", "private_key_file", "client_ca_file"]
    others = ["token_keys_file", "metrics_config", "default_service_handler", "system_metrics_cmd"]
    keys = [*folders, *tls, *others, "rendezvous_secret_file"]
    _, report = checked("".join(f"{key}=/closed/x/{key}\n" for key in keys), capsys)
    assert report.count("warning: there is no /closed/x") == len(keys), report


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change to another user")
def test_a_user_that_can_not_read_what_workers_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hidden").mkdir(mode=0o700)
    user = f"worker_user=nobody\nworker_read_paths={tmp_path / 'hidden'}\n"
    status, report = checked(user, capsys)
    assert status == 1
    assert "error: worker_user " in report
    assert "; check the modes of it and its parents" in report


def test_of_the_models_to_load_those_are_named_that_are_missing_or_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, report = checked("model_store=store\nload_models=junk.mar\n", capsys)
    assert status == 1
    assert "junk.mar is not served: the file begins with 6a 75 6e 6b" in report
    status, report = checked("model_store=store\nload_models=a=none.mar\n", capsys)
    assert status == 0
    assert "warning: there is no store/none.mar" in report


def test_of_the_workflows_to_load_those_are_named_that_are_missing_and_those_that_are_loaded_as_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "model_store=store\nload_workflows=none.war\n"
    status, report = checked(text, capsys)
    assert status == 0
    assert "warning: there is no store/none.war" in report
    with zipfile.ZipFile("store/flow.war", "w") as war:
        war.writestr("WAR-INF/MANIFEST.json", "{}")
    status, report = checked("model_store=store\nload_workflows=flow.war\n", capsys)
    assert (status, "0 errors, 0 warnings" in report) == (0, True), report
    status, report = checked("model_store=store\nload_models=flow.war\n", capsys)
    assert status == 1
    assert "error: flow.war is a workflow, not a model: name it in load_workflows" in report


def test_a_folder_to_load_may_be_outside_of_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "elsewhere" / "net" / "MAR-INF" / "MANIFEST.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"model": {"modelName": "net", "handler": "base_handler"}}')
    status, report = checked(f"model_store=store\nload_models=net={manifest.parents[1]}\n", capsys)
    assert (status, "0 errors, 0 warnings" in report) == (0, True), report


def test_what_works_or_may_be_in_an_archive_has_no_remark(capsys: pytest.CaptureFixture[str]) -> None:
    for handler in ("image_classifier", "service.py:handle", "json.tool:main", "handler:handle"):
        status, report = checked(f"model_store=store\ndefault_service_handler={handler}\n", capsys)
        assert status == 0
        assert "0 errors, 0 warnings" in report


@pytest.mark.parametrize(("mode", "warnings"), [("prometheus", 1), ("log", 0)])
def test_metrics_that_are_dropped_are_named(
    mode: str, warnings: int, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = "{name: a b, unit: n, dimensions: []}, {name: A, unit: n, dimensions: [x y]}"
    Path("m.yaml").write_text(f"model_metrics: {{gauge: [{entries}, {{name: G, unit: n, dimensions: []}}]}}")
    status, report = checked(f"metrics_config=m.yaml\nmetrics_mode={mode}\n", capsys)
    assert (status, f"0 errors, {warnings} warning" in report) == (0, True), report
    assert ("metrics of m.yaml are dropped: a b: Prom" in report and "; A: " in report) is bool(warnings)


def test_a_migration_is_unsupported_where_a_file_can_not_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.properties").write_text("model_store=/elsewhere\nmetrics_config=broken.yaml\n")
    (Path("store") / "junk.mar").unlink()
    assert cli.main(["migrate", "check", "--ts-config", "c.properties", "--model-store", "store"]) == 1
    report = capsys.readouterr().out
    assert "unsupported metrics_config=broken.yaml: not YAML" in report
    assert "same        model_store=/elsewhere" in report
