"""The arguments of the image, as TorchServe's image takes them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SERVE = [
    "--foreground",
    "--start",
    "--ts-config",
    "/home/model-server/config.properties",
    "--disable-token-auth",
]


@pytest.fixture
def enter(root: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the script with a `torchserve` that tells how it was called, an argument a line."""
    fake = tmp_path / "torchserve"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def run(*arguments: str) -> list[str]:
        done = subprocess.run(
            [root / "deploy/entrypoint.sh", *arguments],
            capture_output=True, text=True, env=environment, timeout=30, cwd=tmp_path, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("arguments", [(), ("serve",)])
def test_by_default_it_serves_the_bundled_configuration(
    enter: Callable[..., list[str]], arguments: tuple[str, ...]
) -> None:
    assert enter(*arguments) == SERVE


def test_options_behind_serve_are_added(enter: Callable[..., list[str]]) -> None:
    assert enter("serve", "--models", "all") == [*SERVE, "--models", "all"]


def test_a_torchserve_command_stays_in_the_foreground(enter: Callable[..., list[str]]) -> None:
    command = ("torchserve", "--start", "--model-store", "/m", "--models", "all")

    assert enter(*command) == ["--foreground", *command[1:]]


def test_a_command_in_one_word_is_taken_apart(enter: Callable[..., list[str]]) -> None:
    one = "torchserve --start --model-store /m --models *.mar"

    assert enter(one) == ["--foreground", "--start", "--model-store", "/m", "--models", "*.mar"]


def test_a_shell_command_in_one_word_is_run_by_the_shell(enter: Callable[..., list[str]]) -> None:
    assert enter("torchserve --start; echo then") == ["--start", "then"]


@pytest.mark.parametrize("flag", ["--foreground", "--stop", "--version", "-v", "--help"])
def test_what_ends_by_itself_or_is_in_the_foreground_is_left_alone(
    enter: Callable[..., list[str]], flag: str
) -> None:
    assert enter("torchserve", flag) == [flag]


def test_anything_else_is_run_as_it_is(enter: Callable[..., list[str]]) -> None:
    assert enter("echo", "a  b", "serve") == ["a  b serve"]


def test_the_exit_status_is_that_of_the_command(root: Path) -> None:
    assert subprocess.run([root / "deploy/entrypoint.sh", "sh", "-c", "exit 7"], check=False).returncode == 7
