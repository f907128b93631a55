"""The classes of SageMaker's inference toolkit: they run the functions of a model folder's script.

Handlers that are packed into a model folder derive from them, under the toolkit's names.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torchere.handlers.context import Context
from torchere.handlers.sagemaker import toolkit
from torchere.handlers.ts_compat import alias

logger = logging.getLogger(__name__)

DEFAULT_MODEL_FILENAME = "model.pt"


class DefaultInferenceHandler:
    """The functions for a script that does not define them; frameworks subclass it."""

    def default_model_fn(self, model_dir: str, context: Context | None = None) -> Any:
        """Refuse to load a model: this class knows no framework."""
        raise NotImplementedError("Please provide a model_fn implementation.")

    def default_input_fn(
        self, input_data: Any, content_type: str | None, context: Context | None = None
    ) -> Any:
        """Return the array that a JSON, CSV, NPY or NPZ body holds.

        Raises:
            UnsupportedFormatError: the content type is not one of these.
        """
        return toolkit.decode(input_data, content_type)

    def default_predict_fn(self, data: Any, model: Any, context: Context | None = None) -> Any:
        """Refuse to call a model: this class knows no framework."""
        raise NotImplementedError("Please provide a predict_fn implementation.")

    def default_output_fn(self, prediction: Any, accept: str, context: Context | None = None) -> Any:
        """Return the prediction as JSON, CSV or NPY, whichever the client accepts first, and its type.

        Raises:
            UnsupportedFormatError: the client accepts none of them.
        """
        for content_type in toolkit.parse_accept(accept):
            if content_type in toolkit.SUPPORTED_CONTENT_TYPES:
                return toolkit.encode(prediction, content_type), content_type
        raise toolkit.UnsupportedFormatError(accept)


class DefaultPytorchInferenceHandler(DefaultInferenceHandler):
    """The functions for models of torch: a TorchScript model, and tensors as JSON, CSV or NPY."""

    def default_model_fn(self, model_dir: str, context: Context | None = None) -> Any:
        """Load `model.pt`, or else the only `.pt` or `.pth` file of the folder, as TorchScript.

        Raises:
            ValueError: there is not exactly one such file.
            ModelLoadError: the file is not TorchScript.
        """
        path = Path(model_dir, DEFAULT_MODEL_FILENAME)
        if not path.exists():
            found = sorted(file.name for file in Path(model_dir).iterdir() if file.suffix in (".pt", ".pth"))
            if len(found) != 1:
                raise ValueError(f"Exactly one .pth or .pt file is required for PyTorch models: {found}")
            path = Path(model_dir, found[0])
        try:
            model: torch.jit.ScriptModule = torch.jit.load(str(path), map_location=_device(context))  # type: ignore[no-untyped-call]
        except RuntimeError as err:
            text = f"Failed to load {path}. Please ensure model is saved using torchscript."
            raise toolkit.ModelLoadError(text) from err
        return model.eval()

    def default_input_fn(
        self, input_data: Any, content_type: str | None, context: Context | None = None
    ) -> torch.Tensor:
        """Return the tensor that a JSON, CSV or NPY body holds; JSON and CSV give 32-bit floats.

        Raises:
            UnsupportedFormatError: the content type is not one of these.
        """
        array = toolkit.decode(input_data, content_type)
        is_text = toolkit.plain_type(content_type) in toolkit.UTF8_TYPES
        # Not `torch.FloatTensor`, which takes a single number for a size and returns uninitialised memory.
        tensor = torch.as_tensor(array, dtype=torch.float32) if is_text else torch.from_numpy(array)
        return tensor.to(_device(context))

    def default_predict_fn(self, data: Any, model: Any, context: Context | None = None) -> Any:
        """Return the output of the model for the input."""
        device = _device(context)
        with torch.no_grad():
            return model.to(device).eval()(data.to(device))

    def default_output_fn(self, prediction: Any, accept: str, context: Context | None = None) -> Any:
        """Return the prediction as JSON, CSV or NPY, whichever the client accepts first.

        Raises:
            UnsupportedFormatError: the client accepts none of them.
        """
        body, content_type = super().default_output_fn(_listed(prediction), accept, context)
        return body.encode() if content_type == toolkit.CSV else body


class TypedPytorchFunctions(DefaultPytorchInferenceHandler):
    """The same functions; the answer names the content type that was written."""

    def default_output_fn(self, prediction: Any, accept: str, context: Context | None = None) -> Any:
        """Return the encoded prediction and its content type."""
        return DefaultInferenceHandler.default_output_fn(self, _listed(prediction), accept, context)


def _listed(prediction: Any) -> Any:
    is_tensor = isinstance(prediction, torch.Tensor)
    return prediction.detach().cpu().numpy().tolist() if is_tensor else prediction


class Transformer:
    """Runs the functions of one model folder. Not thread-safe: one executor uses it.

    Args:
        default_inference_handler: has the functions that the script does not define, as `default_model_fn`.
    """

    def __init__(self, default_inference_handler: DefaultInferenceHandler | None = None) -> None:
        self._default_inference_handler = default_inference_handler or DefaultInferenceHandler()
        self._initialized = False
        self._context: Any = None

    @staticmethod
    def handle_error(context: Context, inference_exception: Any, trace: str) -> list[str]:
        """Give the first request of the batch an error's status; return its text and the traceback."""
        return [_refused(context, inference_exception, trace, 0)]

    def validate_and_initialize(
        self, model_dir: str = toolkit.model_dir, context: Context | None = None
    ) -> None:
        """Import the script and load the model; no effect where that is done.

        Raises:
            ValueError: the script has `transform_fn` besides functions that it replaces.
            Exception: raised by the script.
        """
        if self._initialized:
            return
        alias.install()
        self._context = context
        self._take_functions(_script(model_dir))
        if self._before is not None:
            self._call(self._before, model_dir)
        self._model = self._call(self._load, model_dir)
        if self._after is not None:
            self._call(self._after, model_dir, self._model)
        self._initialized = True

    def _take_functions(self, script: ModuleType | None) -> None:
        def own(name: str) -> Callable[..., Any] | None:
            return getattr(script, name, None)

        def found(name: str) -> Any:
            return own(name) or getattr(self._default_inference_handler, f"default_{name}", None)

        if own("transform_fn") and (own("input_fn") or own("predict_fn") or own("output_fn")):
            raise ValueError(
                "Cannot use transform_fn implementation in conjunction with input_fn, predict_fn, and/or "
                "output_fn implementation"
            )
        self._transform = own("transform_fn") or self._default_transform
        self._before, self._load, self._after = map(found, ("pre_model_fn", "model_fn", "model_warmup_fn"))
        self._input, self._predict, self._output = map(found, ("input_fn", "predict_fn", "output_fn"))

    def transform(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answer one batch; a request that fails gets its error as text, with the error's status."""
        self.validate_and_initialize(str(context.system_properties["model_dir"]), context)
        self._context = context
        return [self._answer(row, index) for index, row in enumerate(data)]

    def _answer(self, row: dict[str, Any], index: int) -> Any:
        context = self._context
        found = context.get_all_request_header(index).items()
        # The other values are not texts: they describe the fields of a form.
        headers = {name.lower(): value for name, value in found if isinstance(value, str)}
        content_type = headers.get("content-type")
        accept = headers.get("accept")
        if not accept or accept == toolkit.ANY:
            accept = os.environ.get(toolkit.DEFAULT_INVOCATIONS_ACCEPT_ENV) or toolkit.JSON
        try:
            body = _body(row.get("body"), content_type)
            result = self._call(self._transform, self._model, body, content_type, accept)
            if isinstance(result, tuple):  # (response, content type)
                result, accept = result[:2]
            context.set_response_content_type(index, accept)
        except Exception as err:  # the script may raise and return anything
            return self._failure(err, index)
        return result

    def _failure(self, err: Exception, index: int) -> str:
        trace = traceback.format_exc()
        logger.error("the script failed for model %s: %s", self._context.model_name, trace)
        if not (isinstance(getattr(err, "status_code", None), int) and hasattr(err, "phrase")):
            err = toolkit.GenericInferenceToolkitError(500, str(err))
        if type(self).handle_error is not Transformer.handle_error:
            return str(self.handle_error(self._context, err, trace)[0])
        return _refused(self._context, err, trace, index)

    def _default_transform(self, model: Any, body: Any, content_type: str | None, accept: str) -> Any:
        value = self._call(self._input, body, content_type)
        prediction = self._call(self._predict, value, model)
        return self._call(self._output, prediction, accept)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the script, with the context as a further argument if it takes one more."""
        wanted = len(inspect.signature(function).parameters)
        if wanted == len(arguments):
            return function(*arguments)
        if wanted == len(arguments) + 1:
            return function(*arguments, self._context)
        name = getattr(function, "__name__", str(function))
        raise TypeError(f"{name} takes {wanted} arguments but {len(arguments)} were given.")


class DefaultHandlerService:
    """The handler around a transformer; the default transformer knows no framework."""

    def __init__(self, transformer: Transformer | None = None) -> None:
        self._service = transformer or Transformer()

    def initialize(self, context: Context) -> None:
        """Import the script and load the model; their exceptions are raised unchanged."""
        self._service.validate_and_initialize(str(context.system_properties["model_dir"]), context)

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answer one batch."""
        return self._service.transform(data, context)


def _refused(context: Context, err: Any, trace: str, index: int) -> str:
    context.set_response_status(code=err.status_code, phrase=" ".join(str(err.phrase).split()), idx=index)
    return f"{getattr(err, 'message', err)}\n{trace}"


def _device(context: Context | None) -> torch.device:
    """Return the device of an executor; for a script that passes no context the first GPU, as the toolkit."""
    gpu_id = context.system_properties.get("gpu_id") if context else 0
    return torch.device("cpu" if gpu_id is None or not torch.cuda.is_available() else f"cuda:{gpu_id}")


def _script(model_dir: str) -> ModuleType | None:
    """Import the script of a model folder from `code/` or from the folder itself; None if it has none."""
    folders = [str(Path(model_dir, "code")), model_dir]
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    # Processes that the script starts find its modules there.
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys([*folders, *others])))
    name = toolkit.Environment().module_name
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def _body(body: Any, content_type: str | None) -> Any:
    """Return a body as the toolkit passes it: text for JSON and CSV without parameters, else a bytearray."""
    if isinstance(body, (dict, list)):  # the server has decoded it (decode_input_request=true)
        body = bytearray(json.dumps(body), "utf-8")
    if isinstance(body, (bytes, bytearray, memoryview)) and content_type in toolkit.UTF8_TYPES:
        return bytes(body).decode("utf-8")
    return body
