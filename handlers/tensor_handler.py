"""The built-in handler `tensor`: runs a model whose inputs and outputs `signature.json` describes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from torchere.archiver.models.inputs.buffers import unchanged_buffers
from torchere.archiver.models.inputs.run import run_of_session
from torchere.archiver.models.load.exported_program import ServedProgram
from torchere.archiver.models.steps import line_of
from torchere.archiver.signature import ANY, SIGNATURE_NAME, Signature, read_signature
from torchere.archiver.split import Split
from torchere.handlers.base import BaseHandler, refusal_of
from torchere.handlers.context import Context
from torchere.handlers.errors import bad_request
from torchere.handlers.loading.compile import Autocast
from torchere.handlers.loading.devices import CPU, to_device, without_gradients
from torchere.handlers.loading.torchscript import changes_itself
from torchere.handlers.metrics import timed
from torchere.handlers.rows import came_as_tensors, first_row, refusal
from torchere.handlers.tensors import DATATYPES, TensorError, torch_dtype
from torchere.handlers.tensors.npy import NPY_TYPE, write_npy
from torchere.handlers.tensors.request import (
    Example,
    Group,
    Member,
    array_of,
    check_results,
    example_of,
    flattened,
    grouped,
    layout_of,
    tensors_of,
    whole_group,
)

logger = logging.getLogger(__name__)


_ACCEPT = "accept"
_KEEPS_STATE = "not warmed up, as the model may keep state, which the warm-up would change"


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, equal_nan=True)


class Batch(NamedTuple):
    """A batch between two stages: `examples[i]` is the example of request i, or its error."""

    examples: list[Example | TensorError]
    groups: list[Group]
    results: tuple[list[torch.Tensor], ...] = ()  # one list for each group, on the CPU


class TensorHandler(BaseHandler):
    """Runs the archive's model on the request's tensors, named as in `signature.json`.

    Accepts the formats that `tensors/request.py` lists, and answers in the matching format: a list, or an
    object with one list for each output; a `.npy` file for `Accept: application/x-npy`; tensors for the Open
    Inference Protocol. Requests of a batch run through the model together where their shapes allow it. An
    invalid request gets its own 400; the other requests of the batch are answered normally.
    """

    reads_envelopes = True  # it parses KServe's formats itself, so no envelope is removed before it
    borrows_tensors = True  # its tensors may be views of the request's memory; it copies read-only ones
    names_classes = False

    def __init__(self) -> None:
        super().__init__()
        self.signature = Signature((), ())
        self.layout = layout_of(self.signature)
        self.output_names: tuple[str, ...] = ()

    def initialize(self, context: Context) -> None:
        """Read the signature and load the model.

        Raises:
            RuntimeError: the archive has no signature, or one with BYTES among its inputs; or its weights
                can't be loaded.
            SignatureError: the signature is wrong.
        """
        signature = read_signature(context.system_properties["model_dir"])
        if signature is None:
            raise RuntimeError(
                f"the handler 'tensor' needs {SIGNATURE_NAME} in the archive, and there is none; add it, or "
                "name another handler"
            )
        texts = [spec.name for spec in signature.inputs if spec.datatype == "BYTES"]
        if texts:
            raise RuntimeError(
                f"{SIGNATURE_NAME}: the input {texts[0]!r} is BYTES, which no model takes; expected numbers. "
                "Texts need a handler of their own"
            )
        self.signature, self.layout = signature, layout_of(signature)
        self.output_names = tuple(spec.name for spec in signature.outputs)
        super().initialize(context)
        if not callable(self.model):
            self.model = run_of_session(self.model)
            self.device = CPU  # its inputs are CPU tensors on any execution provider

    def _torchere_load_part(self, split: Split, *given: Any) -> Any:
        # A pipeline splits inputs of equal first sizes into rows, but this model's inputs may have no rows.
        batched = split.batched and self.signature.batched
        return super()._torchere_load_part(replace(split, batched=batched), *given)

    def _torchere_load_folder_part(self, model_dir: str, split: Split) -> Any:
        from torchere.archiver.models.load.huggingface import Loaded  # noqa: PLC0415 - few models need it

        model = super()._torchere_load_folder_part(model_dir, split)
        return Loaded(model, {}).module([spec.name for spec in self.signature.inputs])

    def warmup_data(self) -> list[dict[str, object]] | None:
        """Return one row of zeros, or of ones if the model rejects zeros (as for lengths and masks).

        None if a shape is not fixed, if an integer input is on a GPU (after an index out of range the process
        can't use the GPU any more), if the model keeps state from one run to the next, or if it rejects both
        rows, which does not prove that the model is faulty.
        """
        if self._may_keep_state():
            logger.info(_KEEPS_STATE)
            return None
        shapes = [spec.shape[1:] if spec.batched else spec.shape for spec in self.signature.inputs]
        whole_numbers = any(spec.datatype.startswith(("INT", "UINT")) for spec in self.signature.inputs)
        trips = whole_numbers and self.map_location in ("cuda", "xpu", "hpu")
        if trips or any(ANY in shape for shape in shapes):
            return None
        for number in (0, 1):
            row: dict[str, object] = {}
            for spec, shape in zip(self.signature.inputs, shapes, strict=True):
                dtype = DATATYPES[spec.datatype]
                sizes = (1, *shape) if spec.batched else shape
                row[spec.name] = (
                    torch.full(sizes, number, dtype=torch_dtype(dtype))
                    if dtype.numpy is None
                    else np.full(sizes, number, dtype.numpy)
                )
            found, is_steady = self._tried(row)
            if found is None and is_steady:
                return [row]
            if found is None:
                logger.info(_KEEPS_STATE)
                return None
            cause = line_of(found, -1)  # the line where TorchScript puts the cause
        logger.warning("not warmed up, as the model takes neither zeros nor ones: %s", cause)
        return None

    def _may_keep_state(self) -> bool:
        """Return whether the model's format shows that it keeps state; `_tried` checks eager models."""
        model = self._plain_model()
        if isinstance(model, torch.jit.ScriptModule):
            return changes_itself(model)
        return isinstance(model, ServedProgram) and model.keeps_state

    def _plain_model(self) -> Any:
        return self.model.wrapped if isinstance(self.model, Autocast) else self.model

    def _tried(self, row: dict[str, object]) -> tuple[Exception | None, bool]:
        """Run the model on a row; return its error, and whether an eager model answers a second run alike.

        The buffers of an eager model are restored.
        """
        (group,) = self._groups([example_of(row, self.layout, lambda _: "")])
        answers: list[Any] = []

        def run() -> None:
            with without_gradients(self.device), torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                inputs = (to_device(tensor.clone(), self.device) for tensor in group.inputs)
                answers.append([tensor.clone() for tensor in flattened(self.model(*inputs))])

        model = self._plain_model()
        is_known = isinstance(model, (torch.jit.ScriptModule, ServedProgram))  # `_may_keep_state` has decided
        if is_known or not isinstance(model, torch.nn.Module):
            return refusal_of(run), True
        with unchanged_buffers(model):
            refusal = refusal_of(run) or refusal_of(run)
        return refusal, refusal is not None or all(map(_are_equal, *answers))

    def describe_handle(self) -> Any:
        """Return the signature as parsed JSON."""
        return json.loads(self.signature.to_json())

    @timed
    def preprocess(self, data: Any) -> Any:
        """Turn the rows of a batch into groups of tensors on the CPU."""
        examples: list[Example | TensorError] = []
        for index, row in enumerate(data):
            try:
                examples.append(example_of(row, self.layout, partial(self._content_type, index)))
            except TensorError as err:
                examples.append(err)
        group = self._all_at_once(examples)
        return Batch(examples, [group] if group else self._groups(examples))

    def _all_at_once(self, examples: Sequence[Example | TensorError]) -> Group | None:
        """Return all rows as one group if each is a single list and all have the same shape, else None."""
        if not self.layout.batched or not all(isinstance(e, Example) and e.single for e in examples):
            return None
        if self.layout.most_rows is not None and len(examples) > self.layout.most_rows:
            return None
        columns = list(zip(*(example.values for example in examples), strict=True))  # type: ignore[union-attr]
        if not all(type(value) is list for column in columns for value in column):
            return None
        try:
            whole = Example(tuple(map(list, columns)), single=False)
            inputs = tensors_of(whole, self.layout)
        except TensorError:  # `_groups` finds the request with the error
            return None
        return whole_group(inputs)

    def _groups(self, examples: list[Example | TensorError]) -> list[Group]:
        tensors = []
        for place, example in enumerate(examples):
            if isinstance(example, TensorError):
                continue
            try:
                tensors.append((place, tensors_of(example, self.layout)))
            except TensorError as err:
                examples[place] = err
        return grouped(tensors, self.layout.batched, self.layout.most_rows)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run each group through the model."""
        results = []
        with without_gradients(self.device):
            for group in data.groups:
                result = self._result(group)
                # A model may return its own buffer, which the run of the next group overwrites.
                is_kept = group is not data.groups[-1]
                results.append([tensor.to("cpu", copy=is_kept).resolve_neg() for tensor in result])
        return data._replace(results=tuple(results))

    def _result(self, group: Group) -> list[torch.Tensor]:
        try:
            result = flattened(self.model(*(to_device(tensor, self.device) for tensor in group.inputs)))
            check_results(result, group, self.signature)
        except Exception as err:
            for name, tensor in zip(self.layout.names, group.inputs, strict=True):
                if not tensor.numel():  # not refused earlier, because most models take empty inputs
                    found, expected = f"the shape {list(tensor.shape)}", "an element: the model fails without"
                    raise bad_request(str(TensorError(name, found, expected))) from err
            raise
        return result

    @timed
    def postprocess(self, data: Any) -> Any:
        """Return an answer for each request, in the format that the request asks for."""
        answers: list[Any] = [None] * len(data.examples)
        for group, results in zip(data.groups, data.results, strict=True):
            self._answer_group(answers, data.examples, group, results)
        for place, example in enumerate(data.examples):
            if isinstance(example, TensorError):
                answers[place] = refusal(self.context, place, bad_request(str(example)))
        return answers

    def _answer_group(
        self, answers: list[Any], examples: list[Any], group: Group, results: list[torch.Tensor]
    ) -> None:
        lists: list[Any] | None = None
        # Slicing NumPy arrays takes a third of the time of slicing torch tensors; they share their memory.
        arrays = [array_of(result) for result in results]
        for member in group.members:
            part = slice(member.start, member.start + member.rows) if self.layout.batched else ...
            form = self._form(member.place)
            if form == "lists":
                lists = lists or [result.tolist() for result in results]
                answers[member.place] = self._lists(lists, part, member, examples[member.place])
            elif form == "npy":
                answers[member.place] = self._npy(results, part, member.place, examples[member.place])
            else:
                answers[member.place] = {
                    name: array[part] for name, array in zip(self.output_names, arrays, strict=True)
                }

    def _lists(self, lists: list[Any], part: Any, member: Member, example: Example) -> Any:
        if part is ...:
            values = lists
        elif example.single:
            values = [items[member.start] for items in lists]
        else:
            values = [items[part] for items in lists]
        names = self.output_names
        if not example.instances:
            return values[0] if len(values) == 1 else dict(zip(names, values, strict=True))
        if len(values) == 1:
            return {"predictions": values[0]}
        return {"predictions": [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]}

    def _npy(self, results: list[torch.Tensor], part: Any, place: int, example: Example) -> Any:
        if len(results) > 1:
            text = f"Accept: found {NPY_TYPE}, expected JSON: the model has {len(results)} outputs"
            return refusal(self.context, place, bad_request(text))
        result = results[0][part]
        result = array_of(result.float() if result.dtype is torch.bfloat16 else result)
        self.context.set_response_content_type(first_row.get() + place, NPY_TYPE)
        return write_npy(result[0] if example.single else result)

    def _content_type(self, row: int, name: str) -> str:
        """Return the content type of one value of a request; "" if the client named none."""
        described = self.context.get_request_header(first_row.get() + row, name)
        return str(described.get("content-type", "")) if isinstance(described, dict) else ""

    def _form(self, row: int) -> str:
        """Return the answer format that a request asks for: "tensors", "npy" or "lists"."""
        if came_as_tensors(self.context, row):
            return "tensors"
        headers = self.context.get_all_request_header(first_row.get() + row)
        accepts = [
            value for name, value in headers.items() if len(name) == len(_ACCEPT) and name.lower() == _ACCEPT
        ]
        return "npy" if accepts and NPY_TYPE in str(accepts[-1]) else "lists"
