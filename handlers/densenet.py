"""The handler of TorchServe's `densenet_handler`: a tensor for each request, and the model's result of it.

TorchServe unpickles what clients send. Here a tensor is a file of `torch.save`, read with `weights_only`; a
`.npy` file; nested lists of numbers in JSON; or a tensor of the Open Inference Protocol.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchere.handlers.base import BaseHandler, tensor_of
from torchere.handlers.encode import encode_answer
from torchere.handlers.errors import PredictionException
from torchere.handlers.rows import fields_of, read_each, refusal, value_of
from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.npy import is_npy, read_npy

_ZIP = b"PK\x03\x04"
_EXPECTED = "expected a tensor: a file of torch.save or a .npy file as the body, or lists of numbers in JSON"


class DenseNetHandler(BaseHandler):
    """Runs the model on the requests' tensors, stacked to a batch where their shapes are equal.

    A request is answered with its row of the result, as a tensor of a batch of one: `torch.save` writes it. A
    request without a tensor gets its own 400.
    """

    names_classes = False

    def _run(self, data: Sequence[Any]) -> list[Any]:
        read = read_each(data, tensor_of_row)
        answers: list[Any] = [None] * len(read)
        for group in _groups(read):
            self._give_up_if_unwanted()
            output = self.inference(torch.stack(list(group.values())))
            for row, place in enumerate(group):
                answers[place] = output if len(group) == 1 else output[row : row + 1]
        for place, tensor in enumerate(read):
            if isinstance(tensor, PredictionException):
                answers[place] = refusal(self.context, place, tensor)
        return answers


class TorchScriptHandler(DenseNetHandler):
    """The handlers that TorchServe's C++ backend has built in: `TorchScriptHandler` and `BaseHandler`.

    A request is answered with its row of the result, without the dimension of the batch, as `torch.save`
    writes it. The model is the TorchScript of the archive.
    """

    def _run(self, data: Sequence[Any]) -> list[Any]:
        return [
            encode_answer(answer[0]) if isinstance(answer, torch.Tensor) else answer
            for answer in super()._run(data)
        ]


def _groups(read: Sequence[torch.Tensor | PredictionException]) -> list[dict[int, torch.Tensor]]:
    """Return the tensors that can be stacked, by their places, group by group."""
    groups: dict[tuple[object, ...], dict[int, torch.Tensor]] = {}
    for place, tensor in enumerate(read):
        if isinstance(tensor, torch.Tensor):
            groups.setdefault((tensor.shape, tensor.dtype), {})[place] = tensor
    return list(groups.values())


def tensor_of_row(row: Any) -> torch.Tensor:
    """Return the tensor of one request.

    Raises:
        PredictionException: 400, it has none.
    """
    value = value_of(row)
    if isinstance(value, torch.Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.require(value, requirements="W"))
        if isinstance(value, list):
            return tensor_of(value)
        if isinstance(value, (bytes, bytearray)):
            return _of_file(bytes(value))
    except (TensorError, TypeError, ValueError, RuntimeError, RecursionError) as err:
        raise PredictionException(f"The request has no tensor ({err!s:.200}); {_EXPECTED}", 400) from err
    found = fields_of(row) if value is None and isinstance(row, dict) else f"a {type(value).__name__}"
    raise PredictionException(f"The request has {found}; {_EXPECTED}", 400)


def _of_file(value: bytes) -> torch.Tensor:
    if is_npy(value):
        return torch.from_numpy(np.array(read_npy(value, "the body")))
    if not value.startswith(_ZIP):
        raise ValueError(f"{len(value)} bytes of another format")
    try:
        with zipfile.ZipFile(io.BytesIO(value)) as archive:
            # torch.save stores; a deflated entry may become a thousand times as large.
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its entries are compressed")
        found = torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, NotImplementedError, pickle.UnpicklingError, EOFError, LookupError) as err:
        raise ValueError(f"not a tensor of torch.save: {type(err).__name__}") from err
    if not isinstance(found, torch.Tensor) or found.layout != torch.strided:
        raise ValueError(f"torch.save of a {type(found).__name__}")
    if found.numel() * found.element_size() > len(value):  # an expanded tensor repeats its elements
        raise ValueError("its shape is larger than its data")
    return found.detach()
