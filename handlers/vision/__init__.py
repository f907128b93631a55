"""Base class of the image handlers: decodes images from requests and explains predictions."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchere.handlers.base import BaseHandler
from torchere.handlers.context import Context
from torchere.handlers.errors import bad_request
from torchere.handlers.loading.devices import to_device
from torchere.handlers.metrics import timed
from torchere.handlers.rows import block_of, fields_of, known_block_of, rows_of, value_of, wrong_setting
from torchere.handlers.tensors import shown
from torchere.handlers.vision.decode import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_DECODED_BYTES,
    DEFAULT_MAX_PIXELS,
    ImageLimits,
    decode_image,
    picture_of_tensor,
)
from torchere.handlers.vision.transform import ImageTransform

logger = logging.getLogger(__name__)

_SETTINGS = ("resize", "crop", "mean", "std", "max_pixels", "max_bytes", "max_decoded_bytes", "top_k")


class VisionHandler(BaseHandler):
    """Base class of the handlers that take images.

    A subclass sets `image_processing`, any callable from a PIL image to a float tensor; the tensors of a
    batch must have one size. `handler.image` in model-config.yaml changes the default transform (`resize`,
    `crop`, `mean`, `std`) and the limits (`max_pixels`, `max_bytes`, `max_decoded_bytes`).
    """

    image_processing: Callable[[Image.Image], Any] = ImageTransform()
    image_limits = ImageLimits()

    def _torchere_configure(self, context: Context) -> None:
        """Apply `handler.image` and the server's `limit_max_image_pixels`."""
        super()._torchere_configure(context)
        # Only of the built-in handlers: subclasses may have keys of their own there, and this class itself
        # prepares pictures for handlers of others while an archive is packed.
        if type(self).__module__.startswith(f"{__name__}."):
            _check_config(self.model_yaml_config)
        config = self._torchere_image_config()
        limited = bool(context.system_properties.get("limit_max_image_pixels", True))
        if not limited:
            Image.MAX_IMAGE_PIXELS = None  # process-wide; `image_limits` guards the other models
        most = {
            "max_pixels": DEFAULT_MAX_PIXELS if limited else None,
            "max_bytes": DEFAULT_MAX_BYTES,
            "max_decoded_bytes": DEFAULT_MAX_DECODED_BYTES if limited else None,
        }
        self.image_limits = ImageLimits(**{key: _limit(key, config.get(key, most[key])) for key in most})
        if isinstance(self.image_processing, ImageTransform):
            self.image_processing = replace(
                self.image_processing.replaced_by(config),
                max_decoded_bytes=self.image_limits.max_decoded_bytes,
            )

    def _torchere_image_config(self) -> dict[str, Any]:
        """Return the block `handler.image` of model-config.yaml, or an empty dict."""
        image = block_of(self.model_yaml_config, "image")
        return image if isinstance(image, dict) else {}

    @timed
    def preprocess(self, data: Any) -> Any:
        """Stack the images of a batch.

        Each row has under `data` or `body` the bytes of an image file, the same in base64 (`str`), or nested
        lists of numbers in the form of the model's input. Tensors of the Open Inference Protocol may have
        any name; `_EXPECTED` in `decode.py` lists the accepted shapes and datatypes.

        Returns:
            A float tensor on the handler's device, first dimension the batch.

        Raises:
            PredictionException: 400, a row has no valid image, or the images differ in shape.
        """
        return self._torchere_stack([self._torchere_tensor(row) for row in rows_of(data)])

    def _torchere_stack(self, images: list[torch.Tensor]) -> Any:
        """Stack the tensors of a batch on the handler's device; raise a 400 error if their shapes differ."""
        shapes = {tuple(image.shape) for image in images}
        if len(shapes) > 1:
            raise bad_request(
                f"The requests of one batch have inputs of different shapes: {sorted(shapes)}; expected one. "
                "Serve this model with batchSize 1, or send inputs of one size"
            )
        return to_device(torch.stack(images), self.device)

    def _torchere_tensor(self, row: Any) -> torch.Tensor:
        value = value_of(row)
        if isinstance(value, (np.ndarray, torch.Tensor)):
            value = picture_of_tensor(value, self.image_limits)
            if isinstance(value, torch.Tensor):
                return value
        elif isinstance(value, (bytes, bytearray, str)):
            value = decode_image(value, self.image_limits)
        if isinstance(value, Image.Image):
            tensor: torch.Tensor = self.image_processing(value)
            return tensor
        if value is None:
            found = fields_of(row) if isinstance(row, dict) else shown(row)
            raise bad_request(
                f"The request has no image: found {found}; expected 'data' or 'body' with the "
                "bytes of an image file (curl -T cat.jpg URL, or curl -F data=@cat.jpg URL)"
            )
        return _numbers(value)

    @cached_property
    def ig(self) -> Any:
        """Return captum's `IntegratedGradients` of the model, for subclasses that explain predictions.

        Raises:
            ImportError: captum is not installed.
        """
        return importlib.import_module("captum.attr").IntegratedGradients(self.model)

    def get_insights(self, tensor_data: torch.Tensor, _: Any, target: Any = 0) -> Any:
        """Return the attribution of each input element to the score of class `target`, as nested lists.

        Raises:
            PredictionException: 400, the model has no such class.
        """
        return integrated_gradients(self.model, tensor_data, _class_index(target)).tolist()


def _check_config(config: Mapping[str, Any]) -> None:
    """Refuse unknown keys of `handler.image`; warn of a block with a similar name, which is not used."""
    known_block_of(config, "image", _SETTINGS)
    handler = config.get("handler")
    names = [name for name in handler if isinstance(name, str)] if isinstance(handler, Mapping) else []
    for name in get_close_matches("image", names, cutoff=0.8):
        if name != "image":
            logger.warning("handler.%s in model-config.yaml is not used; did you mean handler.image?", name)


def _class_index(target: Any) -> Any:
    """Return the target of an explanation, parsed if it is bytes or text, as from a form."""
    if not isinstance(target, (bytes, bytearray, str)):
        return target
    try:
        return int(target)
    except ValueError as err:
        text = target if isinstance(target, str) else target.decode(errors="replace")
        raise bad_request(f"The target is {shown(text)}; expected the number of a class, from 0 on") from err


def _limit(key: str, value: Any) -> Any:
    # YAML parses 1e8, without a decimal point, as a string.
    if value is not None and (type(value) not in (int, float) or not value > 0):
        raise wrong_setting(f"image.{key}", value, "a number above 0, or null")
    return value


def _numbers(value: object) -> torch.Tensor:
    try:
        if isinstance(value, int):  # torch takes it as a size, and returns uninitialised memory
            raise TypeError("a number alone is no input")
        numbers = torch.FloatTensor(value)
        if not numbers.numel():
            raise ValueError("it is empty")
        return numbers
    except (TypeError, ValueError, RuntimeError, OverflowError) as err:
        raise bad_request(
            f"The request has {_kind(value, err)}; expected the bytes of an image file, base64 text, or "
            "nested lists of numbers in the shape of the model's input"
        ) from err


def _kind(value: object, err: Exception) -> str:
    if isinstance(value, dict):
        enveloped = "instances" in value or "inputs" in value
        found = f"a JSON object with {fields_of(value)}, and no image"
        return f"{found} (service_envelope in config.properties unwraps it)" if enveloped else found
    why = f" ({err})" if isinstance(value, list) else ""  # torch's error tells what is wrong with a list
    return f"a {type(value).__name__} that is not an image{why}"


def _classes(target: Any, rows: int, count: int) -> list[int]:
    """Return the class index of each row, or one for all rows; refuse an index that is out of range.

    On a GPU such an index would end the process's access to the GPU.
    """
    found = target.tolist() if isinstance(target, (np.ndarray, np.generic, torch.Tensor)) else target
    classes = list(found) if isinstance(found, (list, tuple)) else [found]
    known = all(type(number) is int and -count <= number < count for number in classes)
    if not known or len(classes) not in {1, rows}:
        raise bad_request(f"The target is {shown(target)}; expected the number of a class, 0 to {count - 1}")
    return classes


def integrated_gradients(
    model: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, target: Any = 0, n_steps: int = 15
) -> torch.Tensor:
    """Return how much each input element adds to the score of `target`, against an all-zero input.

    The integral along the straight line from zero is taken by Gauss-Legendre quadrature, as captum does by
    default. Parameters of the model get no gradients, so it may be shared between threads.

    Args:
        model: gives [batch, classes], differentiable in its input.
        inputs: [batch, ...], float.
        target: index of the class, or a list with one per element of the batch.
        n_steps: points on the line; TorchServe takes 15.

    Returns:
        A tensor of the shape of `inputs`.

    Raises:
        PredictionException: 400, the model has no class `target`.
    """
    nodes, weights = np.polynomial.legendre.leggauss(n_steps)
    total = torch.zeros_like(inputs)
    for node, weight in zip(nodes, weights, strict=True):
        # Nodes and weights are for -1 ... 1; the line is 0 ... 1.
        point = (inputs.detach() * ((1.0 + node) / 2.0)).requires_grad_()
        with torch.enable_grad():
            scores = model(point)
            classes = torch.tensor(_classes(target, *scores.shape[:2]), device=scores.device)
            picked = scores[torch.arange(len(inputs), device=scores.device), classes].sum()
        (gradient,) = torch.autograd.grad(picked, point)
        total += gradient * (weight / 2.0)
    return total * inputs
