"""Loads a rank's part of an archive's model, as the section `parallel` of its config says."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import torch

from torchere.archiver.errors import ModelRefused
from torchere.archiver.models.load.names import is_distributed_checkpoint
from torchere.archiver.models.spread import spread
from torchere.archiver.models.spread.s3 import FromS3, open_weights
from torchere.archiver.models.spread.weights import Safetensors, StateDict, Weights, without_weights
from torchere.archiver.split import SECTION, Split
from torchere.handlers.archive_import import ArchiveModules
from torchere.handlers.loading.eager import eager_class, in_eval_mode, load_eager, read_state_dict
from torchere.handlers.loading.weights import WeightsKind, file_to_map, weights_kind


def import_libraries(
    model_dir: str, model: dict[str, Any], config: dict[str, Any], *, may_ask_driver: bool
) -> bool:
    """Import the libraries that the ranks of a Hugging Face folder need, in the process that forks them.

    The import takes 2.5 s of a core (transformers 5.24, for a Llama); so it is done once, not in each rank.

    Args:
        model_dir: the unpacked archive.
        model: the `model` object of the manifest.
        config: the parsed model-config.yaml.
        may_ask_driver: also import the model's own module, whose imports ask torch for GPUs.

    Returns:
        Whether there was something to import. Errors are left to the ranks, which meet them when they load.
    """
    try:
        if weights_kind(model, model_dir, config) is not WeightsKind.HUGGING_FACE:
            return False
    except (RuntimeError, ValueError):
        return False
    with contextlib.suppress(Exception):  # of the libraries, whose imports may raise anything
        importlib.import_module("transformers")
        huggingface = importlib.import_module("torchere.archiver.models.spread.huggingface")
        if may_ask_driver:
            huggingface.model_class(Path(model_dir))
    return True


def load_part(
    archive: ArchiveModules, model_file: str, weights: str | None, split: Split, device: torch.device
) -> torch.nn.Module:
    """Return the model with this rank's part of the weights; call it in all ranks.

    The class constructs the model without weights, and the rank reads its part of the file. The weights are
    loaded whole first if the constructor computes with them, or if the class has its own way to load them.

    Args:
        archive: the archive of the model file.
        model_file: its name, as in the manifest.
        weights: the file of the weights; None: they are in S3, or the archive is a distributed checkpoint, or
            the class makes its own.
        split: the number of ranks, and their division.
        device: where this rank computes.

    Raises:
        RuntimeError, ModelRefused: the model file or the weights are missing, damaged, or of another model.
        ValueError: the model can't be split like this.
    """
    if split.weights:
        return _load_from_s3(archive, model_file, weights, split, device)
    folder = Path(archive.model_dir)
    shards = folder if weights is None and is_distributed_checkpoint(folder) else None
    source = shards or (_opened(weights) if weights else None)
    if source is not None:
        skeleton = _made_without_weights(archive, model_file)
        if skeleton is not None and (isinstance(source, Path) or _is_alike(skeleton, source)):
            return spread(in_eval_mode(skeleton), split, device, source)
    return spread(in_eval_mode(load_eager(archive, model_file, weights)), split, device, shards)


def _load_from_s3(
    archive: ArchiveModules, model_file: str, weights: str | None, split: Split, device: torch.device
) -> torch.nn.Module:
    if weights is not None:
        raise ModelRefused(
            f"the archive has the weights {Path(weights).name}, and {SECTION}.weights names {split.weights}; "
            "leave out one of them"
        )
    skeleton = _made_without_weights(archive, model_file)
    if skeleton is None:
        raise ModelRefused(
            f"the class of {model_file} computes with its weights when it is made, or loads them in its own "
            f"way, and {SECTION}.weights ({split.weights}) needs one that does neither; put the weights into "
            "the archive"
        )
    source = open_weights(split.weights)
    with contextlib.closing(source.objects):
        return spread(in_eval_mode(skeleton), split, device, FromS3(source, skeleton))


def _made_without_weights(archive: ArchiveModules, model_file: str) -> torch.nn.Module | None:
    """Return the model with placeholders for its parameters; None if its class can't do without them."""
    try:
        with without_weights():
            model: torch.nn.Module = eager_class(archive, model_file)()
    except Exception:  # raised by the class; it may work when constructed with weights
        return None
    renames = type(model).load_state_dict is not torch.nn.Module.load_state_dict or any(
        part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks for part in model.modules()
    )
    computed = any(buffer.is_meta for buffer in model.buffers())
    return None if renames or computed else model


def _is_alike(model: torch.nn.Module, weights: Weights) -> bool:
    """Return whether the weights match the model's parameters, so that its class need not load them."""
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    return own == weights.shapes()


def _opened(path: str) -> Weights:
    if path.endswith(".safetensors"):
        return Safetensors(Path(file_to_map(path)))
    return StateDict(lambda: read_state_dict(path), may_be_mapped=True)
