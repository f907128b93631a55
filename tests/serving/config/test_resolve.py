from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.config.keys import KEYS
from torchere.serving.config.properties import ConfigurationError, parse_properties
from torchere.serving.config.resolve import Configuration, configure, report
from torchere.serving.config.server_settings import Address, ServerSettings

SNAPSHOT = (
    'model_snapshot={"models":{"noop":{"1.11":{"defaultVersion":true,"marName":"noop.mar","minWorkers":1,'
    '"maxWorkers":2,"batchSize":1,"maxBatchDelay":100}}}}'
)


def configured(text: str, environ: dict[str, str] | None = None, **overrides: str) -> Configuration:
    return configure(parse_properties(text), environ, overrides)


def settings(text: str, environ: dict[str, str] | None = None, **overrides: str) -> ServerSettings:
    return configured(text, environ, **overrides).checked()


def warnings(text: str, environ: dict[str, str] | None = None, **overrides: str) -> list[str]:
    return [str(finding) for finding in configured(text, environ, **overrides).of_level("warning")]


def error(text: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        settings(text, environ)
    return str(caught.value)


def test_nothing_configured_gives_the_defaults_and_no_findings() -> None:
    assert configure() == Configuration(ServerSettings(), ())


def test_a_file_sets_what_it_names() -> None:
    made = settings(
        """
        model_store=/models
        load_models=a.mar, net=b.mar
        job_queue_size=1000
        default_workers_per_model = 4
        default_response_timeout=5
        max_request_size=10000000000
        decode_input_request=FALSE
        disable_token_authorization=true
        enable_model_api=true
        default_service_handler=pkg.handler_service:handle
        service_envelope=kserve
        blacklist_env_vars=AWS_.*
        cors_allowed_origin=https://x.example
        number_of_gpu=1
        metric_time_interval=10
        """
    )
    assert made.model_store == Path("/models")
    assert made.load_models == ("a.mar", "net=b.mar")
    assert (made.max_queue_size, made.default_executors, made.default_response_timeout_s) == (1000, 4, 5.0)
    assert made.limits.max_request_bytes == 10_000_000_000
    assert (made.decode_input, made.token_auth_enabled, made.model_api_enabled) == (False, False, True)
    assert (made.default_handler, made.service_envelope) == ("pkg.handler_service:handle", "kserve")
    assert (made.hidden_env_vars, made.cors_allowed_origin) == ("AWS_.*", "https://x.example")
    assert (made.max_gpus, made.system_metrics_interval_s) == (1, 10.0)


def test_a_switched_off_metrics_api_has_no_listener() -> None:
    assert settings("enable_metrics_api=false\nmetrics_address=http://h:1").metrics_address is None
    assert settings("enable_metrics_api=true").metrics_address == Address(port=8082)


def test_all_errors_are_told_at_once_with_the_origin() -> None:
    with pytest.raises(ConfigurationError) as caught:
        configured("job_queue_size=x\nok\nnumber_of_gpu=y").checked("a.properties")
    assert [line.split(": ")[:2] for line in str(caught.value).split("\n")] == [
        ["a.properties", "line 1"],
        ["a.properties", "line 3"],
    ]


def test_a_value_can_not_forge_a_line_of_a_message() -> None:
    assert error("job_queue_size=1\\n2026 ERROR forged").count("\n") == 0
    assert "\n" not in error("inference_address=x\\n2026 ERROR forged")


def test_an_unknown_key_names_its_nearest_neighbour_and_shows_its_value() -> None:
    found = configured("job_queue_sise=5\nsomething_else_entirely=6\nmy_passphrase=7").findings
    assert "did you mean job_queue_size?" in found[0].message
    assert found[1].message == "unknown key, not used"
    assert [finding.value for finding in found] == ["5", "6", "***"]


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("batch_size", "batchSize"),
        ("batch_delay", "maxBatchDelay"),
        ("min_workers", "minWorkers"),
        ("maxWorkers", "maxWorkers"),
    ],
)
def test_a_setting_of_models_that_is_no_key_names_its_place(key: str, setting: str) -> None:
    hint = f"models have {setting}: in their model-config.yaml, or in the key models"
    assert warnings(f"{key}=1") == [f"line 1: {key}: unknown key, not used; {hint}"]


def test_a_time_out_of_models_names_the_key_for_all_models() -> None:
    assert "did you mean default_response_timeout?" in warnings("response_timeout=1")[0]


def test_the_format_of_metrics_of_old_files_is_known() -> None:
    assert warnings("metrics_format=prometheus") == []
    assert "the format is always Prometheus'" in warnings("metrics_format=json")[0]


def test_grpc_in_plain_text_beside_tls_is_told() -> None:
    (warning,) = warnings(f"inference_address=https://127.0.0.1\n{TLS_FILES}")
    assert "gRPC on 127.0.0.1:7070 and 127.0.0.1:7071 is plain text; set enable_grpc_ssl=true" in warning
    assert warnings(f"inference_address=https://127.0.0.1\nenable_grpc_ssl=true\n{TLS_FILES}") == []


def test_a_certificate_that_no_listener_shows_is_told() -> None:
    assert warnings(TLS_FILES) == [
        "configuration: certificate_file: not used: no address begins with https://, and enable_grpc_ssl is "
        "false; write inference_address=https://HOST:PORT"
    ]
    assert warnings(f"metrics_address=https://127.0.0.1\n{TLS_FILES}") == []
    assert warnings(f"enable_grpc_ssl=true\n{TLS_FILES}") == []


def test_a_key_without_effect_says_what_to_do_instead() -> None:
    assert "has no effect: there is no JVM here" in warnings("vmargs=-Xmx4g")[0]
    assert "certificate_file and private_key_file" in warnings("keystore=k.p12")[0]
    assert "keytool -importkeystore" in warnings("keystore=k.jks")[0]


@pytest.mark.parametrize(
    "line", ["version=0.12.0", "tsConfigFile=x", "NUM_WORKERS=1", "debug=False", "ipex_enable=false"]
)
def test_what_asks_for_nothing_is_taken_without_a_word(line: str) -> None:
    assert warnings(line) == []


def test_a_secret_is_never_shown() -> None:
    text = "keystore_pass=hunter2\nkeystore_password=hunter2"
    shown = report(Path("x"), configured(text))
    assert "hunter2" not in shown
    assert "keystore_pass=***" in shown


def test_environment_beats_command_line_beats_file() -> None:
    text = "enable_envvars_config=true\nmodel_store=/file"
    assert settings(text).model_store == Path("/file")
    assert settings(text, model_store="/flag").model_store == Path("/flag")
    assert settings(text, {"TS_MODEL_STORE": "/env"}, model_store="/flag").model_store == Path("/env")


def test_the_environment_overrides_the_token_switch_in_both_directions() -> None:
    gate = "enable_envvars_config=true"
    on, off = ({"TS_DISABLE_TOKEN_AUTHORIZATION": value} for value in ("false", "true"))
    assert settings(gate, on, disable_token_authorization="true").token_auth_enabled is True
    assert settings(gate, off).token_auth_enabled is False


def test_without_its_gate_the_environment_is_not_used_and_said_so() -> None:
    environ = {"TS_JOB_QUEUE_SIZE": "7"}
    assert settings("", environ).max_queue_size == 100
    assert "the file must say enable_envvars_config=true" in warnings("", environ)[0]


def test_a_variable_that_looks_misspelt_is_a_warning_and_one_of_kubernetes_is_none() -> None:
    gate, misspelt = (
        "enable_envvars_config=true",
        {"TS_DRAIN_TIMEOUTS": "9", "TS_ENABLE_ENVVARS_CONFIG": "true"},
    )
    first, second = warnings(gate, misspelt)
    assert first == (
        "environment variable TS_DRAIN_TIMEOUTS: drain_timeouts: not used; did you mean TS_DRAIN_TIMEOUT_S?"
    )
    assert second.endswith(": enable_envvars_config: not used; counts in the file only")
    (third,) = warnings(gate, {"TS_TOKEN_EXPIRATION_MIN": "5"})
    assert third.endswith(": not used; did you mean TS_TOKEN_EXPIRATION_TIME_MIN?")
    service = ("TS_SERVICE_HOST", "TS_SERVICE_PORT_METRICS", "TS_PORT_8080_TCP_ADDR", "TS_METRICS_PORT")
    assert warnings(gate, dict.fromkeys((*service, "TS_CONFIG_FILE"), "1")) == []
    assert warnings(f"{gate}\nmodel_store=$$TS_MODELSTORE$$", {"TS_MODELSTORE": "/models"}) == []


def test_of_a_gate_that_is_there_twice_the_last_one_counts() -> None:
    environ = {"TS_ENABLE_MODEL_API": "true"}
    shut = "enable_envvars_config=true\nenable_envvars_config=false"
    assert settings(shut, environ).model_api_enabled is False


def test_allowed_urls_from_the_environment_need_a_second_gate() -> None:
    environ = {"TS_ALLOWED_URLS": "https://a/.*,s3://.*"}
    one = "enable_envvars_config=true"
    assert settings(one, environ).allowed_urls == ()
    assert settings(f"{one}\nuse_env_allowed_urls=true", environ).allowed_urls == ("https://a/.*", "s3://.*")


def test_a_gate_can_not_be_opened_from_the_environment() -> None:
    environ = {"TS_ENABLE_ENVVARS_CONFIG": "true", "TS_JOB_QUEUE_SIZE": "7"}
    assert settings("", environ).max_queue_size == 100


@pytest.mark.parametrize(("value", "expected"), [("oip", True), ("kserve", False)])
def test_the_protocol_switch_of_the_environment_needs_no_gate(value: str, expected: bool) -> None:
    made = settings("", {"TS_OPEN_INFERENCE_PROTOCOL": value})
    assert made.open_inference_protocol is expected


def test_irregular_variable_names_are_known() -> None:
    made = settings("enable_envvars_config=true", {"TS_TOKEN_EXPIRATION_TIME_MIN": "5"})
    assert made.token_expiration_min == 5.0


def test_file_only_keys_have_no_variable() -> None:
    environ = {"TS_MODELS": "{", "TS_MODEL_SNAPSHOT": "{", "TS_METRIC_TIME_INTERVAL": "5"}
    assert configured("enable_envvars_config=true", environ).of_level("error") == ()


def test_of_duplicate_lines_the_last_counts_and_the_first_is_a_warning() -> None:
    text = "job_queue_size=1\njob_queue_size=2"
    assert settings(text).max_queue_size == 2
    assert warnings(text) == ["line 1: job_queue_size: not used: line 2 counts"]


def test_models_of_the_command_line_are_loaded_beside_a_snapshot_that_forgets_mistyped_ones() -> None:
    missing = '"torchere": {"missing": [{"marName": "typo.mar"}]}'
    text = SNAPSHOT.replace('{"models"', "{" + missing + ', "models"')
    assert missing in text
    entries = parse_properties(text)
    configuration = configure(entries, {}, {"load_models": "b.mar"})
    assert configuration.settings.load_models == ("b.mar",)
    assert "typo.mar" not in [model.archive for model in configuration.settings.snapshot_models]
    assert configuration.settings.snapshot_models
    (warning,) = configuration.of_level("warning")
    assert warning.message.startswith("loaded after the models of model_snapshot")
    assert "typo.mar" in [model.archive for model in configure(entries).settings.snapshot_models]


def test_load_models_gives_way_to_a_snapshot_with_a_warning() -> None:
    text = f"load_models=a.mar\n{SNAPSHOT}"
    assert settings(text).load_models == ()
    assert "model_snapshot is there" in warnings(text)[0]


def test_load_workflows_is_read_as_load_models_is_and_gives_way_to_a_snapshot() -> None:
    assert settings("load_workflows=flow.war, x=y.war").load_workflows == ("flow.war", "x=y.war")
    text = f"load_workflows=ALL\n{SNAPSHOT}"
    assert settings(text).load_workflows == ()
    (warning,) = warnings(text)
    assert "load_workflows: not used: model_snapshot is there, and lists the workflows to load" in warning


@given(st.sampled_from(sorted(KEYS)), st.text(max_size=40))
def test_any_value_of_any_key_ends_in_a_finding_never_in_a_crash(name: str, value: str) -> None:
    made = configure((), {}, {name: value})
    assert [finding for finding in made.findings if finding.key == name or finding.level == "error"]


def test_what_counts_is_kept_for_snapshots_without_what_must_be_said_anew() -> None:
    text = "model_store=store\njob_queue_size=$$SIZE$$\nkeystore_pass=secret\nload_models=all"
    text += "\nload_workflows=all\nunknown=1"
    environ = {"SIZE": "7"}
    command_line = {"disable_token_authorization": "true", "default_workers_per_model": "2"}
    effective = dict(configure(parse_properties(text), environ, command_line).effective)
    assert effective == {
        "model_store": str(Path("store").absolute()),
        "job_queue_size": "7",
        "default_workers_per_model": "2",
    }


def test_a_door_that_the_file_opens_is_kept_open() -> None:
    effective = dict(configure(parse_properties("enable_model_api=true")).effective)
    assert effective == {"enable_model_api": "true"}


def test_fixed_keys_come_from_the_file_or_its_variable() -> None:
    environ = {"TS_TOKEN_KEYS_FILE": "/run/keys.json"}
    assert settings("token_keys_file=/etc/keys.json").token_keys_file == Path("/etc/keys.json")
    assert settings("enable_envvars_config=true", environ).token_keys_file == Path("/run/keys.json")


@pytest.mark.parametrize(
    "text",
    [
        "token_keys_file=key_file.json",
        "token_keys_file=/etc/k.json\nkey_file=/etc/k.json",
        "token_keys_file=key_file.json\nkey_file=/etc/k.json",
    ],
)
def test_fixed_keys_are_not_kept_where_servers_write_theirs(text: str) -> None:
    assert "token_keys_file: servers write this file" in error(text)


def test_fixed_keys_leave_other_settings_of_tokens_without_effect() -> None:
    text = "token_keys_file=/etc/k.json\nkey_file=/run/k.json\ndisable_token_authorization=true"
    assert warnings(text) == [
        "configuration: key_file: not used: token_keys_file is there, and the server makes no keys",
        "configuration: token_keys_file: not used: disable_token_authorization switches keys off",
    ]


TLS_FILES = "certificate_file=/etc/tls.crt\nprivate_key_file=/etc/tls.key\n"


def test_client_certificates_count_with_tokens_or_without() -> None:
    text = f"{TLS_FILES}client_ca_file=/etc/ca.pem\ntoken_keys_file=/etc/k.json\nmetrics_authorization=true\n"
    assert settings(text).authorizes_clients
    assert settings(f"{text}disable_token_authorization=true").authorizes_clients
    with_tls = "inference_address=https://127.0.0.1:1\nmanagement_address=https://127.0.0.1:2\nenable_grpc_ssl=true\n"
    assert warnings(f"{text}{with_tls}disable_token_authorization=true") == []
    said = warnings(f"{text}disable_token_authorization=true")
    assert [line.split(": ")[1] for line in said] == [
        "inference_address",
        "management_address",
        "enable_grpc_ssl",
        "certificate_file",
    ]
    assert not settings("disable_token_authorization=true").authorizes_clients


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{TLS_FILES}client_ca_file=/etc/ca.pem", "client_ca_file: token_keys_file is missing"),
        ("client_ca_file=/etc/ca.pem\ntoken_keys_file=/etc/k.json", "client_ca_file: TLS needs both"),
        ("metrics_authorization=true", "metrics_authorization: the keys that a server makes have no role"),
    ],
)
def test_certificates_and_the_role_of_metrics_need_a_file_that_gives_roles(text: str, message: str) -> None:
    assert message in error(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "grpc_inference_port=8080",
            "grpc_inference_port: inference_address listens on 127.0.0.1:8080 already",
        ),
        ("grpc_inference_port=7071", "grpc_management_port: grpc_inference_port listens on 127.0.0.1:7071"),
        ("inference_address=http://0.0.0.0:8081", "management_address: inference_address listens on 0.0.0.0"),
        ("metrics_address=http://[::]:7070", "grpc_inference_port: metrics_address listens on [::]:7070"),
        ("inference_address=http://localhost:8081", "management_address: inference_address listens on local"),
        ("inference_address=unix:/run/s\nmetrics_address=unix:/run/s\ngrpc_inference_port=8082", ""),
        ("inference_address=http://0.0.0.0:8081\nmanagement_address=http://[::1]:8081", ""),
        ("inference_address=http://127.0.0.1:8081", ""),
        ("inference_address=http://127.0.0.1:0\ngrpc_inference_port=0", ""),
    ],
)
def test_of_two_listeners_at_one_place_both_are_named(text: str, message: str) -> None:
    if message:
        assert message in error(text)
    else:
        settings(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("management_address=http://0.0.0.0:8081", "0.0.0.0:8081"),
        ("management_address=https://[::]:8081\n" + TLS_FILES, "[::]:8081"),
        ("management_address=http://server.example:8081", "server.example:8081"),
        ("grpc_management_address=10.0.0.7", "10.0.0.7:7071"),
    ],
)
def test_management_beyond_loopback_needs_authorization(text: str, address: str) -> None:
    off = f"{text}\ndisable_token_authorization=true\n"
    said = error(off)
    assert f"{text.partition('=')[0]}: tokens are off, so every client that reaches {address} may" in said
    assert "insecure_management=true" in said
    assert settings(text).token_auth_enabled
    warning = warnings(f"{off}insecure_management=true")[0]
    assert f"insecure_management: every client that reaches {address} may" in warning
    with_certificates = f"{off}client_ca_file=/ca\ntoken_keys_file=/k.json\n{TLS_FILES}"
    assert settings(with_certificates).client_ca_file == Path("/ca")


def test_management_may_be_for_this_machine_alone_on_every_address() -> None:
    off = "management_address=http://0.0.0.0:8081\ndisable_token_authorization=true\n"
    (said,) = warnings(f"{off}insecure_management=local")
    assert "only clients on this machine may change models over 0.0.0.0:8081" in said
    given = settings(f"{off}insecure_management=Local")
    assert not given.allows_management(given.management_address)


def test_defaults_count_below_every_source_and_are_not_kept() -> None:
    defaults = {"metrics_mode": "log", "job_queue_size": "7"}
    entries = parse_properties("job_queue_size=\n")
    found = configure(entries, {}, {"metrics_mode": "prometheus"}, defaults)
    assert (found.settings.metrics_mode, found.settings.max_queue_size) == ("prometheus", 7)
    assert dict(found.effective) == {"metrics_mode": "prometheus"}


@pytest.mark.parametrize("address", ["http://127.0.0.2:1", "http://[::1]:1", "http://localhost:1", "unix:/m"])
def test_management_on_this_machine_alone_needs_no_authorization(address: str) -> None:
    text = f"management_address={address}\ninference_address=http://0.0.0.0:80\n"
    assert not settings(f"{text}disable_token_authorization=true").authorizes_clients


def test_without_authorization_the_role_of_metrics_is_not_asked_for() -> None:
    (said,) = warnings("metrics_authorization=true\ndisable_token_authorization=true")
    assert "metrics_authorization: not used" in said


def test_negative_numbers_of_workers_in_a_snapshot_are_read_as_torchserve_writes_them() -> None:
    entry = {"defaultVersion": True, "marName": "m.mar", "batchSize": 1, "maxBatchDelay": 100}
    models = {"m": {"1.0": {**entry, "minWorkers": -1, "maxWorkers": -1}}}
    line = f"model_snapshot={json.dumps({'models': models})}"
    assert warnings(line) == []
    assert settings(line).snapshot_models[0].settings["minWorkers"] == -1


@pytest.mark.parametrize("key", ["models", "model_snapshot"])
def test_the_ranks_of_a_worker_in_an_entry_of_torchserve_are_known(key: str) -> None:
    entry = {"defaultVersion": True, "marName": "m.mar"}
    entry |= dict.fromkeys(("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay"), 1)
    models = {"big": {"1.0": {**entry, "parallelLevel": 4}, "2.0": {**entry, "parallelLevel": 0}}}
    assert not warnings(f"{key}={json.dumps(models if key == 'models' else {'models': models})}")


def test_required_signatures_need_a_trusted_signer() -> None:
    assert "require_signed: no signer is trusted; set trusted_signing_keys" in error("require_signed=true")
    text = "require_signed=true\ntrusted_signing_keys=/etc/a.pub, /etc/ca.crt"
    found = settings(text)
    assert found.require_signed
    assert found.trusted_signing_keys == (Path("/etc/a.pub"), Path("/etc/ca.crt"))


def test_trusted_signers_without_required_signatures_are_warned_of() -> None:
    assert warnings("trusted_signing_keys=/etc/a.pub") == [
        "configuration: trusted_signing_keys: not used: signatures are verified with require_signed=true only"
    ]


@pytest.mark.parametrize("level", ["basic", "off"])
def test_settings_of_the_strict_sandbox_are_warned_of_at_other_levels(level: str) -> None:
    text = "worker_network=false\nworker_read_paths=/data\n"
    assert warnings(f"{text}worker_sandbox={level}") == [
        f"configuration: {key}: not used: only worker_sandbox=strict restricts the network and the files of "
        f"workers, and it is {level}"
        for key in ("worker_network", "worker_read_paths")
    ]
    assert len(warnings(text)) == 2
    assert warnings(f"{text}worker_sandbox=strict") == []


def test_a_snapshot_keeps_that_signatures_are_required_and_by_whom() -> None:
    text = "require_signed=true\ntrusted_signing_keys=a.pub, /etc/ca.crt"
    assert dict(configure(parse_properties(text)).effective) == {
        "require_signed": "true",
        "trusted_signing_keys": f"{Path('a.pub').absolute()},/etc/ca.crt",
    }
