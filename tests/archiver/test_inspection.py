"""The report on an archive."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.container.entries import CHUNK_BYTES
from torchere.archiver.errors import ArchiveError
from torchere.archiver.inspection import inspect_archive
from torchere.archiver.reader import open_archive
from torchere.archiver.request import FORMATS
from torchere.archiver.writer import write_archive


@pytest.mark.parametrize("archive_format", FORMATS)
def test_every_format_is_reported(request_for: Any, archive_format: str) -> None:
    report = inspect_archive(write_archive(request_for(archive_format=archive_format)))
    assert report.digests_verified is (None if archive_format == "no-archive" else True)
    assert report.config_text == "minWorkers: 1\n"
    assert "handler: service.py (Python code in service.py)" in report.code
    assert [found.name for found in report.weights] == ["model.pt"]


def test_a_configuration_as_long_as_the_server_reads_is_shown(request_for: Any, sources: Path) -> None:
    (sources / "model-config.yaml").write_text("#" * 2**20)
    report = inspect_archive(write_archive(request_for()))
    assert report.config_text == "#" * 2**20


def test_json_has_what_a_program_needs(request_for: Any, sources: Path) -> None:
    (sources / "model.pt").write_bytes(pickle.dumps({"w": [0.0] * 10}, protocol=2))
    report = json.loads(inspect_archive(write_archive(request_for())).as_json())
    assert report["kind"] == "zip"
    assert report["digests"] == "verified"
    assert report["manifest"]["model"]["modelName"] == "mlp"
    assert report["weights"] == [{"name": "model.pt", "kind": "pickle", "pickled": True, "foreign": []}]
    entry = next(entry for entry in report["entries"] if entry["name"] == "model.pt")
    assert entry["method"] == "stored"
    assert entry["alignment"] % 64 == 0
    assert entry["offset"] % 64 == 0


def test_a_pickle_of_the_first_protocol_is_looked_into(request_for: Any, sources: Path) -> None:
    (sources / "model.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    report = inspect_archive(write_archive(request_for()))
    assert "model.pt (pickle, pickled) its pickle can run any Python code" in report.code[-1]
    assert "it imports os.system" in report.code[-1]


def test_a_first_chunk_of_one_byte_hides_nothing(tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as weights:
        weights.writestr("m/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    data = inner.getvalue()
    # Deflate has blocks of any length: a megabyte of empty ones makes the reader hand out what it has.
    blocks = [data[:1], *[b""] * (CHUNK_BYTES // 5), data[1:]]
    packed = [
        struct.pack("<BHH", index == len(blocks) - 1, len(block), len(block) ^ 0xFFFF) + block
        for index, block in enumerate(blocks)
    ]
    report = inspect_archive(_mar(tmp_path / "m.mar", "model.pt", b"".join(packed), data))
    assert report.weights[0].foreign == ("os.system",)


def _mar(path: Path, name: str, deflated: bytes, data: bytes) -> Path:
    """A zip with one entry that is compressed as given."""
    same = (8, 0, 0x21, zlib.crc32(data), len(deflated), len(data), len(name), 0)
    local = struct.pack("<4s5H3I2H", b"PK\3\4", 20, 0, *same) + name.encode() + deflated
    central = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, *same, 0, 0, 0, 0, 0) + name.encode()
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(central), len(local), 0)
    path.write_bytes(local + central + end)
    return path


def test_text_says_what_may_run(request_for: Any, sources: Path) -> None:
    (sources / "model.py").write_text("class M: ...\n")
    (sources / "requirements.txt").write_text("six\n")
    (sources / "extra" / "helper.py").write_text("")
    request = request_for(
        model_file=sources / "model.py",
        requirements_file=sources / "requirements.txt",
        handler=f"{sources}/service:handle",
    )
    text = inspect_archive(write_archive(request)).as_text()
    assert "handler: service:handle (Python code in service.py)" in text
    assert "model file: model.py (Python code)" in text
    assert "install_py_dep_per_model" in text
    assert "other Python files that these may import: helper.py" in text
    assert "Digests: verified (sha256)" in text
    assert "aligned to" in text


def test_an_archive_that_says_nothing_is_reported_too(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.txt").write_text("a")
    report = inspect_archive(tmp_path / "m")
    assert report.code == ("handler: none named; the server's default handler",)
    assert json.loads(report.as_json())["manifest"] is None
    assert "Digests: not present" in report.as_text()


def _workflow(folder: Path, manifest: str) -> Path:
    path = folder / "w.war"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("WAR-INF/MANIFEST.json", manifest)
        archive.writestr("w.yaml", "dag: {}")
        archive.writestr("f.py", "")
        archive.writestr("helper.py", "")
    return path


def test_a_workflow_has_functions_and_no_handler(tmp_path: Path) -> None:
    about = {"workflow": {"workflowName": "w", "specFile": "w.yaml", "handler": "f.py"}}
    report = inspect_archive(_workflow(tmp_path, json.dumps(about)))
    assert report.code == (
        "functions: f.py (Python code)",
        "models: those that w.yaml names, from archives of their own",
        "other Python files that these may import: helper.py",
    )
    assert json.loads(report.as_json())["manifest"] == about
    assert '"specFile": "w.yaml"' in report.as_text()


@pytest.mark.parametrize("manifest", ["{", "[]", '{"workflow": 1}', "[" * 100_000])
def test_a_workflow_whose_manifest_can_not_be_used_is_refused(tmp_path: Path, manifest: str) -> None:
    with pytest.raises(ArchiveError, match="the manifest of the workflow can't be used"):
        inspect_archive(_workflow(tmp_path, manifest))


def test_a_built_in_handler_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "m.mar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"handler": "image_classifier"}}))
    assert inspect_archive(path).code == ("handler: image_classifier (built into the server)",)


def test_the_library_of_a_handler_in_cpp_is_no_weights_file(tmp_path: Path) -> None:
    path = tmp_path / "m.mar"
    manifest = {"runtime": "LSP", "model": {"handler": "libscores.so:Scores"}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name in ("libscores.so", "other.so"):
            archive.writestr(name, b"\x7fELF" + bytes(12))
    assert inspect_archive(path).code == (
        "handler: libscores.so:Scores (machine code in libscores.so)",
        "weights: other.so (shared library, no pickle) runs as native code in a worker process",
    )


def test_files_that_are_named_but_missing_are_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "m" / "MAR-INF").mkdir(parents=True)
    model = {"handler": "gone.py", "modelFile": "gone2.py", "configFile": "gone.yaml"}
    (tmp_path / "m" / "MAR-INF" / "MANIFEST.json").write_text(
        json.dumps({"runtime": "python", "model": model})
    )
    report = inspect_archive(tmp_path / "m")
    assert "or missing" in report.code[0]
    assert report.code[1] == "model file: gone2.py (missing from the archive)"
    assert report.config_text is None


def test_a_damaged_archive_has_no_report(request_for: Any) -> None:
    path = write_archive(request_for(archive_format="zip-store"))
    path.write_bytes(path.read_bytes().replace(b"def handle", b"def hundle"))
    with pytest.raises(ArchiveError, match="CRC"):
        inspect_archive(path)


def test_a_changed_archive_is_reported_with_the_files(request_for: Any, tmp_path: Path) -> None:
    folder = open_archive(write_archive(request_for())).extract(tmp_path / "unpacked")
    (folder / "model.pt").write_bytes(b"other")
    (folder / "more.json").write_text("{}")
    report = inspect_archive(folder)
    assert "\nDigests: changed after packing: model.pt, more.json\n" in report.as_text()
    parsed = json.loads(report.as_json())
    assert (parsed["digests"], parsed["changed"]) == ("changed", ["model.pt", "more.json"])


def test_an_archive_can_not_write_the_report_about_itself(request_for: Any, sources: Path) -> None:
    (sources / "model-config.yaml").write_text("a: 1 # \x1b[2J\u202e\r\nb:\t2\n")
    (sources / "extra" / "\u202eyp.x").write_text("")
    folder = write_archive(request_for(archive_format="no-archive"))
    file = folder / "MAR-INF" / "MANIFEST.json"
    manifest = json.loads(file.read_text())
    manifest["model"]["handler"] = "service.py:x\x1b[2J\nweights: none"
    file.write_text(json.dumps(manifest))
    text = inspect_archive(folder).as_text()
    assert all(line.isprintable() for line in text.split("\n"))
    assert "  handler: service.py:x\\x1b[2J\\nweights: none (Python code in service.py)" in text.split("\n")
    assert text.endswith("Configuration (model-config.yaml)\n  a: 1 # \\x1b[2J\\u202e\n  b:      2")


def test_the_fixed_time_of_an_archive_is_explained(request_for: Any) -> None:
    assert "SOURCE_DATE_EPOCH sets another" in inspect_archive(write_archive(request_for())).as_text()
    dated = inspect_archive(write_archive(request_for(epoch_s=1_700_000_000, force=True))).as_text()
    assert "SOURCE_DATE_EPOCH" not in dated
