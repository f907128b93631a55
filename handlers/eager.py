"""Eager models: a class from the archive's model file, and a state dict for it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from torchere.handlers.archive_import import ArchiveModules
from torchere.handlers.resolve import list_classes_from_module


def load_eager(
    archive: ArchiveModules, model_file: str, model_pt_path: str | None, device: torch.device | str
) -> torch.nn.Module:
    """Construct the one class of the model file and fill it with its weights.

    Args:
        archive: whose file it is.
        model_file: its name, as in the manifest.
        model_pt_path: the state dict; None leaves the weights as the class makes them.
        device: where the weights are read to.

    Raises:
        RuntimeError: the model file is missing, or the weights are no plain state dict.
        ValueError: the file does not define exactly one class.
    """
    file = Path(archive.model_dir, model_file)
    if not file.is_file():
        raise RuntimeError(
            f"Missing the model.py file: the manifest names {model_file}, and the archive holds no such file"
        )
    classes = list_classes_from_module(archive.load(file.stem))
    if len(classes) != 1:
        raise ValueError(
            f"Expected only one class as model definition. {classes}: {model_file} must define the model's "
            "class and no other; import helpers from a file beside it"
        )
    model: torch.nn.Module = classes[0]()
    if model_pt_path:
        model.load_state_dict(_load_state_dict(model_pt_path, device))
    return model


def _load_state_dict(path: str, device: torch.device | str) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as err:
        raise RuntimeError(
            f"{path} holds more than tensors, and is not loaded because unpickling it could run any code "
            f"({str(err).splitlines()[0]}); save the weights alone: torch.save(model.state_dict(), ...)"
        ) from err
    if not isinstance(state, dict):
        raise RuntimeError(
            f"{path} holds a {type(state).__name__}; expected a state_dict: "
            "torch.save(model.state_dict(), ...)"
        )
    return state
