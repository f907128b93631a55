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
from torchere.serving.settings import ServerSettings
from torchere.serving.telemetry.metrics import Metrics


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
    model = {"modelName": "m", "modelVersion": "1.0", "handler": "h.py", "configFile": "m.yaml"}
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
        archive.writestr("h.py", "def handle(data, context): return data\n")
        archive.writestr("m.yaml", config)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))

    async def main() -> None:
        server = ServerSettings(model_store=tmp_path, temp_dir=tmp_path, max_gpus=0)
        registry = Registry(server, RegistryMetrics(Metrics("host")))
        await registry.register(Wanted("m.mar", Asked()))
        await registry.close()

    asyncio.run(main())
    assert ("m:1.0 asks for a GPU in its model config, and there is none" in caplog.text) is warned
