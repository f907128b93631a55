"""Names in checkpoints: of files in a folder, of state dicts in a file, and of tensors in a message."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torchere.archiver.errors import ModelRefused

INDEX_NAME = ".metadata"  # the index of a torch.distributed.checkpoint
# Keys under which training scripts save a state dict, in the order in which they are tried. `checkpoint.py`
# tries other keys after these: a running average of the weights, for example.
WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "model_state",
    "net",
    "network",
    "params",
    "weights",
)


def is_distributed_checkpoint(path: Path) -> bool:
    """Return whether the folder is a distributed checkpoint: it has a `.metadata`."""
    return (path / INDEX_NAME).is_file()


def names_there(names: Sequence[str], there: Collection[str], path: Path | str) -> dict[str, str]:
    """Map each given name to its name in a checkpoint, where all may have one prefix (such as `model.`).

    Raises:
        ModelRefused: the checkpoint lacks some names; `path` is its name in the error.
    """
    for key in ("", *WRAPPERS):
        found = {name: f"{key}.{name}" if key else name for name in names}
        if all(name in there for name in found.values()):
            return found
    missing = [name for name in names if name not in there]
    raise ModelRefused(f"{path}: the checkpoint has no {some(missing)}; it has {some(sorted(there))}")


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names in one line, with the number of the others."""
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
