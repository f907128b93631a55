"""Pass the keyword inputs of an exported program by position, as the `tensor` handler does."""

from __future__ import annotations

from typing import Any

import torch

from torchere.archiver.models.load.exported_program import keyword_inputs


def by_position(program: torch.export.ExportedProgram) -> torch.nn.Module:
    """Return the module of a program; its keyword inputs can also be passed by position, in order."""
    module = program.module()
    positional, keywords = keyword_inputs(program)
    return _ByPosition(module, positional, keywords) if keywords else module


class _ByPosition(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, positional: int, keywords: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._positional = positional
        self._keywords = keywords

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as it was exported, with the last positional arguments passed by keyword."""
        if not kwargs and len(args) == self._positional + len(self._keywords):
            kwargs = dict(zip(self._keywords, args[self._positional :], strict=True))
            args = args[: self._positional]
        return self.module(*args, **kwargs)
