"""BaseHandler: the base class of handlers, and the handler of archives that have none of their own."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchere.archiver.split import SECTION, Split
from torchere.archiver.torchscript_options import TorchScriptOptions
from torchere.handlers.archive_import import archive_at
from torchere.handlers.compiled import load as aot
from torchere.handlers.context import Context
from torchere.handlers.errors import PredictionException, bad_request
from torchere.handlers.labels import load_label_mapping
from torchere.handlers.loading import onnx, xla
from torchere.handlers.loading.compile import autocasting, compiled
from torchere.handlers.loading.devices import (
    CPU,
    choose_device,
    module_on,
    to_device,
    whole_on_device,
    without_gradients,
)
from torchere.handlers.loading.eager import in_eval_mode, load_eager
from torchere.handlers.loading.torchscript import changes_itself, load_torchscript
from torchere.handlers.loading.weights import SharedModels, WeightsKind, wants_aot_compile, weights_kind
from torchere.handlers.metrics import add_handler_time, timed
from torchere.handlers.rows import config_of, refusal, value_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


class BaseHandler:
    """Loads the archive's model, and answers batches in three stages that subclasses override.

    One instance belongs to one executor and runs one batch at a time; several instances of a version in one
    process share the weights, so a subclass must not change the model while it answers.

    Users' subclasses have helpers of any name, even private ones. So each method that TorchServe's class does
    not have is a hook of docs/handlers.md, or has a name that begins with `_torchere`.

    Example:
        >>> class Doubler(BaseHandler):
        ...     def preprocess(self, data):
        ...         return torch.tensor([row["body"]["x"] for row in data])
        ...     def postprocess(self, output):
        ...         return [{"y": y} for y in output.tolist()]
    """

    names_classes = True  # answers use names from index_to_name.json; a missing file is logged
    # Defaults for subclasses that call neither this `__init__` nor this `initialize`.
    context: Any = None
    model_yaml_config: Any = MappingProxyType({})

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.explain = False
        self.target = 0
        self.profiler_args: dict[str, Any] = {}
        self.model_yaml_config = {}

    def initialize(self, context: Context) -> None:
        """Choose the device, load the model, compile it if the config says so, and read the class names.

        Raises:
            RuntimeError: the archive holds no weights that can be loaded; the text names the remedy.
            ValueError: the config or the class names are wrong.
        """
        self._torchere_configure(context)
        model_dir = context.system_properties["model_dir"]
        model = (self.manifest or {}).get("model") or {}
        serialized = model.get("serializedFile")
        self.model_pt_path = str(Path(model_dir, serialized)) if serialized else None
        self.model = self._torchere_load(
            weights_kind(model, model_dir, self.model_yaml_config), model_dir, model
        )
        self.model = autocasting(
            compiled(self.model, self.model_yaml_config, self.device), self.model_yaml_config, self.device
        )
        names = Path(model_dir, "index_to_name.json")
        if self.names_classes or names.is_file():
            self.mapping = load_label_mapping(str(names))
        self.initialized = True

    def _torchere_configure(self, context: Context) -> None:
        """Read the settings that `preprocess` needs, and choose the device; loads no model.

        Packing calls it without `initialize`, to prepare samples as requests (`model_inputs.py`).
        """
        self.context = context
        self.model_yaml_config = config_of(context)
        gpu_id = context.system_properties.get("gpu_id")
        self._torchere_use_device(choose_device(gpu_id, self.model_yaml_config))
        self.manifest = context.manifest

    def _torchere_use_device(self, device: torch.device) -> None:
        self.device = device
        self.map_location = None if device.type == "xla" else device.type  # as in TorchServe

    def _torchere_load(self, kind: WeightsKind, model_dir: str, model: dict[str, Any]) -> Any:
        path = str(self.model_pt_path)
        if split := Split.read(self.model_yaml_config):
            return self._torchere_load_part(split, kind, model_dir, model)
        if kind is WeightsKind.EAGER:
            loaded = self._load_pickled_model(model_dir, model["modelFile"], self.model_pt_path)
            loaded = module_on(in_eval_mode(loaded), self.device)
            return xla.over_mesh(loaded, self.model_yaml_config) if self.device.type == "xla" else loaded
        if kind is WeightsKind.TORCHSCRIPT:
            return in_eval_mode(self._load_torchscript_model(path))
        if kind is WeightsKind.ONNX:
            return onnx.load_onnx(path, self.device)
        if kind is WeightsKind.AOT_PACKAGE:
            return self._torchere_load_package(path, model_dir)
        return self._load_torch_export_aot_compile(path)

    def _torchere_load_part(
        self, split: Split, kind: WeightsKind, model_dir: str, model: dict[str, Any]
    ) -> Any:
        from torchere.handlers.loading.parallel import load_part  # noqa: PLC0415 - few models need it

        if kind is WeightsKind.HUGGING_FACE:
            return self._torchere_load_folder_part(model_dir, split)
        if kind is not WeightsKind.EAGER:
            raise ValueError(
                f"{SECTION} in model-config.yaml splits the layers of a class: pack it with --model-file, "
                "or a Hugging Face folder with torchere archive --parallel"
            )
        return load_part(archive_at(model_dir), model["modelFile"], self.model_pt_path, split, self.device)

    def _torchere_load_folder_part(self, model_dir: str, split: Split) -> Any:
        """Load this rank's part of a Hugging Face model; its inputs are those of its own `forward`."""
        from torchere.archiver.models.spread.huggingface import spread_folder  # noqa: PLC0415 - as above

        return spread_folder(Path(model_dir), split, self.device)

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        """Load TorchScript; one copy per process and device, or per executor if the model modifies itself.

        Subclasses may override it.
        """
        options = TorchScriptOptions.read(self.model_yaml_config)
        if options.quantized_engine:  # int8: its operators run on the CPU only
            self._torchere_use_device(CPU)
        device = self.device
        return self._torchere_shared(
            ("torchscript", model_pt_path, str(device), options),
            lambda: load_torchscript(model_pt_path, device, options),
            lambda module: not changes_itself(module),
        )

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
        """Load an eager model; one copy per process and device. Subclasses may override it."""
        archive, device = archive_at(model_dir), self.device
        return self._torchere_shared(
            ("eager", model_dir, model_file, model_pt_path, str(device)),
            lambda: load_eager(archive, model_file, model_pt_path).to(device).eval(),
        )

    def _torchere_load_package(self, path: str, model_dir: str) -> Any:
        # Code for the CPU would use GPU addresses as CPU addresses.
        if self.map_location != "cpu" and aot.is_for_cpu(path):
            self._torchere_use_device(CPU)
        if self.map_location == "cuda":
            torch.cuda.set_device(self.device)  # torch's binding loads to the current device
        where = _where(self)
        return self._torchere_shared(
            ("aot_package", path, str(self.device)), lambda: aot.load_package(path, model_dir, where)
        )

    def _load_torch_export_aot_compile(self, model_so_path: str) -> Any:
        """Load a compiled `.so`. Subclasses may override it."""
        where = _where(self)
        return self._torchere_shared(
            ("aot_library", model_so_path, str(self.device)),
            lambda: aot.load_shared_object(model_so_path, where),
        )

    def _use_torch_export_aot_compile(self) -> bool:
        """Return whether the config says that the weights are a compiled `.so`."""
        return wants_aot_compile(self.model_yaml_config)

    def _torchere_shared(
        self, key: Hashable, load: Callable[[], T], may_share: Callable[[T], bool] = lambda _: True
    ) -> T:
        def whole() -> T:
            loaded = load()
            whole_on_device(self.device)
            return loaded

        shared = getattr(self.context, "shared_models", None)
        # A Mock, as the context of a user's test, has any attribute.
        return shared.get_or_load(key, whole, may_share) if isinstance(shared, SharedModels) else load()

    @timed
    def preprocess(self, data: Any) -> Any:
        """Convert the rows of a batch to the model's input; here the rows must be numbers already.

        Args:
            data: a dict for each request, or the items that an envelope unwrapped.

        Returns:
            A tensor on the handler's device, first dimension the batch.
        """
        return tensor_of(data, self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the output of `preprocess`, without recording gradients."""
        with without_gradients(self.device):
            return self.model(to_device(data, self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> Any:
        """Convert the model's output to a list with one answer per request."""
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        """Answer one batch.

        The headers of the first request apply to all: `describe: True` answers with `describe_handle()`,
        `explain: True` with `explain_handle()`.

        Returns:
            A list with one answer per request.
        """
        started = time.perf_counter()
        self.context = context
        if self._is_describe():  # the row of such a request is empty
            output = [self.describe_handle()]
        elif os.environ.get("ENABLE_TORCH_PROFILER"):
            output, _ = self._infer_with_profiler(data)
        else:
            output = self._torchere_run(data)
        add_handler_time(context, started)
        return output

    def _torchere_run(self, data: Any) -> Any:
        started_s = time.perf_counter()
        model_input = self.preprocess(data)
        if self._is_explain():
            return self.explain_handle(model_input, data)
        give_up_if_unwanted(self.context)
        prepared_s = time.perf_counter()
        output = self.inference(model_input)
        inferred_s = time.perf_counter()
        give_up_if_unwanted(self.context)
        answers = self.postprocess(output)
        self.context.stages_s = (
            prepared_s - started_s,
            inferred_s - prepared_s,
            time.perf_counter() - inferred_s,
        )
        return answers

    def _infer_with_profiler(self, data: Any) -> tuple[Any, Any]:
        """Answer one batch under torch's profiler; return the answers and the profiler."""

        def stages() -> Any:
            with record_function("preprocess"):
                model_input = self.preprocess(data)
            if self._is_explain():
                with record_function("explain"):
                    return self.explain_handle(model_input, data)
            with record_function("inference"):
                output = self.inference(model_input)
            with record_function("postprocess"):
                return self.postprocess(output)

        return self._torchere_profiled(stages)

    def _torchere_profiled(self, stages: Callable[[], Any]) -> tuple[Any, Any]:
        # As in TorchServe, the folder has the name the archive was packed with, not the registered name.
        packed_as = (self.context.manifest or {}).get("model", {}).get("modelName")
        name = packed_as or getattr(self.context, "model_name", "")  # contexts of users' tests have none
        return run_profiled(stages, name, self.profiler_args)

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Explain the answers with `get_insights(model input, raw input, target)`.

        Requests with the same target are explained in one call, with the raw input of the first request;
        otherwise each request is explained on its own.

        Raises:
            PredictionException: 400, the handler has no method `get_insights`.
        """
        get_insights = getattr(self, "get_insights", None)
        if get_insights is None:
            raise bad_request(
                f"The handler {type(self).__name__} gives no explanations: it has no method "
                "get_insights(data, inputs, target)"
            )
        targets = [_target_of(row) for row in raw_data]
        if _are_one(targets):
            return get_insights(data_preprocess, _input_of(raw_data[0]), targets[0])
        answers: list[Any] = []
        for place, (row, target) in enumerate(zip(raw_data, targets, strict=True)):
            try:
                answers.extend(get_insights(self.preprocess([row]), _input_of(row), target))
            except PredictionException as err:
                answers.append(refusal(self.context, place, err))
        return answers

    def _is_explain(self) -> bool:
        if _header_is_true(self.context, "explain"):
            self.explain = True
            return True
        return False

    def _is_describe(self) -> bool:
        return _header_is_true(self.context, "describe")

    def describe_handle(self) -> Any:
        """Return the data that `describe` with `customized=true` adds for this model; None by default."""
        return None

    def get_device(self) -> Any:
        """Return the device the model is on."""
        return self.device

    def warmup_data(self) -> list[dict[str, object]] | None:
        """Return example rows for the first runs, in the form of `handle`'s `data`; None for no such runs."""
        return None


def _where(handler: BaseHandler) -> str | None:
    return None if handler.map_location is None else str(handler.device)


def _header_is_true(context: Any, name: str) -> bool:
    return context is not None and context.get_request_header(0, name) == "True"


def give_up_if_unwanted(context: Any) -> None:
    """End the batch, by an exception, if no client waits for its answers any more."""
    give_up = getattr(context, "give_up_if_unwanted", None)  # contexts of users' tests have none
    if give_up is not None:
        give_up()


def _input_of(row: Any) -> Any:
    return value_of(row) if isinstance(row, dict) else None


def _target_of(row: Any) -> Any:
    """Return the target of an explanation; a tensor becomes a number or a list."""
    target = row.get("target") if isinstance(row, dict) else None
    return (target.tolist() if isinstance(target, (np.ndarray, np.generic, torch.Tensor)) else target) or 0


def _are_one(targets: list[Any]) -> bool:
    """Return whether one call can explain all; a target that is a list would be read as one per request."""
    first = targets[0]
    alike = all(type(target) is type(first) and target == first for target in targets)
    return len(targets) == 1 or (alike and not isinstance(first, (list, tuple)))


# Convert nested lists of numbers to a tensor like `torch.as_tensor`, six times as fast.
#
# The lists are those of parsed JSON. `torch.as_tensor` checks the type of each number in turn; NumPy does it
# in one tight loop (for 32 rows of 64 floats, 460 us and 75 us).


def tensor_of(data: Any, device: torch.device | str | None = None) -> torch.Tensor:
    """Return `torch.as_tensor(data, device=device)`, errors included, for any `data`.

    Floats get PyTorch's default type, whole numbers int64.
    """
    numbers = _numbers(data) if type(data) is list else None
    if numbers is None:
        return torch.as_tensor(data, device=device)
    tensor = torch.from_numpy(numbers)
    if numbers.dtype == np.float64:
        return tensor.to(device=device, dtype=torch.get_default_dtype())
    return tensor if device is None else tensor.to(device)


def _numbers(data: list[Any]) -> np.ndarray[Any, np.dtype[Any]] | None:
    """Return the lists as a NumPy array; None where PyTorch might choose another datatype."""
    first: Any = data
    while type(first) is list and first:
        first = first[0]
    if type(first) not in (float, int):
        return None  # booleans, text, tensors, empty lists
    try:
        numbers = np.array(data)
    except (ValueError, OverflowError):  # rows of different lengths: PyTorch raises its own error
        return None
    # Whole numbers that are too large for int64 become floats in NumPy, and an error in PyTorch.
    wanted = np.float64 if type(first) is float else np.int64
    return numbers if numbers.dtype == wanted else None


def refusal_of(run: Callable[[], object]) -> Exception | None:
    """Return the exception that a run of a generated row raises, or None if it succeeds.

    Raises:
        torch.OutOfMemoryError, MemoryError: the run lacks memory, which is not the fault of the row.
    """
    try:
        run()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as err:  # the model's own code may raise anything
        return err
    return None


# torch has one profiler per process: a second one at the same time breaks both, and may end the process.
_ONE_AT_A_TIME = threading.Lock()


def run_profiled(
    stages: Callable[[], Any], model_name: str, profiler_args: dict[str, Any]
) -> tuple[Any, Any]:
    """Run one batch under the profiler and write its trace.

    Thread-safe: the process profiles one batch at a time.

    Args:
        stages: runs the batch; names its parts with `torch.profiler.record_function`.
        model_name: names the folder of the traces, `<temporary folder>/pytorch_profiler/<model_name>`.
        profiler_args: arguments for `torch.profiler.profile`. If empty, activities and shapes get defaults;
            without `on_trace_ready`, the traces go to that folder.

    Returns:
        The result of `stages`, and the profiler.
    """
    args = dict(profiler_args)
    if not args:
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        args = {"activities": [ProfilerActivity.CPU, *cuda], "record_shapes": True}
    if "on_trace_ready" not in args:
        safe_name = re.sub(r"[^\w.-]", "_", model_name).lstrip(".")
        folder = str(Path(tempfile.gettempdir(), "pytorch_profiler", safe_name))
        args["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(folder)
        logger.info("Saving chrome trace to : %s", folder)
    with _ONE_AT_A_TIME, profile(**args) as profiler:
        output = stages()
    logger.info("%s", profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10))
    return output, profiler
