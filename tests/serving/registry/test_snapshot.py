"""Snapshots: what is written, under which name, and that either server would read it back."""

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchere.serving.commands.serve_options import newest_snapshot
from torchere.serving.config.properties import parse_properties, read_properties
from torchere.serving.config.resolve import configure
from torchere.serving.config.server_settings import (
    BatchSettings,
    ModelSettings,
    SnapshotModel,
    SnapshotSettings,
    SnapshotWorkflow,
)
from torchere.serving.registry.snapshot import (
    FIRST_LINE,
    model_table,
    property_line,
    snapshot_name,
    snapshot_text,
    write_snapshot,
)

# As TorchServe 0.12.0 writes it (properties in the order of a hash map, blanks and colons escaped).
WRITTEN_BY_TORCHSERVE = r"""#Saving snapshot
#Sat Nov 21 09:52:27 UTC 2026
inference_address=http\://127.0.0.1\:18080
load_models=echo\=echo.mar
model_store=store
python=/usr/bin/python3
model_snapshot={\n  "name"\: "20261121095227582-snapshot.cfg",\n  "modelCount"\: 1,\n  "created"\: 1795254747583,\n  "models"\: {\n    "echo"\: {\n      "1.0"\: {\n        "defaultVersion"\: true,\n        "marName"\: "echo.mar",\n        "minWorkers"\: 0,\n        "maxWorkers"\: 2,\n        "batchSize"\: 1,\n        "maxBatchDelay"\: 100,\n        "responseTimeout"\: 120,\n        "startupTimeout"\: 120,\n        "runtimeType"\: "python"\n      }\n    }\n  }\n}
tsConfigFile=c.properties
version=0.12.0
disable_token_authorization=true
"""  # noqa: E501
TABLE: dict[str, dict[str, dict[str, Any]]] = {
    "m": {
        "1.0": {
            "defaultVersion": True,
            "marName": "m.mar",
            "minWorkers": 1,
            "maxWorkers": 2,
            "batchSize": 4,
            "maxBatchDelay": 50,
        }
    }
}
CONTENT = {"models": TABLE}
NOON = datetime(2026, 1, 2, 12, 0, 0, 345_000)


def version(**changes: Any) -> Any:
    """As much of a registered version as a snapshot looks at."""
    archive: dict[str, Any] = {
        "manifest": {"model": {"handler": "h.py"}},
        "file_name": "m.mar",
        "outside_store": False,
        "url": "m.mar",
    }
    archive |= changes.pop("archive", {})
    settings = ModelSettings(BatchSettings(4, 50), min_executors=1, max_executors=2, response_timeout_s=0.5)
    origin: dict[str, Any] = {"archive": SimpleNamespace(**archive), "handler": "h.py", "runtime": "python"}
    origin["workflow"] = ""
    return SimpleNamespace(settings=settings, origin=SimpleNamespace(**{**origin, **changes}))


def test_the_steps_of_workflows_are_not_in_the_table() -> None:
    versions = {"1": version(workflow="w")}
    assert model_table({"w__m": SimpleNamespace(default_version="1", versions=versions)}) == {}  # type: ignore[dict-item]


def test_the_table_has_torchserves_fields_with_whole_seconds() -> None:
    served: Any = {"m": SimpleNamespace(default_version="2", versions={"1": version(), "2": version()})}
    table = model_table(served)
    assert table["m"]["2"] == {
        "defaultVersion": True,
        "marName": "m.mar",
        "minWorkers": 1,
        "maxWorkers": 2,
        "batchSize": 4,
        "maxBatchDelay": 50,
        "responseTimeout": 1,
        "startupTimeout": 120,
        "runtimeType": "python",
    }
    assert table["m"]["1"]["defaultVersion"] is False


def test_what_could_not_be_restored_stands_as_it_was_unless_it_is_served_again() -> None:
    served: Any = {"m": SimpleNamespace(default_version="1", versions={"1": version()})}
    lacking = [SnapshotModel("m", number, "old.mar", number == "2", {"minWorkers": 3}) for number in "12"]
    table = model_table(served, lacking)
    assert table["m"]["1"]["marName"] == "m.mar"
    assert table["m"]["2"] == {"defaultVersion": True, "marName": "old.mar", "minWorkers": 3}


def test_what_torchserve_forgets_is_kept_in_fields_of_ours() -> None:
    outside = {"outside_store": True, "url": "/opt/ml/model", "file_name": "model"}
    one = version(handler="other.py:handle", archive=outside)
    table = model_table({"m": SimpleNamespace(default_version="1", versions={"1": one})})  # type: ignore[dict-item]
    assert table["m"]["1"]["torchere"]["handler"] == "other.py:handle"
    assert (table["m"]["1"]["marName"], table["m"]["1"]["torchere"]["path"]) == ("model", "/opt/ml/model")


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_survives_a_property_line(text: str) -> None:
    line = property_line("key", text)
    assert line.isascii()
    assert [(entry.key, entry.value) for entry in parse_properties(line)] == [("key", text)]


def test_a_written_snapshot_configures_the_same_server_again(tmp_path: Path) -> None:
    properties = (("inference_address", "http://127.0.0.1:1234"), ("cors_allowed_origin", " é\\\n"))
    path = write_snapshot(SnapshotSettings(tmp_path / "logs" / "config", properties), "startup", CONTENT)
    assert newest_snapshot(path.parent) == path
    settings = configure(read_properties(path)).checked()
    assert settings.inference_address.port == 1234
    (model,) = settings.snapshot_models
    assert (model.name, model.version, model.archive, model.settings["maxWorkers"]) == (
        "m",
        "1.0",
        "m.mar",
        2,
    )
    record = json.loads(next(e.value for e in read_properties(path) if e.key == "model_snapshot"))
    assert (record["name"], record["modelCount"], record["models"]) == (path.name, 1, TABLE)
    assert path.stat().st_mode & 0o077 == 0  # values from the environment may be secrets


def test_a_snapshot_of_thousands_of_models_is_read_again(tmp_path: Path) -> None:
    table = {f"model-{number}": TABLE["m"] for number in range(5000)}
    path = write_snapshot(SnapshotSettings(tmp_path, keep=5), "shutdown", {"models": table})
    assert len(configure(read_properties(path)).checked().snapshot_models) == 5000


def test_a_workflow_that_was_registered_with_timeouts_below_zero_is_read_again(tmp_path: Path) -> None:
    workflow = SnapshotWorkflow("wf.war", "wf", -1, -1)
    content = {"models": {}, "torchere": {"workflows": [workflow.entry()]}}
    path = write_snapshot(SnapshotSettings(tmp_path, keep=5), "shutdown", content)
    assert configure(read_properties(path)).checked().snapshot_workflows == (workflow,)


def test_a_snapshot_of_torchserve_itself_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text(WRITTEN_BY_TORCHSERVE)
    configuration = configure(read_properties(tmp_path / "c.cfg"))
    settings = configuration.checked()
    assert [model.archive for model in settings.snapshot_models] == ["echo.mar"]
    assert settings.token_auth_enabled is False
    assert [finding.key for finding in configuration.of_level("warning")] == ["load_models"]


def test_when_it_was_made_stands_in_it_in_milliseconds_as_torchserve_has_it() -> None:
    made = datetime(2026, 1, 1, 1, 0, 0, 123_456, timezone(timedelta(hours=1)))
    assert '"created": 1767225600123,' in snapshot_text("x.cfg", made, (), {"models": {}})


def test_a_name_tells_the_time_and_the_kind() -> None:
    assert snapshot_name("startup", NOON, []) == "20260102120000345-startup.cfg"


@pytest.mark.parametrize(
    ("existing", "expected"),
    [
        ("20260102120000345-startup.cfg", "20260102120000346-shutdown.cfg"),
        ("20270102235959999-snapshot.cfg", "20270103000000000-shutdown.cfg"),
        ("20260102120000344-snapshot.cfg", "20260102120000345-shutdown.cfg"),
        ("99999999999999999-snapshot.cfg", "20260102120000345-shutdown.cfg"),
        ("notes.txt", "20260102120000345-shutdown.cfg"),
    ],
)
def test_a_name_comes_after_all_there_are_even_when_the_clock_went_back(existing: str, expected: str) -> None:
    assert snapshot_name("shutdown", NOON, [existing]) == expected


def test_only_the_newest_of_ours_are_kept_and_none_of_anybody_else(tmp_path: Path) -> None:
    theirs = tmp_path / "20200101000000000-startup.cfg"
    theirs.write_text("#Saving snapshot\n")
    (tmp_path / "notes.txt").write_text(FIRST_LINE)
    written = [write_snapshot(SnapshotSettings(tmp_path, keep=3), "snapshot", CONTENT) for _ in range(5)]
    assert sorted(tmp_path.iterdir()) == sorted([theirs, tmp_path / "notes.txt", *written[2:]])


def test_of_thousands_that_torchserve_wrote_only_the_newest_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2000):
        (tmp_path / f"{20200101000000000 + number}-snapshot.cfg").write_text("#Saving snapshot\n")
    opened: list[str] = []
    path_open = Path.open

    def open_and_note(path: Path, mode: str) -> Any:
        opened.append(path.name)
        return path_open(path, mode)

    monkeypatch.setattr(Path, "open", open_and_note)
    written = [write_snapshot(SnapshotSettings(tmp_path, keep=1), "snapshot", CONTENT) for _ in range(2)]
    assert [path.exists() for path in written] == [False, True]
    assert len(opened) == 2000  # half of what is there, twice
    assert len(list(tmp_path.iterdir())) == 2001


def test_what_has_the_name_of_a_snapshot_and_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "20200101000000000-startup.cfg").mkdir()
    assert write_snapshot(SnapshotSettings(tmp_path, keep=3), "snapshot", CONTENT).is_file()
    assert (tmp_path / "20200101000000000-startup.cfg").is_dir()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchere.serving.registry.snapshot.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        write_snapshot(SnapshotSettings(tmp_path, keep=3), "startup", CONTENT)
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        sync(descriptor)
        done.append(("on the disk", os.fstat(descriptor).st_size))

    def renamed(source: str, target: Path) -> None:
        done.append(("named", os.path.getsize(source)))
        rename(source, target)

    monkeypatch.setattr("torchere.serving.registry.snapshot.os.fsync", synced)
    monkeypatch.setattr("torchere.serving.registry.snapshot.os.replace", renamed)
    size = write_snapshot(SnapshotSettings(tmp_path, keep=3), "startup", CONTENT).stat().st_size
    assert done == [("on the disk", size), ("named", size)]


def test_what_a_server_had_begun_to_write_when_it_was_killed_is_swept(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".snapshot-old", tmp_path / ".snapshot-fresh"
    for draft in (old, fresh):
        draft.write_text(FIRST_LINE)
    os.utime(old, (0, 0))
    written = write_snapshot(SnapshotSettings(tmp_path, keep=3), "startup", CONTENT)
    assert sorted(tmp_path.iterdir()) == [fresh, written]


def test_behind_the_last_name_of_all_snapshots_are_written_all_the_same() -> None:
    last = "99991231235959999-startup.cfg"
    assert snapshot_name("startup", datetime(2026, 1, 2), [last]) == "20260102000000000-startup.cfg"
    near = "99991231235959997-startup.cfg"
    assert snapshot_name("startup", datetime(2026, 1, 2), [near]) == "99991231235959998-startup.cfg"
