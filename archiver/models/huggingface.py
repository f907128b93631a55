"""Model folders of Hugging Face: config.json and safetensors, made into a module by transformers.

Nothing is fetched and no Python in the folder is run. transformers is not needed to serve the result.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.dynamic import Tensors
from torchere.archiver.models.steps import refusing

_LENGTH = 8  # tokens of the example that is made when none is given
_TEXT = "input_ids"


def is_model_folder(path: Path) -> bool:
    """Whether the folder is one: it has a `config.json`."""
    return (path / "config.json").is_file()


def module_from_folder(path: Path) -> torch.nn.Module:
    """The model, taking its inputs by position and returning a dict of tensors.

    Raises:
        ModelRefused: transformers is not installed, the architecture is unknown or in the folder's own
            Python, or the weights are a pickle, or some are missing.
    """
    architecture = _architecture(path)
    if importlib.util.find_spec("transformers") is None:
        raise ModelRefused(
            f"{path} is a Hugging Face model folder, which needs transformers, and it is not installed; "
            "install torchere[huggingface]"
        )
    if not any(path.glob("*.safetensors")):
        raise ModelRefused(f"{path}: no *.safetensors in it; save the model with safe_serialization=True")
    transformers: Any = importlib.import_module("transformers")
    known = getattr(transformers, architecture, None)
    if not (isinstance(known, type) and issubclass(known, torch.nn.Module)):
        raise ModelRefused(
            f"{path}: this transformers ({transformers.__version__}) has no model {architecture}; "
            "install one that has; Python in the folder is not run"
        )
    model = _loaded(known, path)
    main = str(getattr(model, "main_input_name", _TEXT))
    return _TextModel(model.eval()) if main == _TEXT else _OneInputModel(model.eval(), main)


def _loaded(known: Any, path: Path) -> Any:
    options = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    with refusing(f"{path}: loading {known.__name__}"):
        model, found = known.from_pretrained(str(path), output_loading_info=True, **options)
        missing = sorted(found["missing_keys"])
    if missing:  # transformers makes up random numbers for them
        raise ModelRefused(
            f"{path}: it lacks {len(missing)} of the weights of {known.__name__}, {missing[0]} for one; get "
            "the whole folder, or name in config.json the architecture that its weights are of"
        )
    return model


def example_for(module: torch.nn.Module) -> Tensors | None:
    """An example for a text model, or None for one whose inputs are not known here."""
    if not isinstance(module, _TextModel):
        return None
    ids = torch.arange(2 * _LENGTH).reshape(2, _LENGTH) % 50 + 1
    return ids, torch.ones_like(ids)


def _tensors_of(output: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What of an output is a tensor; caches of keys and values are not."""
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


class _TextModel(torch.nn.Module):
    """Takes ids of tokens and a mask by position."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return _tensors_of(self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True))


class _OneInputModel(torch.nn.Module):
    """Takes the architecture's main input, pixels or sound, by position."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return _tensors_of(self.model(**{self.name: inputs}, return_dict=True))


def _architecture(path: Path) -> str:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        names = config["architectures"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelRefused(f"{path}/config.json names no architectures ({error!r})") from error
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).isidentifier():
        raise ModelRefused(f"{path}/config.json has the architectures {ascii(names)[:80]}; expected one name")
    return str(names[0])
