from __future__ import annotations

from pathlib import Path

import pytest

from torchere.serving.commands import cli
from torchere.serving.config.properties import parse_properties
from torchere.serving.config.resolve import configure, report


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_report_tells_lines_in_order_with_value_and_effect() -> None:
    text = report(
        Path("c.properties"),
        configure(
            parse_properties("vmargs=-X\njob_queue_size=5\nnumber_of_gpu=x"), {}, {"model_store": "/m"}
        ),
    )
    assert text.split("\n") == [
        "c.properties",
        "  line 1: vmargs=-X",
        "      warning: has no effect: there is no JVM here, and log4j2 files are not read: log_levels sets "
        "levels, and PUT /log-level changes them; remove it",
        "  line 2: job_queue_size=5",
        "      max_queue_size = 5",
        "  line 3: number_of_gpu=x",
        "      error: found 'x', expected a whole number of at least 0",
        "  command line: model_store=/m",
        "      model_store = /m",
        "1 error, 1 warning",
    ]


def test_no_user_and_no_signature_of_a_url_is_shown() -> None:
    url = "https://user:word@bucket/m.mar?X-Amz-Signature=0f"
    snapshot = 'model_snapshot={"models":{}}'
    text = f"load_models=a=file://b?c.mar, net={url},{url}\nload_models=x?y.mar, {url}\n{snapshot}"
    configuration = configure(parse_properties(text), {"TS_LOAD_MODELS": url})
    shown = report(Path("c.properties"), configuration) + str(configuration.findings)
    assert "word" not in shown and "0f" not in shown
    assert "load_models=x?y.mar, https://bucket/m.mar" in shown
    assert "load_models=a=file://b, net=https://bucket/m.mar,https://bucket/m.mar" in shown
    made = configure(parse_properties(text.partition("\n")[2].partition("\n")[0])).settings
    assert made.load_models == ("x?y.mar", url)


def test_config_check_explains_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.properties").write_text("# mine\nvmargs=-X\njob_queue_size=5\n")
    assert cli.main(["config", "check"]) == 0
    out = capsys.readouterr().out
    assert "  line 2: vmargs=-X\n      warning: has no effect" in out
    assert "  line 3: job_queue_size=5\n      max_queue_size = 5" in out
    assert out.endswith("0 errors, 1 warning\n")


@pytest.mark.parametrize(
    ("text", "flags", "status"),
    [("job_queue_size=x", [], 1), ("vmargs=-X", ["--strict"], 1), ("job_queue_size=1", ["--strict"], 0)],
)
def test_the_status_of_config_check_tells_whether_it_found_something(
    text: str, flags: list[str], status: int
) -> None:
    Path("c.properties").write_text(text)
    assert cli.main(["config", "check", "c.properties", *flags]) == status


@pytest.mark.parametrize(("value", "count"), [("true", 1), ("false", 0)])
def test_config_check_says_that_no_supervisor_starts_a_lost_server_again(
    capsys: pytest.CaptureFixture[str], value: str, count: int
) -> None:
    Path("config.properties").write_text(f"supervise={value}\n")
    assert cli.main(["config", "check"]) == 0
    assert capsys.readouterr().out.count("has no effect: models run in worker processes") == count


@pytest.mark.parametrize("text", ["keystore=k.p12", "inference_address=https://127.0.0.1"])
def test_the_advice_on_a_key_store_ends_with_a_file_for_both_settings(text: str) -> None:
    shown = report(Path("c.properties"), configure(parse_properties(text)))
    assert "`openssl pkcs12 -in FILE -nodes -out tls.pem` (of type JKS, after" in shown
    assert "and set both certificate_file and private_key_file to tls.pem" in shown


def test_config_check_of_no_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", "none"]) == 1
    assert capsys.readouterr().err == "none: can't be read: No such file or directory\n"
