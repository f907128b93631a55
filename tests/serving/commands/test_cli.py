from __future__ import annotations

import errno
import gc
import re
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from torchere.archiver import cli as archiver
from torchere.serving import __version__
from torchere.serving.access.keys import KeyFileUnwritable
from torchere.serving.commands import cli, serve_options
from torchere.serving.commands import serve as cli_serve
from torchere.serving.commands import torchserve as launcher
from torchere.serving.commands.serve_options import plan_from
from torchere.serving.config.properties import ConfigurationError
from torchere.serving.config.server_settings import ServerSettings, SnapshotSettings
from torchere.serving.logs import levels
from torchere.serving.logs.files import Log4jFormatter, remove_log_files
from torchere.serving.store import url_rules
from torchere.serving.workers import spawn as spawning

HEAVY = ("torch", "starlette", "grpc", "numpy", "prometheus_client")
SNAPSHOT = (
    'model_store={store}\nmodel_snapshot={{"models":{{"net":{{"1.0":{{"defaultVersion":true,"marName":"net.mar",'
    '"minWorkers":1,"maxWorkers":1,"batchSize":1,"maxBatchDelay":100}}}}}}}}\n'
)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory and an environment that hold nothing but what a test puts there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("TS_CONFIG_FILE", "TEMP", "LOG_LOCATION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


class FakeServer:
    """Stands where `torchere.serving.server` does; remembers what it was to serve."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.served: list[ServerSettings] = []
        self.failure = failure
        self.observe: Callable[[], object] = bool  # called in place of a server

    def serve(self, settings: ServerSettings, prepared: object = None) -> int:
        self.served.append(settings)
        self.observe()
        if self.failure:
            raise self.failure
        return 0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    module = types.ModuleType("torchere.serving.server")
    module.serve = fake.serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchere.serving.server", module)
    monkeypatch.setattr(
        cli_serve, "configure_logging", lambda *_, **__: None
    )  # leave the test run's logging alone
    return fake


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that `torchserve` would have started, in whichever way."""
    commands: list[list[str]] = []

    def note(command: Sequence[str], _file: Path) -> None:
        commands.append(list(command))

    monkeypatch.setattr(launcher, "start_in_background", note)
    monkeypatch.setattr(launcher, "become", note)
    return commands


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("main", ["--help"]),
        ("main", ["serve", "--help"]),
        ("main", ["archive", "--help"]),
        ("main", ["inspect", "--help"]),
        ("main", ["config", "check", "--help"]),
        ("main", ["compare", "--help"]),
        ("main", ["predict", "--help"]),
        ("main", ["version"]),
        ("torchserve_main", ["--help"]),
        ("torchserve_main", ["--version"]),
    ],
)
def test_saying_how_a_command_is_used_imports_nothing_heavy(command: str, arguments: list[str]) -> None:
    code = (
        "import sys, atexit; from torchere.serving.commands import cli;"
        f"atexit.register(lambda: print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules]));"
        f"sys.exit(cli.{command}({arguments!r}))"
    )
    done = run(["-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("HEAVY []")


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["config", "check", "--help"]])
def test_help_shows_an_example(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert re.search(r"examples?:.*torchere ", capsys.readouterr().out, re.DOTALL)


def test_files_that_are_not_read_have_to_exist_says_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("ignored (for TorchServe compatibility), but has to exist:") == 2


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("serve", "required here or in the configuration file, unless MODEL is given"),
        ("kserve", "directory of the archives; default: that of the archives in --model-dir"),
        ("bench", "without any of these the body is empty"),
        ("archive", "LSP: a handler in C++"),
        ("archive", "(default: trace, then --script if that fails)"),
    ],
)
def test_help_says_what_happens_without_an_option(
    command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert told in " ".join(capsys.readouterr().out.split())


def test_every_command_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    assert {"serve", "archive", "bench", "migrate"} <= set(names)
    for name in names:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        usage, _, text = capsys.readouterr().out.partition("\n\n")
        assert usage.startswith(f"usage: torchere {name} ")
        assert text[0].isupper()


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--model-store", "serve"], ["serve", "--nonsense"]])
def test_arguments_of_no_command_have_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["archive", "--model-name", "m", "--formt", "export"],
            "usage: torchere archive .*did you mean --format?",
        ),
        (["serve", "--modelstore=x"], "usage: torchere serve .*did you mean --model-store?"),
        (["config", "check", "--strickt"], "usage: torchere config check .*did you mean --strict?"),
        (["serv"], "usage: torchere .*did you mean serve?"),
        (
            ["serve", "x.pt", "--port", "9"],
            "--port 9; .* write inference_address=http",
        ),
        (["serve", "x.pt", "--workers=2"], "write default_workers_per_model=2"),
        (["archive", "--model-name", "m", "--format", "exprt"], "did you mean export?"),
        (["stop"], "Ctrl.C or SIGTERM; torchserve --stop ends what torchserve --start began"),
        (["--stop"], "Ctrl.C or SIGTERM"),
        ([], "no command was given; expected one of serve, join, new, archive,"),
    ],
)
def test_a_misspelt_name_has_a_suggestion(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert re.search(said.replace("?", r"\?"), capsys.readouterr().err, re.DOTALL)


def test_a_long_usage_does_not_hide_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["archive", "--model-name", "m", "--nonsense"])
    usage, said = capsys.readouterr().err.splitlines()
    assert usage == "usage: torchere archive ... (torchere archive --help lists what it takes)"
    assert said == "torchere archive: error: unrecognized arguments: --nonsense"


@pytest.mark.parametrize("flag", ["--handler", "--model-file"])
def test_python_that_does_not_compile_is_not_packed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.py").write_text("class H:\n    def initialize(self, context)\n        pass\n")
    Path("good.py").write_text("raise SystemExit('run')\n")
    code = {"--handler": "good.py", flag: "bad.py"}
    words = [word for pair in code.items() for word in pair]
    assert cli.main(["archive", "--model-name", "m", *words]) == 1
    version = ".".join(map(str, sys.version_info[:2]))
    said = f"{flag} bad.py, line 2: not valid Python {version}: expected ':'; correct the file"
    assert said in capsys.readouterr().err
    assert not Path("m.mar").exists()
    assert archiver.main(["--model-name", "m", "-v", "1", *words]) == 0  # as TorchServe's
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("minWorkers: [\n", "bad.yaml: The model config is not valid YAML: expected the node content"),
        ("- minWorkers\n", "bad.yaml: The model config is a list, expected a mapping"),
    ],
)
def test_a_config_that_a_server_would_refuse_is_not_packed(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("h.py").write_text("")
    Path("bad.yaml").write_text(text)
    command = ["archive", "--model-name", "m", "--handler", "h.py", "--config-file"]
    assert cli.main([*command, "bad.yaml"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("m.mar").exists()
    assert cli.main([*command, "gone.yaml"]) == 1
    assert "--config-file gone.yaml: no such file" in capsys.readouterr().err


def test_an_archive_that_was_packed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("h.py").write_text("")
    assert cli.main(["archive", "--model-name", "m", "--handler", "h.py"]) == 0
    assert re.search(r"^packed: m\.mar \(\d+ kB\)$", capsys.readouterr().err, re.MULTILINE)


def test_the_module_runs_as_the_command() -> None:
    done = run(["-m", "torchere.serving", "version"])
    assert done.returncode == 0
    assert done.stdout.startswith(f"torchere {__version__}\nanswers as TorchServe 0.12.0\nPyTorch ")


def test_torchserve_tells_the_version_it_answers_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.torchserve_main(["-v"]) == 0
    assert capsys.readouterr().out == "TorchServe Version is 0.12.0\n"


@pytest.mark.parametrize("arguments", [["--start", "--stop"], ["--nonsense"], ["--stop", "-v"], ["--models"]])
def test_wrong_usage_has_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.torchserve_main(arguments)
    assert ended.value.code == 2
    assert "usage: torchserve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing mandatory parameter --model-store"),
        (["--start", "--model-store", "none"], "--model-store directory not found: none"),
        (
            ["--model-store", "store", "--workflow-store", "none"],
            "--workflow-store directory not found: none",
        ),
        (["--model-store", "store", "--ts-config", "none"], "--ts-config file not found: none"),
        (["--model-store", "store", "--log-config", "none"], "--log-config file not found: {here}/none"),
        (["--model-store", "store", "--log", "none"], "--log-config file not found: {here}/none"),
        (
            ["--model-store", "store", "--cpp-log-config", "none"],
            "--cpp-log-config file not found: {here}/none",
        ),
    ],
)
@pytest.mark.usefixtures("store")
def test_torchserve_refuses_in_torchserves_words(
    arguments: list[str], text: str, spawned: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.torchserve_main(arguments) == 1
    assert capsys.readouterr().out == text.format(here=Path.cwd()) + "\n"
    assert spawned == []


def test_a_bad_temp_directory_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TEMP", "/none")
    assert cli.torchserve_main(["--model-store", str(store)]) == 1
    expected = "Invalid temp directory: /none, please check TEMP environment variable.\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("option", "variable", "text"),
    [
        ("--model-store", "", "--model-store directory not found: /closed/x"),
        ("--workflow-store", "", "--workflow-store directory not found: /closed/x"),
        ("--ts-config", "", "--ts-config file not found: /closed/x"),
        ("--cpp-log-config", "", "--cpp-log-config file not found: /closed/x"),
        ("", "TS_CONFIG_FILE", "--ts-config file not found: /closed/x"),
        ("", "TEMP", "Invalid temp directory: /closed/x, please check TEMP environment variable."),
        ("--workflow-store", "LOG_LOCATION", "--workflow-store directory not found: /closed/x"),
    ],
)
@pytest.mark.usefixtures("spawned", "store", "closed")
def test_a_path_that_this_user_may_not_look_into_is_refused_as_one_that_is_not_there(
    option: str, variable: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if variable:
        monkeypatch.setenv(variable, "/closed/x")
    arguments = ["--model-store", "store", *([option, "/closed/x"] if option else [])]
    assert cli.torchserve_main(arguments) == 1
    assert capsys.readouterr().out == f"{text}\n"


def test_a_current_directory_that_was_deleted_is_refused(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        assert cli.torchserve_main(["--start", "--model-store", str(store)]) == 1
    finally:
        monkeypatch.chdir(tmp_path)
    assert "current directory is not there" in capsys.readouterr().out


def test_a_bad_value_stops_the_launcher_before_anything_starts(
    store: Path, spawned: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("c.properties").write_text("job_queue_size=many")
    assert cli.torchserve_main(["--model-store", str(store), "--ts-config", "c.properties"]) == 1
    assert "c.properties: line 1: job_queue_size: found 'many'" in capsys.readouterr().err
    assert spawned == []


@pytest.mark.parametrize(
    ("command", "properties", "mode"),
    [
        (["serve", "--old-defaults"], "", "log"),
        (["serve", "--old-defaults"], "metrics_mode=prometheus\n", "prometheus"),
        (["serve"], "", "prometheus"),
    ],
)
def test_the_old_name_has_torchserves_metrics_mode(
    command: list[str], properties: str, mode: str, store: Path
) -> None:
    Path("c.properties").write_text(properties)
    arguments = [*command, "--model-store", str(store), "--ts-config", "c.properties"]
    options = cli._parser(arguments).parse_args(arguments)
    assert plan_from(options, {}).settings.metrics_mode == mode


OFF = "disable_token_authorization=true\nmanagement_address=http://0.0.0.0:8081\n"


def settings_of_the_old_name(store: Path, properties: str, environ: dict[str, str]) -> ServerSettings:
    Path("c.properties").write_text(properties)
    arguments = ["serve", "--old-defaults", "--model-store", str(store), "--ts-config", "c.properties"]
    return plan_from(cli._parser(arguments).parse_args(arguments), environ).settings


def test_under_the_old_name_open_management_is_for_this_machine(store: Path) -> None:
    assert settings_of_the_old_name(store, OFF, {}).insecure_management == "local"
    assert settings_of_the_old_name(store, f"{OFF}insecure_management=true", {}).insecure_management is True
    # SageMaker's platform manages an endpoint of several models from outside.
    several = {"SAGEMAKER_MULTI_MODEL": "true"}
    assert settings_of_the_old_name(store, OFF, several).insecure_management is True
    with pytest.raises(ConfigurationError, match="or set insecure_management=true"):
        settings_of_the_old_name(store, f"{OFF}insecure_management=false", {})


def test_under_the_old_name_clients_may_name_urls_unless_the_network_may_register(store: Path) -> None:
    urls = ["https://models.example/m.mar", "http://127.0.0.1:8222/m.mar", "file:///srv/m.mar"]
    patterns = settings_of_the_old_name(store, OFF, {}).allowed_urls
    assert [url_rules.allow(url, patterns).may_be_private for url in urls] == [False, True, False]
    assert not url_rules.allow("http://10.0.0.7/m.mar", patterns).may_be_private
    assert settings_of_the_old_name(store, f"{OFF}insecure_management=true", {}).allowed_urls == ()
    assert settings_of_the_old_name(store, "allowed_urls=https://a/.*", {}).allowed_urls == ("https://a/.*",)


def test_the_variable_of_the_log_format_counts_for_the_old_name(
    store: Path, spawned: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHERE_LOG_FORMAT", "json")
    assert cli.torchserve_main(["--start", "--model-store", str(store)]) == 0
    assert not any("--log-format" in word for word in spawned[0])


@pytest.mark.parametrize("foreground", [[], ["--foreground"]])
def test_torchserve_starts_our_serve_with_the_same_options(
    foreground: list[str], store: Path, spawned: list[list[str]]
) -> None:
    flags = [
        "--start",
        "--ncs",
        "--model-s",
        str(store),
        "--dt",
        "--enable-m",
        "--models",
        "a=a.mar",
        "b.mar",
    ]
    assert cli.torchserve_main(flags + foreground) == 0
    (command,) = spawned
    assert command[command.index("serve") + 3 :] == [
        "--old-defaults",
        "--log-format=torchserve",
        f"--model-store={store}",
        "--no-config-snapshots",
        "--disable-token-auth",
        "--enable-model-api",
        "--log-files",
        "--models",
        "a=a.mar",
        "b.mar",
    ]


def test_what_torchserve_passes_on_reaches_the_server(
    store: Path, spawned: list[list[str]], server: FakeServer
) -> None:
    Path("c.properties").write_text("job_queue_size=7\nvmargs=-Xmx1g")
    flags = ["--ts-config", "c.properties", "--model-store", str(store), "--dt", "--models", "a=a.mar"]
    cli.torchserve_main([*flags, "--enable-model-api"])
    (command,) = spawned
    assert cli.main(command[command.index("serve") :]) == 0
    (settings,) = server.served
    assert (settings.model_store, settings.load_models) == (store, ("a=a.mar",))
    assert (settings.max_queue_size, settings.token_auth_enabled, settings.model_api_enabled) == (
        7,
        False,
        True,
    )


def test_torchserve_stop_without_a_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.torchserve_main(["--stop"]) == 0
    assert capsys.readouterr().out == "TorchServe is not currently running.\n"


def test_an_orphan_pid_file_does_not_hold_up_a_start(
    store: Path, spawned: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(".model_server.pid").write_text("99999999\n")
    assert cli.torchserve_main(["--model-store", str(store)]) == 0
    assert capsys.readouterr().out == "Removing orphan pid file.\n"
    assert len(spawned) == 1


def test_serve_starts_with_config_properties_of_the_current_directory(
    store: Path, server: FakeServer
) -> None:
    Path("config.properties").write_text(f"model_store={store}\njob_queue_size=9")
    assert cli.main(["serve"]) == 0
    assert server.served[0].max_queue_size == 9


def test_the_environment_names_the_file_before_the_option_does(
    store: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("env.properties").write_text("job_queue_size=1")
    Path("flag.properties").write_text("job_queue_size=2")
    monkeypatch.setenv("TS_CONFIG_FILE", "env.properties")
    cli.main(["serve", "--model-store", str(store), "--ts-config", "flag.properties"])
    assert server.served[0].max_queue_size == 1


def test_temp_becomes_the_temporary_directory(
    store: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMP", str(store))
    cli.main(["serve", "--model-store", str(store)])
    assert server.served[0].temp_dir == store


def test_the_start_block_shows_no_user_and_no_signature_of_a_url(store: Path) -> None:
    models = ["a.mar", "net=https://user:word@bucket/m.mar?X-Amz-Signature=0f"]
    arguments = ["serve", "--model-store", str(store), "--models", *models]
    plan = plan_from(cli._parser(arguments).parse_args(arguments), {})
    assert plan.settings.load_models == tuple(models)
    assert "Initial Models: a.mar,net=https://bucket/m.mar" in cli_serve.start_block(plan)


def test_the_newest_snapshot_is_restored_unless_told_not_to(
    store: Path, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path("logs/config")
    folder.mkdir(parents=True)
    (folder / "20250101000000000-startup.cfg").write_text("job_queue_size=bad")
    (folder / "20250102000000000-shutdown.cfg").write_text(SNAPSHOT.format(store=store))
    (folder / "99990101000000000-notes.txt").write_text("=")
    Path("named.properties").write_text(SNAPSHOT.format(store=store))
    assert cli.main(["serve"]) == 0
    assert "start without it by --ncs" in caplog.text
    assert cli.main(["serve", "--ncs", "--model-store", str(store)]) == 0
    assert cli.main(["serve", "--ncs", "--ts-config", "named.properties"]) == 0
    assert "restoring its snapshot of 1 models; to start without it, remove model_snap" in caplog.text
    restored, fresh, named = server.served
    assert [(model.name, model.archive) for model in restored.snapshot_models] == [("net", "net.mar")]
    assert fresh.snapshot_models == ()
    assert named.snapshot_models == restored.snapshot_models


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it names no models"),
        ("model_store=store\n", "it names no models"),
        (SNAPSHOT + "inference_address=http\\://a\\:80", "its last line, inference_address, has no end"),
    ],
)
def test_a_snapshot_that_a_full_disk_has_cut_off_is_not_taken_for_a_whole_one(
    text: str, reason: str, store: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = Path("logs/config/20250102000000000-shutdown.cfg")
    cut.parent.mkdir(parents=True)
    cut.write_text(text.format(store=store))
    assert cli.main(["serve", "--model-store", str(store)]) == 1
    assert f"{cut.absolute()} is no whole snapshot: {reason}. Delete it" in capsys.readouterr().out
    assert server.served == []


def test_a_snapshot_whose_models_come_last_needs_no_end_of_that_line(store: Path, server: FakeServer) -> None:
    snapshot = Path("logs/config/20250102000000000-shutdown.cfg")
    snapshot.parent.mkdir(parents=True)
    snapshot.write_text(SNAPSHOT.format(store=store).rstrip())
    assert cli.main(["serve"]) == 0
    assert [model.name for model in server.served[0].snapshot_models] == ["net"]


def test_serve_logs_each_warning_once(
    store: Path, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    Path("c.properties").write_text("vmargs=-X\njob_queue_sise=1")
    Path("log4j2.xml").write_text("<Configuration/>")
    flags = ["--ts-config", "c.properties", "--model-store", str(store), "--log-config", "log4j2.xml"]
    assert cli.main(["serve", *flags]) == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "c.properties, line 1: vmargs: has no effect: there is no JVM here, and log4j2 files are not "
        "read: log_levels sets levels, and PUT /log-level changes them; remove it",
        "c.properties, line 2: job_queue_sise: unknown key, not used; did you mean job_queue_size?",
        "--log-config has no effect: log4j2 files are not read; log_levels sets levels, PUT /log-level "
        "changes them, and TORCHERE_LOG_FORMAT=json|text|torchserve sets the format",
    ]


@pytest.mark.parametrize(("flags", "root"), [((), "ERROR"), (("--log-level", "debug"), "DEBUG")])
def test_levels_of_the_log_are_settings_but_a_flag_wins_for_all_that_are_not_named(
    store: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], root: str
) -> None:
    configured: list[str] = []
    monkeypatch.setattr(cli_serve, "configure_logging", lambda level, *_, **__: configured.append(level))
    monkeypatch.setenv("TS_LOG_LEVELS", "root=error, torchere.test.cli=WARNING")
    Path("c.properties").write_text("enable_envvars_config=true\n")
    arguments = ["serve", "--ts-config", "c.properties", "--model-store", str(store), *flags]
    assert cli.main(arguments) == 0
    assert configured == [root]
    assert levels.levels()["torchere.test.cli"] == "WARNING"
    levels.change_level("torchere.test.cli", "NOTSET")


@pytest.mark.parametrize("value", ["ACCESS_LOG=LOUD", "INFO"])
def test_a_level_of_the_log_that_is_none_refuses_the_start(
    server: FakeServer, store: Path, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    Path("c.properties").write_text(f"log_levels={value}\n")
    assert cli.main(["serve", "--ts-config", "c.properties", "--model-store", str(store)]) == 1
    cause = f"log_levels: found {value!r}, expected comma-separated LOGGER=LEVEL"
    assert cause in capsys.readouterr().err
    assert server.served == []


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limits")
def test_workers_and_server_may_open_all_the_files_that_are_allowed(
    store: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    inherited = []

    def spawn(environment: object, modules: object) -> object:
        inherited.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        raise OSError

    monkeypatch.setattr(spawning, "spawn", spawn)
    server.observe = lambda: inherited.append(resource.getrlimit(resource.RLIMIT_NOFILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        assert cli.main(["serve", "--model-store", str(store), "--models", "all"]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert inherited == [(limits[1], limits[1])] * 2


def test_a_failure_to_start_is_told_with_its_detail(
    store: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failure = KeyFileUnwritable("The keys can't be stored.", "read-only")
    assert cli.main(["serve", "--model-store", str(store)]) == 1
    assert capsys.readouterr().err == "The keys can't be stored. read-only\n"


def test_archive_and_inspect_are_the_archivers(capsys: pytest.CaptureFixture[str]) -> None:
    Path("handler.py").write_text("def handle(data, context):\n    return data\n")
    packed = ["archive", "--model-name", "net", "-v", "1.0", "--handler", "handler.py"]
    assert cli.main(packed) == 0
    assert cli.main(["inspect", "net.mar"]) == 0
    assert "net" in capsys.readouterr().out


def test_snapshots_that_this_user_may_not_list_refuse_the_start(
    store: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_folder: Path) -> list[Path]:
        raise PermissionError(errno.EACCES, "Permission denied")

    folder = Path("logs/config").absolute()
    folder.mkdir(parents=True)
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert cli.main(["serve", "--model-store", str(store)]) == 1
    text = f"{folder} can't be read: Permission denied. Make the folder readable, or start with --ncs.\n"
    assert capsys.readouterr().out == text
    assert cli.main(["serve", "--ncs", "--model-store", str(store)]) == 0


def test_the_newest_snapshot_of_no_directory_is_none(tmp_path: Path) -> None:
    assert serve_options.newest_snapshot(tmp_path / "none") is None


def test_snapshots_go_to_the_log_location_unless_switched_off(
    store: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG_LOCATION", str(store / "elsewhere"))
    assert cli.main(["serve", "--model-store", str(store)]) == 0
    assert cli.main(["serve", "--model-store", str(store), "--no-config-snapshots"]) == 0
    with_snapshots, without = server.served
    assert with_snapshots.snapshots == SnapshotSettings(
        store / "elsewhere" / "config", (("model_store", str(store)),)
    )
    assert without.snapshots is None


@pytest.mark.parametrize(("flags", "files"), [([], []), (["--log-files"], ["access_log.log"])])
def test_log_files_are_written_when_asked_for(
    store: Path, server: FakeServer, flags: list[str], files: list[str]
) -> None:
    try:
        assert cli.main(["serve", "--ncs", "--model-store", str(store), *flags]) == 0
    finally:
        remove_log_files()
    assert [path.name for path in Path("logs").glob("access*")] == files


@pytest.mark.parametrize(
    ("flags", "variable", "is_torchserves"),
    [
        ((), "torchserve", True),
        (("--log-format", "torchserve"), "json", True),
        (("--log-format", "json"), "torchserve", False),
        ((), "", False),
    ],
)
@pytest.mark.usefixtures("server")
def test_torchserves_console_lines_are_had_by_flag_or_environment(
    store: Path, monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], variable: str, is_torchserves: bool
) -> None:
    configured: list[object] = []
    monkeypatch.setattr(cli_serve, "configure_logging", lambda *_, lines: configured.append(lines))
    monkeypatch.setenv("TORCHERE_LOG_FORMAT", variable)
    assert cli.main(["serve", "--model-store", str(store), *flags]) == 0
    assert [isinstance(lines, Log4jFormatter) for lines in configured] == [is_torchserves]


def test_a_log_format_that_is_none_is_refused(
    server: FakeServer, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHERE_LOG_FORMAT", "log4j")
    assert cli.main(["serve", "--model-store", str(store)]) == 1
    assert (
        "TORCHERE_LOG_FORMAT is 'log4j', expected one of auto, console, json, text, torchserve"
        in capsys.readouterr().out
    )


def test_garbage_is_collected_again_after_a_server(store: Path, server: FakeServer) -> None:
    off: list[bool] = []
    server.observe = lambda: off.append(not gc.isenabled())
    assert cli.main(["serve", "--ncs", "--model-store", str(store)]) == 0
    assert off == [True]
    assert gc.isenabled()
