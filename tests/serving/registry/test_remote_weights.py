"""Archives whose weights are in S3: which the server takes. Nothing is loaded here."""

import asyncio
import json
import zipfile
from pathlib import Path

import pytest

from torchere.serving.config.model_settings import Asked
from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import InvalidArchive, LoadFailed
from torchere.serving.registry import builder
from torchere.serving.registry.desired import Wanted
from torchere.serving.registry.observation import RegistryMetrics
from torchere.serving.registry.registry import Registry
from torchere.serving.registry.version import Version
from torchere.serving.registry.workflows import Workflows
from torchere.serving.telemetry.metrics import Metrics
from torchere.serving.workers.sandbox import Sandbox


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An archive beside an empty model store."""
    (tmp_path / "store").mkdir()
    described = {"modelName": "m", "modelVersion": "1.0", "handler": "h.py", "configFile": "c.yaml"}
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
        archive.writestr("h.py", "def handle(data, context): return data\n")
        archive.writestr("c.yaml", "parallel: {tensor: 2, weights: s3://weights/net}")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": described}))
    return tmp_path


def register(folder: Path, url: str, *, at_startup: bool = False, allowed: tuple[str, ...] = ()) -> Version:
    async def main() -> Version:
        urls = (f"file://{folder}/.*", *allowed)
        server = ServerSettings(model_store=folder / "store", temp_dir=folder, max_gpus=0, allowed_urls=urls)
        registry = Registry(server, RegistryMetrics(Metrics("host")))
        try:
            return await registry.register(Wanted(url, Asked(), at_startup=at_startup))
        finally:
            await registry.close()

    return asyncio.run(main())


def test_a_clients_archive_is_refused_and_leaves_nothing(folder: Path) -> None:
    with pytest.raises(InvalidArchive, match="no client may name them: s3://weights/net"):
        register(folder, f"file://{folder}/m.mar")
    assert not any((folder / "store").iterdir())


@pytest.mark.parametrize("as_workflow", [False, True])
def test_a_clients_archive_is_refused_by_its_name_too_while_its_download_is_there(
    folder: Path, as_workflow: bool
) -> None:
    async def main() -> None:
        urls = (f"file://{folder}/.*",)
        server = ServerSettings(model_store=folder / "store", temp_dir=folder, max_gpus=0, allowed_urls=urls)
        registry = Registry(server, RegistryMetrics(Metrics("host")))
        workflows = Workflows(server, registry)
        try:
            fetching = workflows._fetching if as_workflow else registry._fetching
            assert await fetching.fetch(f"file://{folder}/m.mar", by_operator=False)
            with pytest.raises(InvalidArchive, match="no client may name them: s3://weights/net"):
                await registry.register(Wanted("m.mar", Asked()))
        finally:
            workflows.close()
            await registry.close()

    asyncio.run(main())


def test_a_clients_archive_may_name_what_the_operator_allows(folder: Path) -> None:
    assert register(folder, f"file://{folder}/m.mar", allowed=("s3://weights/.*",)).key.name == "m"


def test_the_operators_archive_may_name_any(folder: Path) -> None:
    assert register(folder, f"file://{folder}/m.mar", at_startup=True).key.name == "m"


def test_an_archive_of_the_store_may_name_any(folder: Path) -> None:
    (folder / "m.mar").rename(folder / "store" / "m.mar")
    assert register(folder, "m.mar").key.name == "m"


def test_they_are_refused_where_workers_have_no_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not every system that runs the tests has what `strict` needs.
    monkeypatch.setattr(builder, "sandbox_of", lambda _server: Sandbox(strict=True, network=False))
    with pytest.raises(LoadFailed, match="weights of model m are in S3, and its workers have no") as caught:
        register(folder, f"file://{folder}/m.mar", at_startup=True)
    assert "s3://weights/net, and worker_sandbox=strict; set worker_network=true" in caught.value.detail
