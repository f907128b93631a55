"""TorchServe's `densenet_handler`: answers the tensor of each request with the model's result.

TorchServe unpickles what clients send. Here a tensor is a file of `torch.save`, read with `weights_only`; a
`.npy` file; nested lists of numbers in JSON; or a tensor of the Open Inference Protocol.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchere.archiver.container.zip import DAMAGED, check_zip
from torchere.archiver.errors import ArchiveError
from torchere.archiver.scan.pickles import imported_names
from torchere.handlers.base import BaseHandler, give_up_if_unwanted, tensor_of
from torchere.handlers.encode import encode_answer
from torchere.handlers.errors import PredictionException, bad_request
from torchere.handlers.metrics import timed
from torchere.handlers.rows import fields_of, read_each, refusal, value_of
from torchere.handlers.tensors import TensorError
from torchere.handlers.tensors.npy import is_npy, read_npy

_ZIP = b"PK\x03\x04"
_MAX_ENTRIES = 32  # torch 2.13 writes seven for a tensor
_MAX_PICKLE_BYTES = 4096  # a tensor with 64 dimensions takes about 1,500
# The names in the pickle of a tensor. The unpickler that `weights_only` chooses allows more names, such as
# bytearray, which a pickle can make of any size.
_TENSOR_NAME = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_(parameter|tensor_v[23])"
    r"|torch\.(storage\.)?[A-Za-z0-9]+Storage|torch\.[a-z]+[0-9][a-z0-9_]*"
)
_EXPECTED = "expected a tensor: a file of torch.save or a .npy file as the body, or lists of numbers in JSON"
# Errors of torch's unpickler for a file that is damaged, besides those that `tensor_of_row` catches.
_DAMAGED = (
    *DAMAGED,
    ArchiveError,
    AssertionError,
    AttributeError,
    LookupError,
    pickle.UnpicklingError,
    struct.error,
)


class DenseNetHandler(BaseHandler):
    """Runs the model on the requests' tensors, stacked into a batch where their shapes are equal.

    The answer to a request is its row of the result, with a batch dimension of 1, as `torch.save` writes it.
    A request without a tensor gets its own 400.
    """

    names_classes = False

    @timed
    def preprocess(self, data: Any) -> Any:
        """Stack the requests' tensors. Only explanations call it, so only theirs must have one shape."""
        return torch.stack([tensor_of_row(row) for row in data])

    def _torchere_run(self, data: Any) -> Any:
        if self._is_explain():
            return self.explain_handle(self.preprocess(data), data)
        read = read_each(data, tensor_of_row)
        answers: list[Any] = [None] * len(read)
        for group in _groups(read):
            give_up_if_unwanted(self.context)
            output = self.inference(torch.stack(list(group.values())))
            if len(group) > 1:
                _check_rows(output, len(group))
            for row, place in enumerate(group):
                answers[place] = output if len(group) == 1 else output[row : row + 1]
        for place, tensor in enumerate(read):
            if isinstance(tensor, PredictionException):
                answers[place] = refusal(self.context, place, tensor)
        return answers

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        return self._torchere_profiled(lambda: self._torchere_run(data))


class TorchScriptHandler(DenseNetHandler):
    """The handlers that TorchServe's C++ backend has built in: `TorchScriptHandler` and `BaseHandler`.

    The answer to a request is its row of the result, without the batch dimension, as `torch.save` writes it.
    The model is the TorchScript of the archive.
    """

    def _torchere_run(self, data: Any) -> Any:
        return [
            encode_answer(answer[0]) if isinstance(answer, torch.Tensor) else answer
            for answer in super()._torchere_run(data)
        ]


def _groups(read: Sequence[torch.Tensor | PredictionException]) -> list[dict[int, torch.Tensor]]:
    """Return groups of tensors that can be stacked, each a dict from the place of a request to its tensor."""
    groups: dict[tuple[object, ...], dict[int, torch.Tensor]] = {}
    for place, tensor in enumerate(read):
        if isinstance(tensor, torch.Tensor):
            groups.setdefault((tensor.shape, tensor.dtype), {})[place] = tensor
    return list(groups.values())


def _check_rows(output: Any, count: int) -> None:
    """Raise ValueError if the output can't be cut into rows; the server then runs each request alone."""
    if isinstance(output, torch.Tensor) and output.shape[:1] == (count,):
        return
    kind = f"shape {list(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"
    raise ValueError(
        f"the model gave {kind} for a batch of {count}; expected a tensor with a row for each request. "
        "With batchSize 1 the model may give any result"
    )


def tensor_of_row(row: Any) -> torch.Tensor:
    """Return the tensor of one request.

    Raises:
        PredictionException: 400, the request has no tensor.
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
        raise bad_request(f"The request has no tensor ({err!s:.200}); {_EXPECTED}") from err
    found = fields_of(row) if value is None and isinstance(row, dict) else f"a {type(value).__name__}"
    raise bad_request(f"The request has {found}; {_EXPECTED}")


def _of_file(value: bytes) -> torch.Tensor:
    if is_npy(value):
        return torch.from_numpy(np.array(read_npy(value, "the body")))
    if not value.startswith(_ZIP):
        raise ValueError(f"{len(value)} bytes of another format")
    try:
        size = _checked_record_bytes(value)
        found = torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
    except _DAMAGED as err:
        raise ValueError(f"not a tensor of torch.save: {type(err).__name__}") from err
    if not isinstance(found, torch.Tensor) or found.layout != torch.strided:
        raise ValueError(f"torch.save of a {type(found).__name__}")
    if found.numel() * found.element_size() > size:  # an expanded tensor repeats its elements
        raise ValueError("its shape is larger than its data")
    return found.detach()


def _checked_record_bytes(value: bytes) -> int:
    """Check that a file is the file of one tensor; return the size of its numbers."""
    check_zip(io.BytesIO(value), len(value), _MAX_ENTRIES)  # so that torch's reader finds the same entries
    with zipfile.ZipFile(io.BytesIO(value)) as archive:
        entries = archive.infolist()
        # torch.save does not compress; a deflated entry may expand a thousandfold.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("its entries are compressed")
        pickles = [entry for entry in entries if entry.filename.lower().endswith("/data.pkl")]
        records = [entry for entry in entries if "/data/" in entry.filename.lower()]
        if len(pickles) != 1 or len(records) != 1 or pickles[0].file_size > _MAX_PICKLE_BYTES:
            raise ValueError("torch.save of another value")
        content = archive.read(pickles[0])
    # A pickle can load one record many times, under names that torch treats as the same.
    loads = sum(opcode.name == "BINPERSID" for opcode, _, _ in pickletools.genops(content))
    if loads != 1 or not all(map(_TENSOR_NAME.fullmatch, imported_names(content))):
        raise ValueError("torch.save of another value")
    return records[0].file_size
