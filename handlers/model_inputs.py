"""Turn the body of a request into the arguments of the model with the handler's code, without the model.

Packing calibrates and compares a model on samples. A picture among them must be decoded, cropped and
normalised exactly as the handler does it for a request, so the handler's `preprocess` does it here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.handlers.errors import HandlerLoadError, PredictionException
from torchere.handlers.resolve import class_of
from torchere.handlers.rows import block_of
from torchere.handlers.ts_compat.alias import __version__
from torchere.handlers.vision import VisionHandler

ModelInputs = Callable[[bytes], tuple[torch.Tensor, ...]]
_INSTEAD = "give what the model takes, as .npy or .pt"


class InputError(ValueError):
    """A body can't be turned into the model's inputs; `str(error)` is one line with the remedy."""


def model_inputs(handler: str, folder: Path | None, config: Mapping[str, Any]) -> ModelInputs | None:
    """Return a function from the bytes of a request's body to the arguments of the model, a batch of one.

    Return None if the handler prepares nothing, as it takes tensors (`tensor`), numbers (`base_handler`),
    texts or sounds; for these two it runs the model several times. The function raises InputError.

    Args:
        handler: as in the manifest: a built-in name, or a file in `folder`, whose code is run.
        folder: the unpacked archive, or the folder of the handler's file; None for a built-in handler.
        config: the parsed model-config.yaml. `handler.image` in it prepares pictures for any handler that
            has no `preprocess` of its own.

    Raises:
        InputError: the handler can't be imported or constructed, or its settings are wrong.
    """
    image = block_of(config, "image")
    if not isinstance(image, (Mapping, type(None))):
        raise InputError(f"handler.image in model-config.yaml is {image!r}; expected a mapping")
    try:
        cls = class_of(handler, str(folder) if folder else None)
    except HandlerLoadError as err:
        raise InputError(str(err)) from err
    if cls is None:
        return _refusing(f"the function of the handler {handler} can't be run without its model; {_INSTEAD}")
    is_ours = cls.__module__.startswith("torchere.handlers.")
    if getattr(cls, "preprocess", None) in (None, BaseHandler.preprocess) or (
        is_ours and not issubclass(cls, VisionHandler)
    ):
        if image is None:
            return None
        cls = VisionHandler
    return _prepared_by(handler, _configured(handler, cls, config))


def _configured(handler: str, cls: type, config: Mapping[str, Any]) -> Any:
    context = Context(
        model_name="",
        model_dir="",
        manifest=None,
        gpu=None,
        batch_size=1,
        mms_version=__version__,
        model_yaml_config=dict(config),
    )
    try:
        instance: Any = cls()
        if isinstance(instance, BaseHandler):
            instance._torchere_configure(context)
    # Broad, because the class may be the archive's own and raise anything.
    except Exception as err:
        raise InputError(f"the handler {handler}: {err}") from err
    return instance


def _prepared_by(handler: str, instance: Any) -> ModelInputs:
    def inputs(body: bytes) -> tuple[torch.Tensor, ...]:
        try:
            found = instance.preprocess([{"body": bytearray(body)}])
        except PredictionException as err:
            raise InputError(err.message) from err
        # Broad, as above. A handler that loads its vocabulary in `initialize` fails here.
        except Exception as err:
            raise InputError(
                f"the handler {handler} can't prepare it without its model ({type(err).__name__}: {err}); "
                f"{_INSTEAD}"
            ) from err
        tensors = (found,) if isinstance(found, torch.Tensor) else found
        if isinstance(tensors, Mapping):
            tensors = tuple(tensors.values())
        if not isinstance(tensors, (tuple, list)) or not all(isinstance(x, torch.Tensor) for x in tensors):
            raise InputError(
                f"the handler {handler} prepares a {type(found).__name__}; expected tensors: {_INSTEAD}"
            )
        return tuple(tensor.detach().cpu() for tensor in tensors)

    return inputs


def _refusing(text: str) -> ModelInputs:
    def inputs(_body: bytes) -> tuple[torch.Tensor, ...]:
        raise InputError(text)

    return inputs
