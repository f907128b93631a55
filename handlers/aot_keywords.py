"""Exported programs with inputs by keyword, called with all of them in order, as `tensor` does."""

from __future__ import annotations

from typing import Any

import torch

from torchere.archiver.models.load.exported_program import keyword_inputs


def by_position(program: torch.export.ExportedProgram) -> torch.nn.Module:
    """The module of a program; what it takes by keyword it takes by position, too, in the same order."""
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
        """Call the module as it was exported."""
        if not kwargs and len(args) == self._positional + len(self._keywords):
            kwargs = dict(zip(self._keywords, args[self._positional :], strict=True))
            args = args[: self._positional]
        return self.module(*args, **kwargs)
