from __future__ import annotations

from pathlib import Path

import pytest

from torchere.serving.config.properties import ConfigurationError, parse_properties
from torchere.serving.config.resolve import configure
from torchere.serving.config.server_settings import (
    ISOLATIONS,
    Address,
    SandboxSettings,
    ServerSettings,
    SnapshotModel,
)


def settings(text: str) -> ServerSettings:
    return configure(parse_properties(text)).checked()


def warnings(text: str) -> list[str]:
    return [str(finding) for finding in configure(parse_properties(text)).of_level("warning")]


def error(text: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        settings(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://0.0.0.0:8085", Address("0.0.0.0", 8085)),
        ("HTTP://localhost", Address("localhost", 80)),
        ("https://localhost:8443", Address("localhost", 8443, tls=True)),
        ("https://localhost", Address("localhost", 443, tls=True)),
        ("http://[::1]:8080", Address("::1", 8080)),
        ("http://[fe80::1%eth0.1]:8080", Address("fe80::1%eth0.1", 8080)),
        ("http://h:0", Address("h", 0)),
        ("UNIX:/tmp/ts.sock", Address(unix_path="/tmp/ts.sock")),
    ],
)
def test_an_address_reads_as_the_contract_says(text: str, expected: Address) -> None:
    tls = "certificate_file=c\nprivate_key_file=k\n" if expected.tls else ""
    made = settings(f"{tls}inference_address={text}").inference_address
    port = 0 if expected.unix_path else expected.port
    assert (made.host, made.port, made.unix_path, made.tls) == (
        expected.host,
        port,
        expected.unix_path,
        expected.tls,
    )


@pytest.mark.parametrize(
    ("key", "setting", "http_port", "https_port"),
    [
        ("inference_address", "inference_address", 80, 443),
        ("management_address", "management_address", 8081, 8444),
        ("metrics_address", "metrics_address", 8082, 8445),
    ],
)
def test_an_address_without_port_takes_the_default_of_its_listener(
    key: str, setting: str, http_port: int, https_port: int
) -> None:
    tls = "certificate_file=c\nprivate_key_file=k\n"
    assert getattr(settings(f"{key}=http://h"), setting).port == http_port
    assert getattr(settings(f"{tls}{key}=https://h"), setting).port == https_port


@pytest.mark.parametrize(
    "text",
    [
        "localhost:8080",
        "ftp://h",
        "http://",
        "unix:relative",
        "http://h:1/path",
        "http://h:",
        "http://[fe80::1%]:8080",
        "http://[fe80::1%a/b]:8080",
    ],
)
def test_any_other_address_stops_the_start(text: str) -> None:
    assert f"Invalid binding address: {text}" in error(f"inference_address={text}")


def test_a_port_that_no_system_has_stops_the_start() -> None:
    assert "Invalid port number: http://h:65536" in error("inference_address=http://h:65536")


def test_grpc_hosts_and_ports_come_together_in_one_address() -> None:
    made = settings("grpc_inference_address=0.0.0.0\ngrpc_inference_port=9000\ngrpc_management_port=9001")
    assert made.grpc_inference_address == Address("0.0.0.0", 9000)
    assert made.grpc_management_address == Address("127.0.0.1", 9001)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "job_queue_size=many",
            "line 1: job_queue_size: found 'many', expected a whole number of at least 1",
        ),
        ("job_queue_size=0", "line 1: job_queue_size: found '0', expected a whole number of at least 1"),
        ("job_queue_size=1_000", "found '1_000', expected a whole number"),
        ("service_envelope=none", "expected one of body, json, kserve, kservev2"),
        ("grpc_inference_port=70000", "found '70000', expected a whole number from 0 to 65535"),
        ("default_response_timeout=1_000", "found '1_000', expected seconds, at least 1"),
        ("default_response_timeout=nan", "found 'nan', expected seconds, at least 1"),
        ("drain_delay_s=-1", "found '-1', expected seconds, at least 0"),
        ("grpc_inference_address=http://h", "expected a host name or IP address, without scheme and port"),
        ("grpc_inference_address=0.0.0.0:7070", "expected a host name or IP address, without scheme and"),
        ("allowed_urls=https://a.*,[", "'[' is not a regular expression"),
        ("allowed_hosts=http://a", "found 'http://a', expected comma-separated host names without scheme"),
        ("preload_modules=a-b", "found 'a-b', expected comma-separated names of Python modules"),
        ("preload_modules=a..b", "found 'a..b', expected comma-separated names of Python modules"),
        ("allowed_hosts=a:80", "found 'a:80', expected comma-separated host names without scheme and port"),
        ("blacklist_env_vars=(", "'(' is not a regular expression"),
        ("models={", "line 1: models: not JSON"),
        ('models={"a":{"1.0":{"minWorkers":1 "b":2}}}', "delimiter at character 28, in "),
        ('models={"a":{"1.0":{}},"a":{"2.0":{}}}', "models: 'a' is there twice, expected"),
        ("models=[]", "the value is [], expected a JSON object"),
        ('models={"a":{"1.0":3}}', "version 1.0 of model a is 3, expected a JSON object"),
        ('models={"a":{"1.0":{"batchSize":"x"}}}', 'batchSize of a 1.0 is "x", expected a whole number of'),
        ('models={"a":{"1.0":{"minWorkers":-1}}}', "minWorkers of a 1.0 is -1, expected a whole number of"),
        ('models={"a":{"1.0":{"batchSize":99999999999}}}', "batchSize of a 1.0 is too large, expected at"),
        ("default_workers_per_model=1025", "found '1025', expected a whole number from 0 to 1024"),
        ("default_response_timeout=1e300", "expected seconds, at least 1 and at most 2147483647"),
        (
            'model_snapshot={"models":{"a":{"1.0":{"marName":"a.mar"}}}}',
            "version 1.0 of model a lacks defaultVersion",
        ),
        (
            'model_snapshot={"models":{"a":{"1.0":{"defaultVersion":true,"marName":"a.mar","minWorkers":1,'
            '"maxWorkers":1,"batchSize":1,"maxBatchDelay":99999999999}}}}',
            "maxBatchDelay of a 1.0 is too large, expected at most 2147483647",
        ),
        (
            'model_snapshot={"models":{"a":{"1.0":{"defaultVersion":true,"marName":"a.mar","minWorkers":"one",'
            '"maxWorkers":1,"batchSize":1,"maxBatchDelay":1}}}}',
            'minWorkers of a 1.0 is "one", expected a whole number',
        ),
        ("model_store=$$NOPE$$", "Invalid Environment Variable NOPE"),
    ],
)
def test_a_bad_value_stops_the_start_and_says_why(line: str, message: str) -> None:
    assert message in error(line)


def test_what_was_expected_is_said_once() -> None:
    said = error('models={"a":{"1.0":{"minWorkers":-1}}}')
    assert said.endswith("minWorkers of a 1.0 is -1, expected a whole number of 0 or more")


@pytest.mark.parametrize("workers", ['"minWorkers":3,"maxWorkers":0', '"minWorkers":3', '"maxWorkers":3'])
def test_one_number_of_workers_of_a_model_may_be_left_out(workers: str) -> None:
    line = 'models={"a":{"1.0":{' + workers + "}}}"
    assert settings(line).model_defaults["a"]["1.0"]


def test_deeply_nested_json_is_an_error_not_a_crash() -> None:
    assert "models: not JSON" in error("models=" + "[" * 100_000)


@pytest.mark.parametrize(
    "line",
    ["job_queue_size=", "disable_token_authorization=", "load_models= ", "metrics_mode="],
)
def test_an_empty_value_counts_as_not_set(line: str) -> None:
    assert settings(line) == settings("")
    assert warnings(line) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [("kserve", "kserve"), ("kfserving", "kserve"), ("kfservingv2", "kservev2"), ("body", "body")],
)
def test_envelopes_may_have_the_names_of_earlier_releases(name: str, meant: str) -> None:
    assert settings(f"service_envelope={name}").service_envelope == meant


def test_torchserves_default_for_the_age_of_connections_is_no_limit() -> None:
    for key in ("grpc_inference_max_connection_age_ms", "grpc_management_max_connection_age_grace_ms"):
        assert getattr(settings(f"{key}=9223372036854775807\n"), key) is None
        assert getattr(settings(f"{key}=60000\n"), key) == 60_000
        assert key in error(f"{key}=9223372036854775808\n")


@pytest.mark.parametrize("value", ["yes", "1", "on"])
def test_any_word_but_true_is_false_and_said_so(value: str) -> None:
    assert settings(f"disable_token_authorization={value}").token_auth_enabled is True
    assert "counts as false" in warnings(f"disable_token_authorization={value}")[0]


@pytest.mark.parametrize("line", ["enable_model_api=true ", "disable_token_authorization=True\t"])
def test_a_switch_that_torchserve_takes_for_false_for_the_blank_behind_it_is_told(line: str) -> None:
    made = settings(line)
    assert made.model_api_enabled or not made.token_auth_enabled
    assert "TorchServe takes it for false" in warnings(line)[0]
    assert warnings(line.strip().replace("=", " = ")) == []  # there the blanks are the file's


def test_a_bad_metrics_mode_or_expiration_is_a_warning_and_the_default_stays() -> None:
    text = "metrics_mode=loud\ntoken_expiration_min=soon"
    assert (settings(text).metrics_mode, settings(text).token_expiration_min) == ("prometheus", 60.0)
    assert len(warnings(text)) == 2
    assert settings("metrics_mode= LEG acy ").metrics_mode == "legacy"
    assert settings("token_expiration_min=0.5").token_expiration_min == 0.5


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_each_isolation_may_be_the_default(isolation: str) -> None:
    assert settings(f"default_isolation={isolation.upper()}").default_isolation == isolation


def test_the_sandbox_of_workers_has_five_keys() -> None:
    text = """
        worker_sandbox=STRICT
        worker_user=models
        worker_memory_limit=8589934592
        worker_network=true
        worker_read_paths=/mnt/weights, /mnt/data
    """
    paths = (Path("/mnt/weights"), Path("/mnt/data"))
    assert settings(text).sandbox == SandboxSettings("strict", "models", 2**33, True, paths)
    assert settings("").sandbox == SandboxSettings("basic")


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "1e300"])
def test_an_expiration_that_makes_no_date_is_not_taken(value: str) -> None:
    assert settings(f"token_expiration_min={value}").token_expiration_min == 60.0


@pytest.mark.parametrize("value", ["all", "ALL", " All "])
def test_all_loads_the_whole_store(value: str) -> None:
    assert settings(f"load_models={value}").load_models == ("all",)


@pytest.mark.parametrize("value", ["standalone", "N/A", ""])
def test_what_torchserves_documentation_writes_for_no_models_loads_none(value: str) -> None:
    assert settings(f"load_models={value}").load_models == ()


def test_a_name_without_an_archive_is_passed_over_and_told() -> None:
    line = "load_models=a= , b=b.mar,http://h/?x="
    assert settings(line).load_models == ("b=b.mar", "http://h/?x=")
    assert warnings(line) == ["line 1: load_models: a= names no archive, and is passed over"]


def test_the_models_property_becomes_the_defaults_of_versions() -> None:
    text = 'models={\\\n "net": {\\\n "1.0": {"batchSize": 4, "marName": "net.mar"}}}'
    assert settings(text).model_defaults == {"net": {"1.0": {"batchSize": 4, "marName": "net.mar"}}}


def test_fewer_workers_at_most_than_at_least_are_warned_of() -> None:
    line = 'models={"a":{"1.0":{"minWorkers":"3","maxWorkers":2}}}'
    assert warnings(line) == [
        "line 1: models: maxWorkers of a 1.0 is less than its minWorkers, which counts for both"
    ]


def test_unknown_members_of_models_are_named_in_one_warning_with_their_nearest_neighbours() -> None:
    entry = '{"marName":"a.mar","runtimeType":"python","batchsize":4,"shape":1,"max_batch_delay":5}'
    assert warnings(f'models={{"a":{{"1.0":{entry},"2.0":{entry}}}}}') == [
        "line 1: models: unknown keys, not used: batchsize of a 1.0 (did you mean batchSize?), "
        "max_batch_delay of a 1.0 (did you mean maxBatchDelay?), shape of a 1.0"
    ]


def test_of_many_unknown_members_a_few_are_named() -> None:
    members = ",".join(f'"q{number}":1' for number in range(9))
    (said,) = warnings(f'models={{"a":{{"1.0":{{{members}}}}}}}')
    assert said.endswith(": q0 of a 1.0, q1 of a 1.0, q2 of a 1.0, q3 of a 1.0, q4 of a 1.0 and 4 more")


SNAPSHOT = (
    'model_snapshot={"name":"20250101000000000-startup.cfg","modelCount":1,"models":{"noop":{"1.11":'
    '{"defaultVersion":true,"marName":"noop.mar","minWorkers":1,"maxWorkers":2,"batchSize":1,'
    '"maxBatchDelay":100,"responseTimeout":120}}}}'
)


def test_a_snapshot_says_what_to_load_and_with_what_settings() -> None:
    rest: dict[str, object] = {
        "minWorkers": 1,
        "maxWorkers": 2,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 120,
    }
    made = settings(SNAPSHOT)
    assert made.snapshot_models == (SnapshotModel("noop", "1.11", "noop.mar", True, rest),)
    assert warnings(SNAPSHOT) == []


def test_the_default_version_of_a_snapshot_may_be_told_in_quotes() -> None:
    (model,) = settings(SNAPSHOT.replace('Version":true', 'Version":"True"')).snapshot_models
    assert model.default_version is True


def test_whole_numbers_may_be_written_as_fractions() -> None:
    made = settings('models={"a":{"1.0":{"batchSize":4.0}}}')
    assert made.model_defaults == {"a": {"1.0": {"batchSize": 4}}}


def test_numbers_of_a_snapshot_may_be_in_quotes_and_below_zero() -> None:
    text = SNAPSHOT.replace('"minWorkers":1', '"minWorkers":"3"').replace('Delay":100', 'Delay":-10000')
    (model,) = settings(text).snapshot_models
    assert (model.settings["minWorkers"], model.settings["maxBatchDelay"]) == (3, -10000)


@pytest.mark.parametrize(
    "text",
    ["inference_address=https://h", "enable_grpc_ssl=true", "certificate_file=c", "private_key_file=k"],
)
def test_tls_needs_both_of_its_files(text: str) -> None:
    assert "TLS needs both certificate_file and private_key_file" in error(text)
    assert "-deststoretype PKCS12" in error(text)  # a refused start warns of no other key


def test_hosts_are_read_in_lower_case() -> None:
    made = settings("allowed_hosts=Models.Example, b_c ,*")
    assert made.allowed_hosts == ("models.example", "b_c", "*")


def test_modules_are_read_as_their_names() -> None:
    made = settings("preload_modules=transformers.pipelines, numpy")
    assert made.preload_modules == ("transformers.pipelines", "numpy")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("6553500", 6_553_500), ("6MB", 6_000_000), ("6 MiB", 6 << 20), ("1.5g", 3 << 29), ("10kb", 10_000)],
)
def test_a_size_may_have_a_unit(text: str, expected: int) -> None:
    assert settings(f"max_request_size={text}").limits.max_request_bytes == expected


@pytest.mark.parametrize("text", ["6 apples", "MB", "-6MB", "0.1b", "1_000", "6MBit"])
def test_any_other_size_is_refused_with_an_example(text: str) -> None:
    assert "or with a unit (6MB, 6MiB)" in error(f"max_request_size={text}")


def test_idle_connections_are_kept_for_a_second_to_a_day() -> None:
    kept = [settings(f"keep_alive_s={value}").keep_alive_s for value in ("1", "620", "86400")]
    assert kept == [1, 620, 86_400]
    for value in ("0", "0.9", "86401", "inf"):
        assert "expected a number from 1 to 86400" in error(f"keep_alive_s={value}")


def test_levels_are_those_of_loggers_each_of_which_is_named_once() -> None:
    made = settings("log_levels=ACCESS_LOG=warning, root=ERROR,torchere.serving=DEBUG")
    assert made.log_levels == {"ACCESS_LOG": "WARNING", "root": "ERROR", "torchere.serving": "DEBUG"}
    for value in ("a=INFO,a=DEBUG", "a=NOTSET", "=INFO", "a b=INFO", f"{'a' * 201}=INFO"):
        assert "expected comma-separated LOGGER=LEVEL; levels are DEBUG, INFO" in error(f"log_levels={value}")
