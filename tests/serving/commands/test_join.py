"""The arguments of `torchere join`."""

import os
from pathlib import Path

import pytest

from torchere.serving.commands.cli import main
from torchere.serving.commands.join import address_of
from torchere.serving.commands.serve_options import LaunchRefused


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("leader", ("leader", 29400)),
        ("leader:1234", ("leader", 1234)),
        ("10.0.0.1:1234", ("10.0.0.1", 1234)),
        ("[fd00::1]:1234", ("fd00::1", 1234)),
        ("[fd00::1]", ("fd00::1", 29400)),
        ("fd00::1", ("fd00::1", 29400)),
    ],
)
def test_the_leader_is_a_host_with_a_port_or_without(text: str, address: tuple[str, int]) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["", ":1234", "leader:", "leader:0", "leader:99999", "leader:http"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(LaunchRefused, match="expected HOST or HOST:PORT"):
        address_of(text)


def test_other_machines_are_joined_with_a_secret_and_a_store_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")  # else the command sets it in this process
    before = dict(os.environ)
    assert main(["join", "leader.example"]) == 1
    assert "expected a directory of archives" in capsys.readouterr().out
    assert main(["join", "leader.example", "--model-store", "."]) == 1
    assert "rendezvous_secret_file" in capsys.readouterr().err
    assert os.environ == before  # a variable that stays is inherited by processes that a handler starts
