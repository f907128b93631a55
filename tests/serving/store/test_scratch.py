"""What is swept and what is left alone; the servers that were killed are real processes."""

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchere.serving.config.server_settings import Limits
from torchere.serving.errors import ServingError
from torchere.serving.store.package import Store
from torchere.serving.store.scratch import (
    ClaimedFolder,
    lock,
    machine,
    remove_tree,
    sweep_folders,
    sweep_parts,
)

CLAIMS = """
import sys
from pathlib import Path
from torchere.serving.store.scratch import ClaimedFolder
folder = ClaimedFolder(Path(sys.argv[1]))
(folder.path / "weights").write_bytes(b"x")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_server_is_swept_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIMS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        folder = Path(server.stdout.readline().strip())
        assert sweep_folders(tmp_path) == []
        assert (folder / "weights").exists()
        server.kill()
    assert sweep_folders(tmp_path) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_nobody_claimed_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "torchere-models-unclaimed").mkdir()
    (tmp_path / "something else").mkdir()
    assert sweep_folders(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / ".claim").touch()
    (tmp_path / "torchere-models-link").symlink_to(target)
    assert sweep_folders(tmp_path) == []
    assert target.exists()


def test_a_released_folder_is_gone(tmp_path: Path) -> None:
    folder = ClaimedFolder(tmp_path)
    assert folder.path.is_dir()
    folder.release()
    assert list(tmp_path.iterdir()) == []


def test_what_ages_temporary_files_finds_the_folder_of_a_living_server_locked(tmp_path: Path) -> None:
    # systemd-tmpfiles asks each folder for an exclusive lock, without waiting, before it looks into it.
    folder = ClaimedFolder(tmp_path)
    itself = os.open(folder.path, os.O_RDONLY)
    assert not lock(itself)
    folder.release()
    assert lock(itself)
    os.close(itself)


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd-tmpfiles is not installed")
def test_systemd_leaves_the_folder_of_a_living_server_alone(tmp_path: Path) -> None:
    parent = tmp_path / "tmp"
    parent.mkdir()
    folder = ClaimedFolder(parent)
    (folder.path / "weights").write_bytes(b"x")
    (parent / "other").mkdir()
    rule = tmp_path / "tmp.conf"
    rule.write_text(f"d {parent} - - - 1us\n")
    subprocess.run(["systemd-tmpfiles", "--clean", rule], check=True, timeout=60)
    assert [path.name for path in parent.iterdir()] == [folder.path.name]
    assert (folder.path / "weights").exists()
    folder.release()


def test_a_part_of_a_download_is_swept_once_it_is_old_and_nobody_holds_it(tmp_path: Path) -> None:
    old, held, fresh = (tmp_path / f".download-{name}" for name in ("old", "held", "fresh"))
    for part in (old, held, fresh):
        part.write_bytes(b"half")
    for part in (old, held):
        os.utime(part, (time.time() - 700,) * 2)
    (tmp_path / "model.mar").touch()
    with held.open("rb") as holder:
        assert lock(holder)
        assert sweep_parts(tmp_path, ".download-", idle_s=600.0) == [old]
    assert fresh.exists()
    assert held.exists()


@pytest.mark.skipif(machine() == "-", reason="this system does not tell its boots apart")
def test_a_part_of_this_machine_is_swept_as_soon_as_no_server_holds_it(tmp_path: Path) -> None:
    lost, held, new = (tmp_path / f".download-{machine()}{name}" for name in ("lost", "held", "new"))
    for part, age_s in ((lost, 10), (held, 10), (new, 0)):
        part.write_bytes(b"half")
        os.utime(part, (time.time() - age_s,) * 2)
    with held.open("rb") as holder:
        assert lock(holder)
        assert sweep_parts(tmp_path, ".download-", idle_s=600.0) == [lost]
    assert held.exists() and new.exists()


def test_so_is_one_that_was_written_before_the_clock_was_put_back(tmp_path: Path) -> None:
    ahead, hardly = (tmp_path / f".download-{name}" for name in ("ahead", "hardly"))
    for part, ahead_s in ((ahead, 12 * 365 * 86400), (hardly, 60)):
        part.write_bytes(b"half")
        os.utime(part, (time.time() + ahead_s,) * 2)
    assert sweep_parts(tmp_path, ".download-", idle_s=600.0) == [ahead]
    assert hardly.exists()


def test_a_store_sweeps_both_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, temp = tmp_path / "store", tmp_path / "temp"
    for folder in (root, temp, temp / "torchere-models-old"):
        folder.mkdir()
    (temp / "torchere-models-old" / ".claim").touch()
    part = root / ".download-x"
    part.touch()
    os.utime(part, (0.0, 0.0))
    store = Store(root, Limits(), temp)
    store.sweep()
    store.close()
    assert list(root.iterdir()) == []
    assert list(temp.iterdir()) == []
    assert "torchere-models-old" in caplog.text


def test_without_a_place_for_the_folder_it_is_said_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ServingError) as caught:
        ClaimedFolder(tmp_path / "nowhere")
    assert "No such file or directory" in caught.value.detail
    assert "set TEMP, or TMPDIR" in caught.value.detail


def test_a_folder_that_can_not_be_claimed_is_not_left_behind(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # folders can still be made, and no file
    try:
        with pytest.raises(ServingError):
            ClaimedFolder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_nested_thousands_deep_are_deleted(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (tmp_path / "kept").write_text("kept")
    (top / "link").symlink_to(tmp_path)
    below = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("a", dir_fd=below)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=below))
        deeper = os.open("a", os.O_RDONLY, dir_fd=below)
        os.close(below)
        below = deeper
    os.close(below)
    remove_tree(top)
    assert not top.exists()
    assert (tmp_path / "kept").read_text() == "kept"
