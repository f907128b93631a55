"""The command line of `benchmarks/run.py`."""

import runpy
import sys
from pathlib import Path

import pytest

RUN = str(Path(__file__).resolve().parents[2] / "benchmarks" / "run.py")


def run(*arguments: str) -> int:
    """The script's exit status."""
    before = sys.argv
    sys.argv = [RUN, *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(RUN, run_name="__main__")
    finally:
        sys.argv = before
    return int(ended.value.code or 0)


def test_the_list_shows_every_row_and_its_contenders(capsys):
    assert run("--list") == 0
    shown = capsys.readouterr().out
    assert "tiny_mlp" in shown
    ours_and_torchserve = "torchere, torchserve, torchere, batch size 1, torchserve, batch size 1"
    assert f"{ours_and_torchserve}, echo, mosec, mosec, orjson, litserve, triton" in shown
    assert len(shown.splitlines()) >= 8


def test_peers_that_are_not_asked_for_are_left_out(capsys):
    assert run("--list", "--only", "tiny_mlp,grpc", "--peers", "mosec") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["tiny_mlp", "grpc"]
    assert shown[0].endswith("torchere, torchere, batch size 1, echo, mosec, mosec, orjson")
    assert shown[1].endswith("torchere, grpc.aio echo")


def test_an_unknown_row_is_refused_with_those_there_are(capsys):
    assert run("--only", "tiny") == 2
    assert "found 'tiny', expected tiny_mlp, custom_handler" in capsys.readouterr().err
