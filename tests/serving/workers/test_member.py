"""A further machine of a rank group: which archives it takes from its leader, and which GPUs."""

import json
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import InvalidArchive, ServingError
from torchere.serving.workers import member as members
from torchere.serving.workers.executor import LoadSpec
from torchere.serving.workers.machines import Welcome
from torchere.serving.workers.member import Member
from torchere.serving.workers.ranks import load_elsewhere


@pytest.mark.parametrize("allowed", [(), ("s3://weights/.*",)])
def test_an_archive_from_the_leaders_url_may_name_allowed_weights_only(
    tmp_path: Path, allowed: tuple[str, ...]
) -> None:
    for folder in ("shop", "store"):
        (tmp_path / folder).mkdir()
    described = {"modelName": "m", "modelVersion": "1.0", "handler": "h.py", "configFile": "c.yaml"}
    with zipfile.ZipFile(tmp_path / "shop" / "m.mar", "w") as archive:
        archive.writestr("h.py", "def handle(data, context): return data\n")
        archive.writestr("c.yaml", "parallel: {tensor: 2, weights: s3://weights/net}\n")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": described}))
    shop = f"file://{tmp_path}/shop"
    settings = ServerSettings(
        model_store=tmp_path / "store", temp_dir=tmp_path, allowed_urls=(f"{shop}/.*", *allowed)
    )
    member = Member(settings, "127.0.0.1", 1, b"secret")
    welcome = Welcome(b"", cast(Any, None), "m.mar", f"{shop}/m.mar", "", 1)
    with closing(member._store):
        if allowed:
            assert member._opened(welcome).manifest.model_name == "m"
        else:
            with pytest.raises(InvalidArchive, match="no client may name them"):
                member._opened(welcome)
            assert not any((tmp_path / "store").iterdir())


@pytest.mark.parametrize(
    ("leaders", "kind", "expected"),
    [((), "", ()), ((2, 3), "", (0, 1)), ((0, 1), "xpu", None)],
    ids=["on the CPU", "on GPUs", "with too few of a kind"],
)
def test_a_machine_takes_as_many_gpus_as_its_leader(
    leaders: tuple[int, ...],
    kind: str,
    expected: tuple[int, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"cuda": 4, "xpu": 1}
    monkeypatch.setattr(members, "gpu_count", lambda most, kind: there[kind])
    described = {"modelName": "m", "modelVersion": "1.0", "handler": "h.py"}
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
        archive.writestr("h.py", "def handle(data, context): return data\n")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": described}))
    member = Member(ServerSettings(model_store=tmp_path, temp_dir=tmp_path), "127.0.0.1", 1, b"secret")
    config = {"deviceType": kind}
    spec = LoadSpec("m", "1.0", "/leaders", "h.py", model_config=config, gpu_ids=leaders, ranks=2, devices=2)
    with closing(member._store) as store:
        stored = store.unpack("m.mar", store.open("m.mar"))
        welcome = Welcome(b"", load_elsewhere(spec), "m.mar", "", stored.fingerprint, 1)
        if expected is None:
            with pytest.raises(ServingError, match="has 1 GPUs, expected 2"):
                member._spec_of(welcome, 2)
        else:
            here = member._spec_of(welcome, 2)
            assert here.gpu_ids == expected
            assert here.archive_dir.startswith(str(tmp_path))
