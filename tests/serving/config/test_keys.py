from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from torchere.serving.config.keys import KEYS, METRICS_API
from torchere.serving.config.server_settings import ServerSettings

# Sections 5.2 and 5.3 of the contract, every key.
CONTRACT_KEYS = """
debug inference_address management_address metrics_address grpc_inference_address grpc_management_address
grpc_inference_port grpc_management_port grpc_inference_max_connection_age_ms
grpc_management_max_connection_age_ms grpc_inference_max_connection_age_grace_ms
grpc_management_max_connection_age_grace_ms enable_grpc_ssl load_models model_store workflow_store
default_workers_per_model default_response_timeout default_startup_timeout unregister_model_timeout
number_of_netty_threads netty_client_threads job_queue_size number_of_gpu max_request_size max_response_size
limit_max_image_pixels prefer_direct_buffer async_logging decode_input_request default_service_handler
service_envelope model_server_home blacklist_env_vars cors_allowed_origin cors_allowed_methods
cors_allowed_headers keystore keystore_pass keystore_type certificate_file private_key_file allowed_urls
install_py_dep_per_model enable_metrics_api metrics_config metrics_mode model_metrics_auto_detect
disable_system_metrics ipex_enable ipex_gpu_enable cpu_launcher_enable cpu_launcher_args initial_worker_port
initial_distribution_port cpp_log_config ts_open_inference_protocol token_expiration_min
disable_token_authorization enable_model_api ts_header_key_sequence_id ts_header_key_sequence_start
ts_header_key_sequence_end enable_envvars_config use_env_allowed_urls use_native_io io_ratio
metric_time_interval system_metrics_cmd model_snapshot models version tsConfigFile vmargs plugins_path
NUM_WORKERS
"""


def test_every_key_of_the_contract_is_known() -> None:
    assert [name for name in CONTRACT_KEYS.split() if name not in KEYS] == []


def test_each_environment_variable_begins_with_one_ts() -> None:
    assert [key.variable for key in KEYS.values() if key.variable.startswith("TS_TS_")] == []
    assert KEYS["ts_header_key_sequence_id"].variable == "TS_HEADER_KEY_SEQUENCE_ID"


def test_every_key_of_ours_is_in_the_reference() -> None:
    text = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    reference = text[text.index("\n## Settings\n") : text.index("\n## Probes\n")]
    ours = {name for name, key in KEYS.items() if key.setting} - set(CONTRACT_KEYS.split())
    assert sorted(name for name in ours if f"`{name}`" not in reference) == []


def test_every_key_with_an_effect_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (Path(__file__).parents[3] / "docs").glob("*.md"))
    named = set(re.findall(r"\w+", pages))
    assert sorted(name for name, key in KEYS.items() if key.setting and name not in named) == []


def test_every_setting_a_key_names_is_there() -> None:
    names = {key.setting.split(".")[0] for key in KEYS.values() if key.setting} - {METRICS_API}
    assert names <= {field.name for field in fields(ServerSettings)}
