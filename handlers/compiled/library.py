"""AOTInductor's C ABI by ctypes: the only module that uses its private symbols.

torch's own binding holds the GIL while a model runs, so that no other Python thread of the process runs.
ctypes releases it around each call. Sources: `torch/csrc/inductor/aoti_runtime/interface.h` for the
functions of a compiled library, `torch/_C/_aoti.pyi` for tensors as handles.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchere.handlers.compiled.package import HANDLE_FUNCTIONS, InputRule, stride_of
from torchere.handlers.errors import bad_request

_REQUIRED = (
    "AOTInductorModelContainerCreateWithDevice",
    "AOTInductorModelContainerDelete",
    "AOTInductorModelContainerGetCallSpec",
    "AOTInductorModelContainerGetNumInputs",
    "AOTInductorModelContainerGetNumOutputs",
    "AOTInductorModelContainerRun",
)

_CHECK_VARIABLE = "AOTI_RUNTIME_CHECK_INPUTS"

# Guards the construction and the first run of a library, which set up static state.
_CONSTRUCTION_LOCK = threading.Lock()

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class AbiMismatch(RuntimeError):
    """The library or this torch lacks a required function; torch's own binding may still work."""


class CompiledLibrary:
    """A model compiled for the CPU, run through its C ABI. Thread-safe.

    Up to `runs_at_once` threads run it concurrently on one copy of its constants, without the GIL; further
    threads wait, also without the GIL. The library is closed when the object is garbage-collected.

    Args:
        path: the `.so`; the file may be deleted once this has returned.
        runs_at_once: how many instances of the model to keep.

    Raises:
        AbiMismatch: the library or this torch lacks a required function.
        RuntimeError: the library can't be opened, or could not construct its model.
    """

    def __init__(self, path: str, runs_at_once: int) -> None:
        if not available():
            raise AbiMismatch(f"torch {torch.__version__} does not give out tensors as handles")
        with _CONSTRUCTION_LOCK:
            self._library = _opened(path)
            self._container = ctypes.c_void_p()
            create = self._library.AOTInductorModelContainerCreateWithDevice
            status = create(ctypes.byref(self._container), ctypes.c_size_t(runs_at_once), b"cpu", None)
            if status:
                text = self._last_error()
                _close(self._library)
                raise RuntimeError(f"the compiled model could not be constructed: {text}")
        end = weakref.finalize(self, _delete, self._library, self._container)
        end.atexit = False  # threads may still run the library when the process exits
        self._run = self._library.AOTInductorModelContainerRun
        self.inputs = self._count("AOTInductorModelContainerGetNumInputs")
        self.outputs = self._count("AOTInductorModelContainerGetNumOutputs")

    def call_spec(self) -> tuple[str, str]:
        """Return two serialised pytree specs: how arguments and results are built from tensors."""
        first, second = ctypes.c_char_p(), ctypes.c_char_p()
        get = self._library.AOTInductorModelContainerGetCallSpec
        self._check(get(self._container, ctypes.byref(first), ctypes.byref(second)))
        return (first.value or b"").decode(), (second.value or b"").decode()

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the model on its `inputs` tensors, all on the CPU; no gradients are recorded.

        Raises:
            ValueError: there are more or fewer tensors than inputs.
            RuntimeError: the model refused them, or failed; the text is the compiled model's.
        """
        if len(tensors) != self.inputs:
            raise ValueError(f"the compiled model takes {self.inputs} tensors, and got {len(tensors)}")
        capsules: list[Any] = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
        given = (ctypes.c_void_p * self.inputs)(*(_capsule_pointer(capsule, None) for capsule in capsules))
        taken = (ctypes.c_void_p * self.outputs)()
        # The library takes ownership of the input handles, also when it fails; we own the output handles.
        status = self._run(
            self._container,
            given,
            ctypes.c_size_t(self.inputs),
            taken,
            ctypes.c_size_t(self.outputs),
            None,  # the stream; a CPU has none
            None,  # a proxy for operators outside torch; packages that need one are not run here
        )
        self._check(status)
        handles: list[Any] = [_new_capsule(pointer, None, None) for pointer in taken]
        return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(handles)

    def _count(self, function: str) -> int:
        count = ctypes.c_size_t()
        self._check(getattr(self._library, function)(self._container, ctypes.byref(count)))
        return count.value

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(self._last_error())

    def _last_error(self) -> str:
        """Return the error message of this thread's failed call.

        Libraries of torch before 2.12 only print it; the returned text then refers to the log.
        """
        get = getattr(self._library, "AOTInductorGetLastError", None)
        text = ctypes.c_char_p()
        if get is None or get(ctypes.byref(text)) or not text.value:
            return "the compiled model failed; the log has its own message"
        return text.value.decode(errors="replace").strip()


def available() -> bool:
    """Return whether the installed torch can convert tensors to handles and back."""
    return all(hasattr(torch._C._aoti, name) for name in HANDLE_FUNCTIONS)


def official_runner(path: str) -> Any:
    """Create torch's own runner for a compiled library. Its `run(list of tensors)` holds the GIL.

    Call this inside `first_run`.
    """
    return torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)


@contextlib.contextmanager
def first_run(check_inputs: bool) -> Iterator[None]:
    """Guard the first run of a library; with `check_inputs`, it checks shapes and types from then on.

    Without the check, an input of a wrong shape makes the library read memory out of bounds. Each library
    reads the environment variable `_CHECK_VARIABLE` once, at its first run; a value that the operator has set
    is kept. A lock admits one thread of the process at a time.
    """
    with _CONSTRUCTION_LOCK:
        if not check_inputs or _CHECK_VARIABLE in os.environ:
            yield
            return
        os.environ[_CHECK_VARIABLE] = "1"
        try:
            yield
        finally:
            del os.environ[_CHECK_VARIABLE]


def _opened(path: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(path)
    except OSError as err:
        raise RuntimeError(f"{path} can't be opened as a library of this system: {err}") from err
    missing = [name for name in _REQUIRED if not hasattr(library, name)]
    if missing:
        _close(library)
        raise AbiMismatch(f"{path} lacks {', '.join(missing)}")
    return library


def _delete(library: ctypes.CDLL, container: ctypes.c_void_p) -> None:
    library.AOTInductorModelContainerDelete(container)
    _close(library)


def _close(library: ctypes.CDLL) -> None:
    """Unload the library where its symbols allow it.

    GCC marks some symbols as unique, which keeps a library loaded until the process ends.
    """
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))


logger = logging.getLogger(__name__)

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class _CheckedModel:
    """A compiled model that checks its inputs before a run, because its code reads memory by their sizes.

    Args:
        call_spec: the serialised spec of its arguments.
        rules: conditions on its inputs, which are checked here; None: the code is told to check them, see
            `read_rules`.
    """

    def __init__(self, call_spec: str, rules: Sequence[InputRule] | None) -> None:
        self._keywords = _keywords(call_spec)
        self._check_inputs = rules is None
        self._rules = rules or ()
        self._dtypes = [getattr(torch, rule.dtype, None) for rule in self._rules]

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the arguments; refuse those without elements, and those that break a rule.

        Compiled code assumes that a free dimension is 1 or more, and divides by it: a 0 would end the
        process.
        """
        if set(kwargs) != set(self._keywords):
            raise ValueError(
                f"the compiled model takes the keywords {self._keywords}, and got {list(kwargs)}"
            )
        leaves = pytree.tree_leaves((args, {key: kwargs[key] for key in self._keywords}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for index, tensor in enumerate(tensors):
            if not tensor.numel():
                raise bad_request(
                    f"input {index} of the compiled model: found the shape {list(tensor.shape)}, expected at "
                    "least one element; leave out requests without rows"
                )
        for index, (tensor, rule, dtype) in enumerate(
            zip(tensors, self._rules, self._dtypes, strict=False)  # the library counts the tensors
        ):
            if tensor.dtype != dtype:
                raise bad_request(
                    f"input {index} of the compiled model: found the type {str(tensor.dtype)[6:]}, expected "
                    f"{rule.dtype}; send values of that type"
                )
            _check_layout(index, tensor, rule)
        _check_free_strides(tensors, self._rules, _checked_free_sizes(tensors, self._rules))
        return tensors


class AotModel(_CheckedModel):
    """A compiled model, called like the module that was compiled.

    Thread-safe: several runs proceed at the same time, without the GIL. The first run is repeated by torch's
    own binding and the results are compared, because the C ABI is private: when they differ, the binding is
    used from then on, one run at a time, and a warning is logged.

    Args:
        path: the `.so`; it must exist until the first run is over.
        runs_at_once: see `CompiledLibrary`.
        rules: conditions on its inputs; None: the code is told to check them.

    Raises:
        AbiMismatch, RuntimeError: see `CompiledLibrary`.
    """

    def __init__(self, path: str, runs_at_once: int, rules: Sequence[InputRule] | None = ()) -> None:
        self._path = path
        self._library = CompiledLibrary(path, runs_at_once)
        given, results = self._library.call_spec()
        super().__init__(given, rules)
        self._out_spec = pytree.treespec_loads(results)
        if self._out_spec.num_leaves != self._library.outputs:
            raise AbiMismatch(
                f"{path} names {self._out_spec.num_leaves} results, not {self._library.outputs}"
            )
        self._tested: Run | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the arguments of the compiled module.

        Arguments that are not tensors are ignored: their values were fixed at compilation.

        Raises:
            PredictionException: 400, a tensor has no elements, or its shape or type breaks a rule.
            ValueError: the keywords, the number of tensors, or the strides are not those of the module.
            RuntimeError: the run failed, or the code checks its inputs and a shape or type is wrong.
        """
        tensors = self._checked(args, kwargs)
        results = self._tested(tensors) if self._tested is not None else self._run_first(tensors)
        return pytree.tree_unflatten(results, self._out_spec)

    def _run_first(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with first_run(self._check_inputs):
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


class BoundModel(_CheckedModel):
    """A package that runs by torch's own binding, with its inputs checked as `AotModel` checks them.

    Args:
        model: the package, as torch loads it.
        rules: see `AotModel`.
    """

    def __init__(self, model: Any, rules: Sequence[InputRule] | None = ()) -> None:
        self._model = model
        super().__init__(model.loader.get_call_spec()[0], rules)
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the arguments of the compiled module.

        Raises:
            PredictionException, ValueError, RuntimeError: see `AotModel`.
        """
        self._checked(args, kwargs)
        if self._ran:
            return self._model(*args, **kwargs)
        with first_run(self._check_inputs):
            results = self._model(*args, **kwargs)
        self._ran = True
        return results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)  # for an archive's handler, which may update the weights


def _check_layout(index: int, tensor: torch.Tensor, rule: InputRule) -> None:
    shape = tensor.shape
    if (
        len(shape) != rule.dimensions
        or any(shape[at] < least for at, least in rule.least.items())
        or any(shape[at] > most for at, most in rule.most.items())
    ):
        raise bad_request(
            f"input {index} of the compiled model: found the shape {list(shape)}, expected {_told(rule)}; "
            "send that shape"
        )
    for at, stride in rule.strides.items():
        _check_stride(index, tensor, at, stride)


def _check_stride(index: int, tensor: torch.Tensor, at: int, stride: int) -> None:
    strides = tensor.stride()
    if strides[at] != stride and tensor.shape[at] != 1:  # the stride of a single element is never used
        raise ValueError(
            f"input {index} of the compiled model: found the strides {list(strides)}, expected {stride} "
            f"at dimension {at}; pass a tensor that is contiguous as the example was"
        )


def _check_free_strides(
    tensors: Sequence[torch.Tensor], rules: Sequence[InputRule], sizes: Mapping[str, int]
) -> None:
    """Refuse strides that do not follow from the free sizes, because the code computes strides from these."""
    for index, (tensor, rule) in enumerate(zip(tensors, rules, strict=False)):
        for at, formula in rule.free_strides.items():
            with contextlib.suppress(LookupError):  # the formula has an unknown operation, such as rounding
                _check_stride(index, tensor, at, stride_of(formula, sizes))


def _checked_free_sizes(tensors: Sequence[torch.Tensor], rules: Sequence[InputRule]) -> dict[str, int]:
    """Return the free sizes; refuse those that contradict each other.

    The code reads a free size from one dimension, and computes the dimensions that depend on it.
    """
    found: dict[str, int] = {}
    for index, (tensor, rule) in enumerate(zip(tensors, rules, strict=False)):
        for at, size in rule.sizes.items():
            value, rest = divmod(tensor.shape[at] - size.offset, size.factor)
            first = found.setdefault(size.symbol, value)
            if rest or first != value:
                raise bad_request(
                    f"input {index} of the compiled model: found the size {tensor.shape[at]} at dimension "
                    f"{at}, expected {size.where(first)}; send inputs whose sizes belong together"
                )
    return found


def _told(rule: InputRule) -> str:
    """Return the shape that a rule demands: `[1 to 1024, 64]`."""
    ends = [(rule.least.get(at, 1), rule.most.get(at, "any")) for at in range(rule.dimensions)]
    return f"[{', '.join(str(most) if least == most else f'{least} to {most}' for least, most in ends)}]"


def _same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Return whether two runs gave the same results, up to rounding: threads may sum in another order."""
    return len(results) == len(expected) and all(
        one.shape == other.shape
        and one.dtype == other.dtype
        and (torch.equal(one, other) or _nearly_equal(one, other))
        for one, other in zip(results, expected, strict=True)
    )


def _nearly_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
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
