"""Call a compiled library like the original model. The first run tests it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchere.handlers.aot_abi import AbiMismatch, CompiledLibrary, first_run, official_runner
from torchere.handlers.errors import PredictionException

logger = logging.getLogger(__name__)

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class AotModel:
    """A compiled model, called like the module that was compiled.

    Thread-safe: several runs proceed at the same time, without the GIL. The first run is repeated by torch's
    own binding and the results are compared, because the C ABI is private: when they differ, the binding is
    used from then on, one run at a time, and a warning is logged.

    Args:
        path: the `.so`; it must exist until the first run is over.
        runs_at_once: see `CompiledLibrary`.
        check_inputs: whether the code may be told to check shapes and types, see `Package.checkable`.

    Raises:
        AbiMismatch, RuntimeError: see `CompiledLibrary`.
    """

    def __init__(self, path: str, runs_at_once: int, *, check_inputs: bool = False) -> None:
        self._path = path
        self._check_inputs = check_inputs
        self._library = CompiledLibrary(path, runs_at_once)
        given, results = self._library.call_spec()
        self._keywords = _keywords(given)
        self._out_spec = pytree.treespec_loads(results)
        if self._out_spec.num_leaves != self._library.outputs:
            raise AbiMismatch(
                f"{path} names {self._out_spec.num_leaves} results, not {self._library.outputs}"
            )
        self._first_run = threading.Lock()  # held while the first run is repeated and compared
        self._tested: Run | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the arguments of the compiled module.

        Arguments that are not tensors are ignored: their values were fixed at compilation.

        Raises:
            PredictionException: 400, a tensor has no elements.
            ValueError: the keywords, or the number of tensors, are not those of the module.
            RuntimeError: the run failed, or the code checks its inputs and a shape or type is wrong.
        """
        tensors = self._tensors(args, kwargs)
        _refuse_empty(tensors)
        results = self._tested(tensors) if self._tested is not None else self._run_first(tensors)
        return pytree.tree_unflatten(results, self._out_spec)

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        expected = self._keywords
        if set(kwargs) != set(expected):
            raise ValueError(f"the compiled model takes the keywords {expected}, and got {list(kwargs)}")
        leaves = pytree.tree_leaves((args, {key: kwargs[key] for key in expected}))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _run_first(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._first_run, first_run(self._check_inputs):
            if self._tested is not None:  # another thread was faster
                return self._tested(tensors)
            copies = [tensor.clone() for tensor in tensors]  # a model may write into its inputs
            results = self._library.run(tensors)
            official = official_runner(self._path)
            expected: list[torch.Tensor] = official.run(copies)
            if _same(results, expected):
                self._tested = self._library.run
                return results
            logger.warning(
                "%s gives other results by the C ABI of torch %s than by torch's binding, which is used "
                "from now on; it runs one batch at a time: set isolation: process in model-config.yaml",
                self._path,
                torch.__version__,
            )
            self._tested = official.run
            return expected


def _refuse_empty(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors without elements.

    Compiled code assumes that a free dimension is 1 or more, and divides by it: a 0 would end the process.

    Raises:
        PredictionException: 400, a tensor has no elements.
    """
    for index, tensor in enumerate(tensors):
        if not tensor.numel():
            raise PredictionException(
                f"input {index} of the compiled model: found the shape {list(tensor.shape)}, expected at "
                "least one element; leave out requests without rows",
                400,
            )


def _same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether two runs gave the same results, up to rounding: threads may sum in another order."""
    return len(results) == len(expected) and all(
        one.shape == other.shape
        and one.dtype == other.dtype
        and (torch.equal(one, other) or _close(one, other))
        for one, other in zip(results, expected, strict=True)
    )


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    counts = one.is_floating_point() or one.is_complex()
    return counts and torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


def _keywords(spec: str) -> list[str]:
    """Return the keywords of a serialised input spec, in the order of their tensors.

    The spec is that of `(args, kwargs)`. It is read as JSON (torch/utils/_pytree.py, protocol 1), because the
    accessors of the object differ between the versions of torch.
    """
    _, pair = json.loads(spec)
    keywords: list[str] = json.loads(pair["children_spec"][1]["context"])
    return keywords
