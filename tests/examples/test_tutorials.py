"""The tutorials of docs/, run block by block: each heading begins in an empty folder, as their readers do."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from servers import RunningServer, follow, free_ports

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ("quickstart.md", "handlers.md", "grpc.md")
NEEDS = {
    "Hugging Face": ("transformers",),
    "ONNX": ("onnxscript", "onnxruntime"),
    "A client": ("grpc_tools",),
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Part(NamedTuple):
    """One heading with its blocks: their languages and texts."""

    heading: str
    blocks: list[tuple[str, str]]


def parts() -> Iterator[Part]:
    """Yield the headings that have something to run."""
    for name in TUTORIALS:
        for section in re.split(r"^## ", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            blocks = [(found[1], found[2]) for found in BLOCK.finditer(text)]
            if any(language == "sh" for language, _ in blocks):
                yield Part(heading, blocks)


class Reader:
    """Pastes blocks: into one shell after the other, and servers into a terminal of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = folder.parent / "where"
        self.ports = dict(zip(("8080", "7070"), free_ports(2), strict=True))
        self.servers: list[RunningServer] = []
        self.environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "XDG_CACHE_HOME": str(folder.parent / "cache"),
            "TS_CONFIG_FILE": str(folder.parent / "config.properties"),
        }
        (folder.parent / "config.properties").write_text(
            f"inference_address=http://127.0.0.1:{self.ports['8080']}\n"
            f"grpc_inference_port={self.ports['7070']}\n"
            "management_address=http://127.0.0.1:0\nmetrics_address=http://127.0.0.1:0\n"
            "grpc_management_port=0\ndefault_workers_per_model=1\n"
        )

    def paste(self, block: str) -> str:
        """Run a block, and return what it prints; one that serves goes on until `close`."""
        for documented, port in self.ports.items():
            block = block.replace(f"127.0.0.1:{documented}", f"127.0.0.1:{port}")
        if block.startswith("torchere serve "):
            return self._serve(block)
        script = f"set -euo pipefail\n{block}\npwd > '{self.place}'"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        self.folder = Path(self.place.read_text().strip())  # a block may change it
        return done.stdout

    def _serve(self, block: str) -> str:
        with (self.folder / "server.log").open("w") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {block}"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.servers.append(RunningServer(process, self.folder))
        follow(self.servers[-1], " is ready")
        return ""

    def close(self) -> None:
        for server in self.servers:
            server.stop()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "empty").mkdir()
    made = Reader(tmp_path / "empty")
    yield made
    made.close()


@pytest.mark.parametrize("part", list(parts()), ids=lambda part: part.heading)
def test_each_block_of_a_tutorial_does_what_it_says(part: Part, reader: Reader) -> None:
    for package in next((names for start, names in NEEDS.items() if part.heading.startswith(start)), ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    printed = ""
    for language, block in part.blocks:
        if language == "sh":
            printed = reader.paste(block)
        elif language == "text":
            assert printed.strip() == block.strip()
