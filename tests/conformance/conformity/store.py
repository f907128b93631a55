"""The model store of the generated corpus: the recorded archives, a probe, and odd archives."""

from __future__ import annotations

import json
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
MANIFEST = "MAR-INF/MANIFEST.json"
# Models that keep something between requests.
STATEFUL = {
    "sequence": "batchSize: 2\nsequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 3\n",
    "no_idle": "sequenceBatching: true\n",
    "ending": (
        "batchSize: 2\nsequenceBatching: true\ncontinuousBatching: true\nsequenceMaxIdleMSec: 60000\n"
        "sequenceTimeoutMSec: 50000\nmaxNumSequence: 3\nmaxSequenceJobQueueSize: 4\n"
    ),
    "continuous": "batchSize: 2\nmaxBatchDelay: 10\ncontinuousBatching: true\njobQueueSize: 9\n",
}


def build_store(folder: Path) -> None:
    """Fill an empty folder."""
    for archive in (HERE / "archives").iterdir():
        shutil.copy(archive, folder / archive.name)
    probe = (HERE / "handlers" / "probe.py").read_bytes()
    echo = (HERE / "handlers" / "echo.py").read_bytes()
    _write(folder / "probe.mar", _manifest("probe", "probe.py"), {"probe.py": probe})
    for name, config in STATEFUL.items():
        _write_stateful(folder / f"{name}.mar", name, config)
    files = {"echo.py": echo}
    _write(folder / "no_manifest.mar", None, files)
    _write(folder / "no_model.mar", {"runtime": "python"}, files)
    _write(folder / "bad_runtime.mar", {**_manifest("bad", "echo.py"), "runtime": "java"}, files)
    _write(folder / "no_name.mar", {"runtime": "python", "model": {"handler": "echo.py"}}, files)
    without_version = {"runtime": "python", "model": {"modelName": "x", "handler": "echo.py"}}
    _write(folder / "no_version.mar", without_version, files)
    (folder / "not_an_archive.mar").write_bytes(b"this is no archive")
    inside = folder / "folder_model"
    (inside / "MAR-INF").mkdir(parents=True)
    (inside / "echo.py").write_bytes(echo)
    (inside / MANIFEST).write_text(json.dumps(_manifest("folder_model", "echo.py")))
    with tarfile.open(folder / "packed.tar.gz", "w:gz") as packed:
        packed.add(inside, "packed")


def _manifest(name: str, handler: str) -> dict[str, Any]:
    return {
        "createdOn": "01/01/2026 00:00:00",
        "runtime": "python",
        "model": {"modelName": name, "handler": handler, "modelVersion": "1.0"},
        "archiverVersion": "0.12.0",
    }


def _write_stateful(path: Path, name: str, config: str) -> None:
    handler = "continuous.py" if name == "continuous" else "sequence.py"
    manifest = _manifest(name, handler)
    manifest["model"]["configFile"] = "model-config.yaml"
    files = {
        handler: (HERE / "handlers" / handler).read_bytes(),
        "model-config.yaml": f"minWorkers: 1\nmaxWorkers: 1\n{config}".encode(),
    }
    _write(path, manifest, files)


def _write(path: Path, manifest: dict[str, Any] | None, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        if manifest is not None:
            archive.writestr(MANIFEST, json.dumps(manifest))
