"""The record that the steps of the pipeline hand on: a model that runs, and an example to run it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from torchere.archiver.signature import Signature


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on the CPU, with what it takes and gives.

    `module` is called with the tensors of `example` as positional arguments, and with others of the same
    signature. Not shared between threads.
    """

    module: torch.nn.Module  # a torch.jit.ScriptModule is one, too
    example: tuple[torch.Tensor, ...]  # on the CPU, one tensor per input; first dimension the batch, if any
    signature: Signature  # derived from running the example
    kind: str  # what the source was: "eager", "state dict", "TorchScript", "ExportedProgram", ...
    source: Path  # the file or folder it came from, for messages
