"""A further machine of a rank group: which archives it takes from its leader."""

import json
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from torchere.serving.config.server_settings import ServerSettings
from torchere.serving.errors import InvalidArchive
from torchere.serving.workers.machines import Welcome
from torchere.serving.workers.member import Member


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
