"""Which files go into an archive, and under which names."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from torchere.archiver.atomic import staged
from torchere.archiver.errors import PackingError
from torchere.archiver.writer import gather


def names(request: Any) -> list[str]:
    return [item.name for item in gather(request)]


def test_files_are_flattened_and_sorted_but_folders_in_folders_stay(request_for: Any) -> None:
    assert names(request_for()) == [
        "deep/vocab.txt",
        "model-config.yaml",
        "model.pt",
        "names.json",
        "service.py",
    ]


def test_caches_and_hidden_folders_stay_out_and_hidden_files_come_in(request_for: Any, sources: Path) -> None:
    for folder in ("__pycache__", "__MACOSX", ".git"):
        (sources / "extra" / folder).mkdir()
        (sources / "extra" / folder / "x").write_text("")
    (sources / "extra" / ".settings").write_text("")
    assert names(request_for()) == [
        ".settings",
        "deep/vocab.txt",
        "model-config.yaml",
        "model.pt",
        "names.json",
        "service.py",
    ]


def test_a_glob_takes_what_it_matches(request_for: Any, sources: Path) -> None:
    assert names(request_for(extra_files=(f" {sources}/extra/*.json ",)))[2] == "names.json"


def test_a_glob_that_matches_nothing_is_only_warned_of(request_for: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(gather(request_for(extra_files=("nowhere/*.x",)))) == 3
    assert "Given wildcard pattern did not match any file: nowhere/*.x" in caplog.text


def test_a_missing_extra_file_is_an_error(request_for: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"^File does not exist: nowhere\.txt$"):
        gather(request_for(extra_files=("nowhere.txt",)))


@pytest.mark.parametrize("field", ["serialized_file", "model_file", "requirements_file", "config_file"])
def test_a_missing_named_file_is_an_error_that_names_it(request_for: Any, field: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.x"):
        gather(request_for(**{field: "gone.x"}))


@pytest.mark.parametrize("field", ["model_file", "requirements_file", "config_file"])
def test_a_folder_in_the_place_of_a_file_is_refused(request_for: Any, sources: Path, field: str) -> None:
    with pytest.raises(PackingError, match=r"extra is a folder; expected a file, such as one in it$"):
        gather(request_for(**{field: sources / "extra", "extra_files": ()}))
    with pytest.raises(PackingError, match=r"extra is a folder, which no server loads .* Hugging Face"):
        gather(request_for(serialized_file=sources / "extra", extra_files=()))


def test_the_same_file_given_twice_is_one_file(request_for: Any, sources: Path) -> None:
    assert names(request_for(extra_files=(sources / "service.py",))).count("service.py") == 1


def test_two_different_files_of_one_name_are_refused(request_for: Any, sources: Path) -> None:
    (sources / "extra" / "service.py").write_text("other")
    with pytest.raises(PackingError, match=r"differ, and both would be 'service.py'"):
        gather(request_for())


def test_names_differing_only_in_case_are_refused(request_for: Any, sources: Path) -> None:
    (sources / "extra" / "Model.PT").write_text("other")
    with pytest.raises(PackingError, match="one file on some systems"):
        gather(request_for())


def test_a_name_that_could_not_be_unpacked_is_refused(request_for: Any, sources: Path) -> None:
    (sources / "extra" / "a\\b").write_text("")
    with pytest.raises(PackingError, match="backslash"):
        gather(request_for())


def test_a_pipe_among_the_extra_files_is_refused_and_not_opened(request_for: Any, sources: Path) -> None:
    os.mkfifo(sources / "extra" / "pipe")
    with pytest.raises(PackingError, match="not a regular file"):
        gather(request_for())


def test_links_are_followed_and_a_link_back_up_ends(request_for: Any, sources: Path) -> None:
    (sources / "extra" / "linked.txt").symlink_to(sources / "extra" / "deep" / "vocab.txt")
    (sources / "extra" / "deep" / "up").symlink_to(sources / "extra")
    assert "linked.txt" in names(request_for())


def test_a_folder_and_a_link_to_it_are_both_packed(request_for: Any, sources: Path) -> None:
    (sources / "extra" / "again").symlink_to("deep")
    found = names(request_for())
    assert {"again/vocab.txt", "deep/vocab.txt"} <= set(found)


def test_a_manifest_among_the_extra_files_is_left_out_with_a_warning(
    request_for: Any, sources: Path, caplog: Any
) -> None:
    (sources / "extra" / "MAR-INF").mkdir()
    (sources / "extra" / "MAR-INF" / "MANIFEST.json").write_text("{}")
    (sources / "extra" / "MAR-INF" / "signature.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        found = names(request_for())
    assert "MAR-INF/MANIFEST.json" not in found
    assert "MAR-INF/signature.json" in found
    assert "Leaving out" in caplog.text


def test_an_earlier_output_in_the_packed_folder_is_not_packed(request_for: Any, sources: Path) -> None:
    (sources / "extra" / "mlp.mar").write_bytes(b"old")
    assert "mlp.mar" not in names(request_for(export_path=sources / "extra"))


def test_an_earlier_folder_in_the_packed_folder_is_not_packed(request_for: Any, sources: Path) -> None:
    request = request_for(export_path=sources / "extra", archive_format="no-archive")
    fresh = names(request)
    (sources / "extra" / "mlp" / "MAR-INF").mkdir(parents=True)
    (sources / "extra" / "mlp" / "service.py").write_text("old")
    assert names(request) == fresh


def test_a_folder_may_be_packed_into_itself(request_for: Any, sources: Path) -> None:
    (sources / "mlp").mkdir()
    (sources / "mlp" / "kept.txt").write_text("")
    given = {"export_path": sources, "archive_format": "no-archive", "extra_files": (sources / "mlp",)}
    assert "kept.txt" in names(request_for(**given))


def test_what_another_run_writes_at_the_time_is_not_packed(request_for: Any, sources: Path) -> None:
    with staged(sources / "extra" / "other.mar") as work:
        work.write_bytes(b"half")
        assert work.name not in names(request_for())


def test_a_link_to_nothing_is_refused_by_its_name(request_for: Any, sources: Path) -> None:
    (sources / "extra" / "old.txt").symlink_to("gone.txt")
    with pytest.raises(PackingError, match=r"extra/old\.txt is a link to gone\.txt, which does not exist"):
        gather(request_for())
