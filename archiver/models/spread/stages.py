"""Pipeline parallelism: each rank runs some layers of a model's list, and sends the next rank their output.

Each rank runs the model's own code, in which the layers of other stages are emptied. The layer just before
the rank's own layers returns the message of the previous stage, and earlier layers return tensors without
content. After the last of its own layers, a rank leaves the model's code by an exception. So nothing is
traced, and inputs may have any shape. Messages are trees of tensors and plain values (`Wire`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from torchere.archiver.split import SECTION

# Micro-batches for each stage. With four, a stage idles for a fifth of the time at most (Huang et al., GPipe,
# 2019).
PARTS_FOR_A_STAGE = 4
_UNFIT = (
    f"{SECTION}: pipeline needs a model that calls the layers of its largest list once each, in their order, "
    "and uses the output of a layer for the next one only; use tensor instead"
)
_PLAIN = (type(None), bool, int, float, str)


class Place(NamedTuple):
    """The list of layers that is spread over the stages, and the index at which each stage begins."""

    name: str
    bounds: list[int]  # one more than there are stages; the last is the number of layers

    def layers(self, model: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module]]:
        """Yield the layers with their numbers."""
        return enumerate(model.get_submodule(self.name).children())


def stage_bounds(model: torch.nn.Module, stages: int) -> Place:
    """Return the list of layers to spread, and the bounds of stages of about equal length.

    The list is the `ModuleList` or `Sequential` with the most weights.

    Raises:
        ValueError: no such list has at least as many layers as there are stages.
    """
    kinds = (torch.nn.ModuleList, torch.nn.Sequential)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kinds) and len(module) >= stages
    ]
    if not lists:
        raise ValueError(
            f"{SECTION}: the model has no list of {stages} layers to make stages of; use tensor instead"
        )
    name, chosen = max(lists, key=lambda each: sum(weight.numel() for weight in each[1].parameters()))
    return Place(name, [round(stage * len(chosen) / stages) for stage in range(stages + 1)])


def cut(model: torch.nn.Module, place: Place, stage: int) -> None:
    """Remove the weights, submodules and hooks of other stages' layers from a model."""
    for number, layer in place.layers(model):
        if not place.bounds[stage] <= number < place.bounds[stage + 1]:
            # The layer itself stays, because a model's code may read settings of its layers.
            for held in (layer._modules, layer._parameters, layer._buffers):
                held.clear()
            layer._forward_pre_hooks.clear()
            layer._forward_hooks.clear()


class _Handed(BaseException):
    """Raised to leave the model's code after the last layer of a stage; no `except Exception` catches it."""


class Stages:
    """Runs a model that was `cut`, in all ranks of a group. Its `forward` replaces that of the model.

    All ranks call it with the same inputs, and get the same result. The model's code before its
    layers runs in each rank.

    Args:
        model: after `cut`.
        place: the result of `stage_bounds` for the whole model.
        group: the ranks, one for each stage.
        device: where this rank computes.
        batched: whether the rows of the inputs are independent, so that they may run in micro-batches.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        place: Place,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        batched: bool,
    ) -> None:
        stage, stages = dist.get_rank(group), dist.get_world_size(group)
        self._is_first, self._is_last = stage == 0, stage == stages - 1
        self._parts = PARTS_FOR_A_STAGE * stages if batched else 1
        self._sending: list[Any] = []
        ranks = dist.get_process_group_ranks(group)

        def link(rank: int) -> Wire:
            return Wire(
                lambda tensor: self._sending.append((dist.isend(tensor, rank, group=group), tensor)),
                lambda tensor: dist.recv(tensor, rank, group=group),
                device,
            )

        self._before = None if self._is_first else link(ranks[stage - 1])
        self._after = None if self._is_last else link(ranks[stage + 1])

        def to_all(tensor: torch.Tensor) -> None:
            dist.broadcast(tensor, ranks[-1], group=group)

        self._result = Wire(to_all, to_all, device)
        self._incoming: Any = None
        self._has_incoming = False  # whether `_incoming` was received in this run
        self._has_begun = False  # whether the layer before this rank's first one has returned
        self._model_forward = model.forward
        for number, layer in place.layers(model):
            self._take_part(layer, number, place.bounds[stage], place.bounds[stage + 1] - 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; with several micro-batches, the stages work on different ones at the same time.

        Raises:
            Exception: the model's error in the rank where it failed, `OtherStageFailed` in all other ranks.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        outputs: list[Any] = []
        failure: Exception | None = None
        for part in _parts_of(leaves, self._parts):
            self._has_incoming, self._has_begun = False, self._is_first
            if failure is not None:  # stages still exchange a message for each part
                self._tell(failure)
                continue
            try:
                some_args, some_kwargs = pytree.tree_unflatten(part, spec)
                outputs.append(self._run(some_args, some_kwargs))
            except Exception as error:
                failure = error
                self._tell(error)
        while self._sending:
            self._sending.pop()[0].wait()
        return self._shared_result(outputs, failure)

    def _run(self, args: Any, kwargs: Any) -> Any:
        try:
            result = self._model_forward(*args, **kwargs)
        except _Handed:
            return None
        except (AttributeError, KeyError) as error:  # the model's code uses a layer that this stage lacks
            raise ValueError(f"{_UNFIT} (here: {type(error).__name__}: {error})") from error
        if not self._is_last or any(_is_hole(leaf) for leaf in pytree.tree_leaves(result)):
            raise ValueError(_UNFIT)
        return result

    def _tell(self, error: Exception) -> None:
        """Receive the previous stage's message for this micro-batch; send the failure to the next stage."""
        if self._before is not None and not self._has_incoming:
            with contextlib.suppress(OtherStageFailed):
                self._before.receive()
        if self._after is not None:
            self._after.send_failure(error)

    def _shared_result(self, outputs: Sequence[Any], failure: Exception | None) -> Any:
        """Return the last stage's result in every rank, or raise the error in every rank."""
        result = None
        try:
            if not self._is_last:
                result = self._result.receive()
            elif failure is None:
                result = _joined(outputs)
                self._result.send(result)
        except Exception as error:  # the other ranks wait for a result or a failure
            failure = failure or error
        if failure is not None:
            if self._is_last:
                self._result.send_failure(failure)
            raise failure
        return result

    def _take_part(self, layer: torch.nn.Module, number: int, first: int, last: int) -> None:
        """Give a layer its role in this stage, whose own layers are `first` to `last`."""
        place: Any = layer
        if number > last:
            place.forward = self._refuse
        elif number < first - 1:
            place.forward = self._skip
        elif number == first - 1:
            place.forward = self._arrive
        else:
            layer.register_forward_pre_hook(self._check)
            if number == last and not self._is_last:
                layer.register_forward_hook(self._hand_on)

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise ValueError(_UNFIT)

    def _skip(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return tensors without content: a model that uses them fails instead of giving wrong outputs."""
        self._receive()
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), self._incoming)

    def _arrive(self, *_args: Any, **_kwargs: Any) -> Any:
        self._receive()
        self._has_begun = True
        return self._incoming

    def _receive(self) -> None:
        if self._has_begun or self._before is None:
            raise ValueError(_UNFIT)
        if not self._has_incoming:
            self._has_incoming = True
            self._incoming = self._before.receive()

    def _check(self, _layer: torch.nn.Module, _args: Any) -> None:
        if not self._has_begun:
            raise ValueError(_UNFIT)

    def _hand_on(self, _layer: torch.nn.Module, _args: Any, output: Any) -> NoReturn:
        if self._after is not None:
            self._after.send(output)
        raise _Handed


def _is_hole(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _parts_of(leaves: Sequence[Any], most: int) -> list[list[Any]]:
    """Split the leaves into micro-batches if all tensors have the same first dimension; else one part."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(rows) != 1 or max(rows) < 2:
        return [list(leaves)]
    count = min(*rows, most)
    split = {id(tensor): tensor.tensor_split(count) for tensor in tensors}
    return [[split[id(leaf)][at] if id(leaf) in split else leaf for leaf in leaves] for at in range(count)]


def _joined(outputs: Sequence[Any]) -> Any:
    """Join the outputs of the micro-batches; raise ValueError for a tensor without dimensions."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(output) for output in outputs]
    joined = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        if isinstance(column[0], torch.Tensor) and not column[0].dim():
            raise ValueError(f"{SECTION}: a pipeline returns tensors with the batch as first dimension")
        joined.append(torch.cat(column) if isinstance(column[0], torch.Tensor) else column[0])
    return pytree.tree_unflatten(joined, flat[0][1])


# Trees of tensors are sent between ranks: from one stage to the next, and the result to all ranks.


@dataclass(frozen=True)
class _Form:
    """The shape and dtype of a tensor, in place of the tensor in a tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class OtherStageFailed(RuntimeError):
    """Another stage has failed; the text contains its error."""


class Wire:
    """A one-way channel between ranks. Each message is a number, and the content that it announces.

    A positive number is the size in bytes of the tree's structure, which the tree's tensors follow. 0 means
    that the tensors follow at once, with the structure of the previous message. A negative number is minus
    the size of an error text.

    Args:
        put: sends a tensor, or starts to send it.
        get: receives into a tensor.
        device: where the backend wants tensors.
    """

    def __init__(
        self,
        put: Callable[[torch.Tensor], object],
        get: Callable[[torch.Tensor], object],
        device: torch.device,
    ) -> None:
        self._put, self._get, self._device = put, get, device
        self._last: tuple[Any, list[Any]] | None = None  # structure and leaves of the previous message

    def send(self, tree: Any) -> None:
        """Send a tree of tensors and plain values.

        Raises:
            Exception: the tree can't be sent, for example because of a leaf's type; nothing was sent.
        """
        leaves, spec = pytree.tree_flatten(tree)
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise ValueError(
                    f"{SECTION}: a {type(leaf).__name__} can't be sent from one stage to the next"
                )
        form = (spec, [_Form(tuple(leaf.shape), leaf.dtype) if _is_tensor(leaf) else leaf for leaf in leaves])
        # Steps that may fail come before the first `put`.
        tensors = [leaf.to(self._device).contiguous() for leaf in filter(_is_tensor, leaves)]
        if form == self._last:
            self._announce(0)
        else:
            told = json.dumps([pytree.treespec_dumps(spec), list(map(_told, form[1]))]).encode()
            self._last = form
            self._put_bytes(told, 1)
        for tensor in tensors:
            self._put(tensor)

    def send_failure(self, error: Exception) -> None:
        """Send the text of an error in place of a tree."""
        self._put_bytes(f"{type(error).__name__}: {error}".encode(), -1)

    def receive(self) -> Any:
        """Receive a tree.

        Raises:
            OtherStageFailed: the sender has failed.
        """
        number = torch.empty(1, dtype=torch.int64, device=self._device)
        self._get(number)
        if size := int(number):
            content = torch.empty(abs(size), dtype=torch.uint8, device=self._device)
            self._get(content)
            data = content.cpu().numpy().tobytes()
            if size < 0:
                raise OtherStageFailed(f"in another stage of the pipeline: {data.decode()}")
            spec, forms = json.loads(data)
            self._last = (pytree.treespec_loads(spec), list(map(_form_of, forms)))
        if self._last is None:
            raise OtherStageFailed("another stage of the pipeline is out of step")
        spec, forms = self._last
        return pytree.tree_unflatten([self._taken(form) for form in forms], spec)

    def _taken(self, form: Any) -> Any:
        if not isinstance(form, _Form):
            return form
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        self._get(tensor)
        return tensor

    def _announce(self, number: int) -> None:
        self._put(torch.tensor([number], dtype=torch.int64, device=self._device))

    def _put_bytes(self, data: bytes, sign: int) -> None:
        self._announce(sign * len(data))
        self._put(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device))


def _told(form: Any) -> Any:
    """Return a `_Form` as JSON values, other leaves unchanged.

    A pickle would let one machine run code on another.
    """
    return [list(form.shape), str(form.dtype).removeprefix("torch.")] if isinstance(form, _Form) else form


def _form_of(told: Any) -> Any:
    return _Form(tuple(told[0]), getattr(torch, told[1])) if isinstance(told, list) else told


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
