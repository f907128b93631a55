"""The Dockerfile and what goes with it."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from torchere.serving.configuration import configure
from torchere.serving.properties import read_properties


@pytest.fixture(scope="module")
def dockerfile(root: Path) -> str:
    return (root / "deploy/Dockerfile").read_text()


def copied(dockerfile: str) -> list[str]:
    """The sources of every COPY from the build context."""
    lines = re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE)
    return [word for line in lines for word in line.split()[:-1] if not word.startswith("--")]


def test_what_it_copies_is_there_and_let_through(root: Path, dockerfile: str) -> None:
    ignored = (root / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    let_through = [line[1:] for line in ignored if line.startswith("!")]

    sources = copied(dockerfile)

    assert len(sources) > 5
    assert [name for name in sources if not (root / name).exists()] == []
    assert [name for name in sources if not any(fnmatch.fnmatch(name, each) for each in let_through)] == []


def test_the_bundled_configuration_has_neither_errors_nor_warnings_and_the_exposed_ports(
    root: Path, dockerfile: str
) -> None:
    configuration = configure(read_properties(root / "deploy/config.properties"))

    assert configuration.of_level("error") + configuration.of_level("warning") == ()
    settings = configuration.settings
    addresses = (settings.inference_address, settings.management_address, settings.metrics_address,
                 settings.grpc_inference_address, settings.grpc_management_address)  # fmt: skip
    exposed = re.search(r"^EXPOSE (.*)$", dockerfile, re.MULTILINE)
    assert exposed
    assert [str(address.port) for address in addresses if address] == exposed.group(1).split()


def test_it_runs_as_nobody_in_particular_and_is_asked_how_it_is(dockerfile: str) -> None:
    last_stage = dockerfile.rpartition("\nFROM ")[2]

    assert "\nUSER 1000:1000\n" in last_stage
    assert "HEALTHCHECK" in last_stage
    assert "8080/livez" in last_stage
    assert 'CMD ["serve"]' in last_stage


def test_hadolint_has_nothing_to_say(root: Path, tool: Callable[[str], str]) -> None:
    checked = subprocess.run(
        [tool("hadolint"), root / "deploy/Dockerfile"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (checked.returncode, checked.stdout) == (0, "")


def test_shellcheck_has_nothing_to_say(root: Path, tool: Callable[[str], str]) -> None:
    scripts = sorted((root / "deploy").glob("*.sh"))

    checked = subprocess.run(
        [tool("shellcheck"), *scripts], check=False, capture_output=True, text=True, timeout=60
    )

    assert len(scripts) == 2
    assert (checked.returncode, checked.stdout) == (0, "")


def test_systemd_accepts_the_unit(root: Path, tool: Callable[[str], str], tmp_path: Path) -> None:
    unit = (root / "deploy/systemd/torchere.service").read_text()
    # The program is not installed where the unit says, and systemd would look.
    (tmp_path / "torchere.service").write_text(unit.replace("/opt/torchere/bin/torchere", "/bin/true"))

    checked = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", tmp_path / "torchere.service"],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert "torchere.service" not in checked.stdout + checked.stderr
    stop_s = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    settings = configure(read_properties(root / "deploy/config.properties")).settings
    assert stop_s and int(stop_s.group(1)) > settings.drain_delay_s + settings.drain_timeout_s
