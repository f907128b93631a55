"""Checkouts that can be served: this one, a folder with an environment, or a commit that gets both."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.errors import Failed
from harness.paths import RESULTS, ROOT

_ROOMS = ("archiver", "client", "handlers", "serving")
_MADE = RESULTS / "trees"  # one git worktree a commit


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout of torchere and the Python that serves it."""

    folder: Path
    python: Path

    @property
    def program(self) -> str:
        """The path of its `torchere` command."""
        return str(self.python.with_name("torchere"))

    @property
    def commit(self) -> str:
        """Its commit in short, with "-dirty" when files were changed; "unknown" outside git."""
        return _git("describe", "--always", "--dirty", folder=self.folder) or "unknown"


CHECKOUT = Tree(ROOT, Path(sys.executable))


def tree(name: str) -> Tree:
    """The tree of a folder that has a `.venv`, or of a commit: a git worktree with its own environment.

    Raises:
        Failed: it is neither, or the environment can't be built.
    """
    folder = Path(name).resolve()
    if not folder.is_dir():
        folder = _worktree(name)
    if folder == ROOT:
        return CHECKOUT
    python = folder / ".venv" / "bin" / "python"
    if not python.with_name("torchere").exists():
        raise Failed(f"{folder} has no .venv/bin/torchere; run `make install` there")
    return Tree(folder, python)


@cache
def compile_tree(served: Tree) -> None:
    """Write the bytecode that pip writes as it installs: without it each start compiles every module."""
    rooms = [str(served.folder / room) for room in _ROOMS if (served.folder / room).exists()]
    subprocess.run([str(served.python), "-m", "compileall", "-q", *rooms], check=True)


def _worktree(name: str) -> Path:
    commit = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", folder=ROOT)
    if not commit:
        raise Failed(f"found {name!r}, expected a commit of this repository or a folder with a .venv")
    folder = _MADE / commit[:12]
    try:
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            _run("git", "worktree", "add", "--detach", str(folder), commit, folder=ROOT)
        if not (folder / ".venv" / "bin" / "torchere").exists():
            print(f"building the environment of {folder} (a minute or two)", flush=True)
            _run("make", "install", f"PYTHON={Path(sys.executable).resolve()}", folder=folder)
    except subprocess.CalledProcessError as err:
        raise Failed(f"{' '.join(err.cmd)} failed in {folder}: {str(err.stderr).strip()[-500:]}") from err
    return folder


def _run(*command: str, folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


def _git(*arguments: str, folder: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
