"""What is written of a convicted request, and that it is never too much."""

import asyncio
import base64
import json
import logging
import resource
import stat
from pathlib import Path

import pytest

from torchere.serving.batching.quarantine import Conviction
from torchere.serving.batching.quarantine_files import SUFFIX, QuarantineFiles, save
from torchere.serving.batching.request import Request
from torchere.serving.config.server_settings import QuarantineSettings
from torchere.serving.types import ModelKey, Parameter

KEY = ModelKey("net", "1.0")


def conviction(content: bytes = b"\x00poison", digest: str = "d" * 32) -> Conviction:
    headers = (("Content-Type", "image/jpeg"), ("Authorization", "Bearer secret"), ("X-Api-Key", "secret"))
    request = Request("id-1", 0.0)
    request.parameters, request.headers = (Parameter("body", content, "image/jpeg"),), headers
    return Conviction(request, digest, ("exited with code 7", "killed by signal 11 (SIGSEGV)"))


def test_a_saved_request_can_be_replayed_and_holds_no_secret(tmp_path: Path) -> None:
    path = save(KEY, conviction(), QuarantineSettings(tmp_path / "q"))
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    saved = json.loads(path.read_text())
    assert base64.b64decode(saved["parameters"][0]["base64"]) == b"\x00poison"
    assert saved["headers"] == [["Content-Type", "image/jpeg"]]
    assert "secret" not in path.read_text()
    assert (saved["model"], saved["causes"]) == (
        "net",
        ["exited with code 7", "killed by signal 11 (SIGSEGV)"],
    )


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    settings = QuarantineSettings(tmp_path, max_files=3)
    written = [save(KEY, conviction(digest=f"{number:032}"), settings) for number in range(5)]
    assert sorted(tmp_path.iterdir()) == written[2:]


def test_what_was_saved_just_now_stays_beside_files_from_a_clock_that_was_ahead(tmp_path: Path) -> None:
    settings = QuarantineSettings(tmp_path, max_files=2)
    for year in (2098, 2099):
        (tmp_path / f"{year}0101T000000000000-net-{'d' * 12}{SUFFIX}").write_text("{}")
    path = save(KEY, conviction(), settings)
    assert path is not None
    assert [file.name[:4] for file in sorted(tmp_path.iterdir())] == [path.name[:4], "2099"]


def test_the_oldest_go_when_they_are_too_large(tmp_path: Path) -> None:
    settings = QuarantineSettings(tmp_path, max_bytes=3000)
    for number in range(5):
        save(KEY, conviction(b"x" * 500, f"{number:032}"), settings)
    left = list(tmp_path.iterdir())
    assert 0 < sum(file.stat().st_size for file in left) <= 3000
    assert len(left) == 2


def test_a_request_over_the_bound_is_not_saved(tmp_path: Path) -> None:
    assert save(KEY, conviction(b"x" * 500), QuarantineSettings(tmp_path, max_bytes=400)) is None
    assert list(tmp_path.iterdir()) == []


def test_what_fits_on_the_disk_in_part_only_is_not_left_behind(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(KEY, conviction(b"x" * 500), QuarantineSettings(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_the_copy_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    async def main() -> None:
        files = QuarantineFiles(KEY, QuarantineSettings(tmp_path / "file" / "q"))
        files(conviction())
        await asyncio.gather(*files._writing)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "request id-1 is quarantined" in caplog.text
    assert "can't be saved" in caplog.text
