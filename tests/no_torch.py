"""A server process that can't import torch: the environment for one, and the record of attempts."""

from __future__ import annotations

from pathlib import Path

# In `sitecustomize`, which each Python process imports at its start; workers and the fork server have other
# command lines. Looking for torch is allowed, which imports nothing.
_FORBIDDEN = """
import sys, traceback
from importlib.machinery import PathFinder


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "torch":
            return None
        spec = PathFinder.find_spec(name, path)
        spec.loader = self
        return spec

    def create_module(self, spec):
        with open({record!r}, "a") as record:
            traceback.print_stack(file=record)
        raise ImportError("the server process imported torch")

    def exec_module(self, module):
        pass


if "serve" in sys.orig_argv and "torchere.serving" in sys.orig_argv:
    sys.meta_path.insert(0, NoTorch())
"""


class NoTorch:
    """Forbids servers that start with `environment` to import torch; workers may.

    Args:
        folder: gets the hook, and the stack of each attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._record = folder / "imports"
        (folder / "sitecustomize.py").write_text(_FORBIDDEN.format(record=str(self._record)))
        self.environment = {"PYTHONPATH": str(folder)}

    @property
    def attempts(self) -> str:
        """The stacks of all attempts to import torch; empty without one."""
        return self._record.read_text() if self._record.exists() else ""
