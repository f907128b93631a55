"""Precedence of settings as a table."""

import pytest

from torchere.serving.config.model_settings import Asked, ModelConfig, effective_settings, parse_model_config
from torchere.serving.config.server_settings import Isolation, ModelSettings, ServerSettings

NOTHING_ASKED = Asked()
NO_CONFIG = ModelConfig()
SERVER = ServerSettings(default_response_timeout_s=5, default_startup_timeout_s=6, max_queue_size=7)


def settings(
    asked: Asked = NOTHING_ASKED, config: ModelConfig = NO_CONFIG, defaults: dict[str, object] | None = None
) -> ModelSettings:
    return effective_settings(asked, config, defaults or {}, SERVER)


def test_without_a_word_the_defaults_are_those_of_torchserve() -> None:
    got = settings()
    assert (got.batch.max_batch_size, got.batch.max_queue_delay_ms, got.batch.max_queue_size) == (1, 100, 7)
    assert (got.response_timeout_s, got.startup_timeout_s) == (5, 6)
    assert (got.min_executors, got.max_executors) == (0, 0)


def test_the_api_wins_over_the_model_config_for_batching() -> None:
    config = ModelConfig(present=True, batch_size=8, max_batch_delay_ms=20)
    got = settings(Asked(batch_size=2), config).batch
    assert (got.max_batch_size, got.max_queue_delay_ms) == (2, 20)


def test_a_delay_of_zero_that_was_asked_for_is_no_delay() -> None:
    config = ModelConfig(present=True, max_batch_delay_ms=20)
    assert settings(Asked(max_batch_delay_ms=0), config).batch.max_queue_delay_ms == 0


def test_the_model_config_wins_over_the_models_property() -> None:
    got = settings(
        config=ModelConfig(present=True, batch_size=8), defaults={"batchSize": 3, "maxBatchDelay": 9}
    )
    assert (got.batch.max_batch_size, got.batch.max_queue_delay_ms) == (8, 9)


def test_the_model_config_wins_over_the_api_for_timeouts() -> None:
    got = settings(Asked(response_timeout_s=30), ModelConfig(present=True, response_timeout_s=10))
    assert got.response_timeout_s == 10


def test_the_timeouts_of_a_snapshot_win_over_the_model_config() -> None:
    config = ModelConfig(present=True, response_timeout_s=10, startup_timeout_s=20)
    got = settings(Asked(response_timeout_s=30, startup_timeout_s=40, restored=True), config)
    assert (got.response_timeout_s, got.startup_timeout_s) == (30, 40)
    got = settings(Asked(restored=True), config)
    assert (got.response_timeout_s, got.startup_timeout_s) == (10, 20)


def test_a_timeout_asked_for_is_used_when_the_model_config_has_none() -> None:
    assert settings(Asked(response_timeout_s=30), ModelConfig(present=True)).response_timeout_s == 30


def test_a_model_config_without_timeouts_does_not_take_the_servers() -> None:
    got = settings(config=ModelConfig(present=True))
    assert (got.response_timeout_s, got.startup_timeout_s) == (120, 120)


@pytest.mark.parametrize(
    ("config", "defaults", "expected"),
    [
        (ModelConfig(present=True, min_workers=2, max_workers=4), {}, (2, 4)),
        (ModelConfig(present=True, min_workers=2, max_workers=1), {}, (1, 1)),
        (ModelConfig(present=True, min_workers=2), {}, (1, 1)),
        (ModelConfig(), {"minWorkers": 3, "maxWorkers": 5}, (3, 5)),
        (ModelConfig(), {"minWorkers": 3}, (3, 3)),
        (ModelConfig(), {"maxWorkers": 3}, (1, 3)),
        (ModelConfig(), {"minWorkers": 3, "maxWorkers": 2}, (3, 3)),
    ],
)
def test_executor_counts(config: ModelConfig, defaults: dict[str, object], expected: tuple[int, int]) -> None:
    got = settings(Asked(executors=1, executors_by_default=True), config, defaults)
    assert (got.min_executors, got.max_executors) == expected


@pytest.mark.parametrize("asked", [0, 1, 4])
def test_the_models_property_has_no_say_in_how_many_executors_a_call_asks_for(asked: int) -> None:
    got = settings(Asked(executors=asked), defaults={"minWorkers": 2, "maxWorkers": 3, "batchSize": 5})
    assert (got.min_executors, got.max_executors, got.batch.max_batch_size) == (asked, asked, 5)


@pytest.mark.parametrize(
    ("config", "gpus", "asked_for", "used"),
    [
        (ModelConfig(), 0, (), ()),
        (ModelConfig(), 2, (), (0, 1)),
        (ModelConfig(device_type="gpu"), 0, (), ()),
        (ModelConfig(device_type="gpu", device_ids=(1,)), 2, (1,), (1,)),
        (ModelConfig(device_ids=(0, 2)), 2, (), (0, 1)),
        (ModelConfig(device_ids=(0,)), 0, (), ()),
        (ModelConfig(device_type="cpu", device_ids=(1,)), 2, (1,), ()),
    ],
)
def test_a_model_is_on_all_gpus_in_turn_unless_its_config_says_otherwise(
    config: ModelConfig, gpus: int, asked_for: tuple[int, ...], used: tuple[int, ...]
) -> None:
    got = effective_settings(NOTHING_ASKED, config, {}, SERVER, gpus)
    assert (got.device_ids, got.gpu_ids) == (asked_for, used)


@pytest.mark.parametrize(("said", "isolation"), [(None, "shared"), ("auto", "auto"), ("process", "process")])
def test_the_servers_isolation_is_for_models_that_name_none(said: Isolation | None, isolation: str) -> None:
    config = ModelConfig(present=True, isolation=said)
    server = ServerSettings(default_isolation="shared")
    assert effective_settings(NOTHING_ASKED, config, {}, server).isolation == isolation


def test_there_are_no_more_workers_than_their_gpus_allow() -> None:
    config = parse_model_config("parallelType: tp\nparallelLevel: 2\nminWorkers: 3\nmaxWorkers: 4")
    on_gpus = effective_settings(Asked(), config, {}, ServerSettings(), gpus=5)
    assert (on_gpus.min_executors, on_gpus.max_executors, on_gpus.gpu_ids) == (2, 2, (0, 1, 2, 3, 4))
    assert on_gpus.scaled(1, 9).max_executors == 2
    on_the_cpu = effective_settings(Asked(), config, {}, ServerSettings(), gpus=0)
    assert (on_the_cpu.min_executors, on_the_cpu.max_executors) == (3, 4)


def test_a_model_over_several_machines_has_one_worker() -> None:
    config = parse_model_config("parallelType: tp\nminWorkers: 2\nmaxWorkers: 4\ntorchrun: {nnodes: 2}")
    settings = effective_settings(Asked(), config, {}, ServerSettings())
    assert (settings.min_executors, settings.max_executors) == (1, 1)
    scaled = settings.scaled(0, 8)
    assert (scaled.min_executors, scaled.max_executors) == (0, 1)


@pytest.mark.parametrize(
    ("kind", "gpu_ids"),
    [
        ("gpu", (0, 1)),
        ("cuda", (0, 1)),
        ("xpu", (0, 1)),
        ("hpu", (0, 1)),
        ("cpu", ()),
        ("mps", ()),
        ("xla", ()),
    ],
)
def test_kinds_of_gpus_with_numbers_are_spread_over_the_workers(kind: str, gpu_ids: tuple[int, ...]) -> None:
    config = parse_model_config(f"deviceType: {kind.upper()}")
    found = effective_settings(Asked(), config, {}, ServerSettings(), gpus=2)
    assert (found.gpu_ids, found.device_type) == (gpu_ids, kind)
