"""What is said of a version while it is built."""

import asyncio
import json
import zipfile
from pathlib import Path

import pytest

from torchere.serving.observation import RegistryMetrics
from torchere.serving.registry.effective import Asked
from torchere.serving.registry.registry import Registry
from torchere.serving.registry.startup import Wanted
from torchere.serving.registry.version import Version
from torchere.serving.settings import ServerSettings
from torchere.serving.telemetry.metrics import Metrics


def version_of(folder: Path, config: str) -> Version:
    """A version from an archive with that model config, on a machine without a GPU."""
    model = {"modelName": "m", "modelVersion": "1.0", "handler": "h.py", "configFile": "m.yaml"}
    with zipfile.ZipFile(folder / "m.mar", "w") as archive:
        archive.writestr("h.py", "def handle(data, context): return data\n")
        archive.writestr("m.yaml", config)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))

    async def main() -> Version:
        server = ServerSettings(model_store=folder, temp_dir=folder, max_gpus=0)
        registry = Registry(server, RegistryMetrics(Metrics("host")))
        version = await registry.register(Wanted("m.mar", Asked()))
        await registry.close()
        return version

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ("deviceType: gpu", True),
        ("deviceIds: [0]", True),
        ("deviceType: cpu\ndeviceIds: [0]", False),
        ("minWorkers: 1", False),
    ],
)
def test_a_model_that_asks_for_a_gpu_where_none_is_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str, warned: bool
) -> None:
    version_of(tmp_path, config)
    assert ("m:1.0 asks for a GPU in its model config, and there is none" in caplog.text) is warned


@pytest.mark.parametrize(
    ("config", "shares_weights", "pinned"),
    [
        ("isolation: thread", True, False),
        ("isolation: process", False, False),
        ("minWorkers: 1", False, False),  # its handler is Python of its own
        ("isolation: thread\ncontinuousBatching: true", False, True),
        ("isolation: thread\nsequenceBatching: true\nsequenceMaxIdleMSec: 1000", False, True),
    ],
)
def test_executors_are_lanes_of_one_process_unless_they_keep_state_or_are_to_be_apart(
    tmp_path: Path, config: str, shares_weights: bool, pinned: bool
) -> None:
    version = version_of(tmp_path, config)
    spec = version.pool._spec
    assert (spec.shares_weights, spec.pinned) == (shares_weights, pinned)


@pytest.mark.parametrize(
    ("config", "sends_ahead"),
    [
        ("minWorkers: 1", True),
        ("useJobTicket: true", False),
        ("jobQueueSize: 7", False),
        ("jobQueueSize: 8", True),
    ],
)
def test_runs_are_sent_ahead_unless_so_few_may_wait_that_each_counts(
    tmp_path: Path, config: str, sends_ahead: bool
) -> None:
    assert version_of(tmp_path, config).pool._settings.sends_ahead is sends_ahead
