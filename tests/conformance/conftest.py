"""One server for all recorded cases, once with process executors and once with thread executors."""

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the script beside this file uses the package `conformity` as well

from conformity.recordings import FOLDER, Exchange, replay_grpc, replay_rest  # noqa: E402
from conformity.servers import Server, torchere  # noqa: E402
from no_torch import NoTorch  # noqa: E402

# The recorded server ran with a time-out of 5 s. Only one case waits for it, and its model may be quicker.
QUICKER = {"rich": {"1.0": {"responseTimeout": 1}}}
# A model config ends the server's own default of a time-out, so the recorded one is said for each version.
AS_RECORDED = {
    name: {version: {"responseTimeout": 5} for version in versions}
    for name, versions in {
        **dict.fromkeys(("echo", "echo3", "gecho", "base"), ("1.0",)),
        "func": ("2.1",),
        "mlp": ("1.0", "2.0"),
    }.items()
}


@pytest.fixture(scope="session", params=["process", "thread"])
def isolation(request: pytest.FixtureRequest) -> str:
    """Where the executors live."""
    value: str = request.param
    return value


@pytest.fixture(scope="session")
def server(isolation: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server as it was configured for the recording, whose own process can't import torch."""
    folder = tmp_path_factory.mktemp(isolation)
    models = QUICKER if isolation == "process" else {**AS_RECORDED, **QUICKER}
    properties = (FOLDER / "server.properties").read_text() + f"models={json.dumps(models)}\n"
    no_torch = NoTorch(tmp_path_factory.mktemp("no_torch"))
    store = _store(folder / "store", isolation)
    with torchere(folder, store, properties, environment=no_torch.environment) as running:
        yield running
    assert not no_torch.attempts, no_torch.attempts


@pytest.fixture(scope="session")
def rest_exchanges(server: Server) -> dict[str, Exchange]:
    """Every REST case, sent once and in order."""
    return replay_rest(server)


@pytest.fixture(scope="session")
def grpc_exchanges(server: Server, rest_exchanges: dict[str, Exchange]) -> dict[str, Exchange]:
    """Every gRPC call, made once and in order, after the REST cases: it lists the models they leave."""
    return replay_grpc(server)


def _store(folder: Path, isolation: str) -> Path:
    recorded = HERE / "archives"
    if isolation == "process":
        return recorded
    folder.mkdir()
    for archive in recorded.iterdir():
        _pack_for_threads(archive, folder / archive.name)
    return folder


def _pack_for_threads(source: Path, target: Path) -> None:
    """The same archive with a model config that asks for threads."""
    with zipfile.ZipFile(source) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files["MAR-INF/MANIFEST.json"])
    config = manifest["model"].setdefault("configFile", "model-config.yaml")
    files[config] = files.get(config, b"") + b"\nisolation: thread\n"
    files["MAR-INF/MANIFEST.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
