"""The handler of SageMaker's model folders: a model and `code/inference.py` with functions for its steps.

The contract is that of SageMaker's PyTorch inference containers. The script may define `model_fn`, and either
`transform_fn` or any of `input_fn`, `predict_fn` and `output_fn`; each may take the context as its last
argument. Missing functions have defaults: a TorchScript model, and tensors as JSON, CSV or NPY.
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

logger = logging.getLogger(__name__)

PROGRAM_VARIABLE = "SAGEMAKER_PROGRAM"
ACCEPT_VARIABLE = "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT"
DEFAULT_MODEL_NAME = "model.pt"


class SageMakerHandler:
    """Runs the functions of one model folder. Not thread-safe: one executor uses it."""

    def initialize(self, context: Context) -> None:
        """Import the script and load the model.

        Raises:
            ValueError: the script has `transform_fn` besides functions that it replaces.
            Exception: raised by the script.
        """
        toolkit.install()
        self._context = context
        self._device = _device(context)
        model_dir = str(context.system_properties["model_dir"])
        script = _script(model_dir)
        self._take_functions(script)
        before, after = getattr(script, "pre_model_fn", None), getattr(script, "model_warmup_fn", None)
        if before is not None:
            self._call(before, model_dir)
        self._model = self._call(getattr(script, "model_fn", None) or self.default_model_fn, model_dir)
        if after is not None:
            self._call(after, model_dir, self._model)

    def _take_functions(self, script: ModuleType | None) -> None:
        def own(name: str) -> Callable[..., Any] | None:
            return getattr(script, name, None)

        if own("transform_fn") and (own("input_fn") or own("predict_fn") or own("output_fn")):
            raise ValueError(
                "Cannot use transform_fn implementation in conjunction with input_fn, predict_fn, and/or "
                "output_fn implementation"
            )
        self._transform = own("transform_fn") or self._default_transform
        self._input = own("input_fn") or self.default_input_fn
        self._predict = own("predict_fn") or self.default_predict_fn
        self._output = own("output_fn") or self.default_output_fn

    def handle(self, data: list[dict[str, Any]], context: Context) -> list[Any]:
        """Answer one batch; a request that fails gets its error as text, with the error's status."""
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
            accept = os.environ.get(ACCEPT_VARIABLE) or toolkit.JSON
        try:
            body = _body(row.get("body"), content_type)
            result = self._call(self._transform, self._model, body, content_type, accept)
            if isinstance(result, tuple):  # the response and its content type
                result, accept = result[:2]
            context.set_response_content_type(index, accept)
        except Exception as err:  # the script may raise and return anything
            return self._failure(err, index)
        return result

    def _failure(self, err: Exception, index: int) -> str:
        trace = traceback.format_exc()
        logger.error("the script failed for model %s: %s", self._context.model_name, trace)
        status, message, phrase = 500, str(err) or "Invalid Request", str(err)
        own_status = getattr(err, "status_code", None)
        if isinstance(own_status, int) and hasattr(err, "phrase"):
            status, message, phrase = own_status, str(getattr(err, "message", err)), str(err.phrase)
        self._context.set_response_status(code=status, phrase=" ".join(phrase.split()), idx=index)
        return f"{message}\n{trace}"

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

    def default_model_fn(self, model_dir: str) -> Any:
        """Load `model.pt`, or else the only `.pt` or `.pth` file of the folder, as TorchScript.

        Raises:
            ValueError: there is not exactly one such file.
            ModelLoadError: the file is not TorchScript.
        """
        path = Path(model_dir, DEFAULT_MODEL_NAME)
        if not path.exists():
            found = sorted(file.name for file in Path(model_dir).iterdir() if file.suffix in (".pt", ".pth"))
            if len(found) != 1:
                raise ValueError(f"Exactly one .pth or .pt file is required for PyTorch models: {found}")
            path = Path(model_dir, found[0])
        try:
            model: torch.jit.ScriptModule = torch.jit.load(str(path), map_location=self._device)  # type: ignore[no-untyped-call]
        except RuntimeError as err:
            text = f"Failed to load {path}. Please ensure model is saved using torchscript."
            raise toolkit.ModelLoadError(text) from err
        return model.eval()

    def default_input_fn(self, input_data: Any, content_type: str | None) -> torch.Tensor:
        """Return the tensor that a JSON, CSV or NPY body holds; JSON and CSV give 32-bit floats.

        Raises:
            UnsupportedFormatError: the content type is not one of these.
        """
        array = toolkit.decode(input_data, content_type)
        is_text = toolkit.plain_type(content_type) in toolkit.UTF8_TYPES
        # `torch.FloatTensor` takes a single number for a size, and returns uninitialised memory.
        tensor = torch.as_tensor(array, dtype=torch.float32) if is_text else torch.from_numpy(array)
        return tensor.to(self._device)

    def default_predict_fn(self, data: Any, model: Any) -> Any:
        """Return the output of the model for the input."""
        with torch.no_grad():
            return model.to(self._device).eval()(data.to(self._device))

    def default_output_fn(self, prediction: Any, accept: str) -> Any:
        """Return the prediction as JSON, CSV or NPY, whichever the client accepts first.

        Raises:
            UnsupportedFormatError: the client accepts none of them.
        """
        if isinstance(prediction, torch.Tensor):
            prediction = prediction.detach().cpu().numpy().tolist()
        for content_type in toolkit.parse_accept(accept):
            if content_type in toolkit.SUPPORTED_CONTENT_TYPES:
                return toolkit.encode(prediction, content_type), content_type
        raise toolkit.UnsupportedFormatError(accept)


def _device(context: Context) -> torch.device:
    gpu_id = context.system_properties.get("gpu_id")
    return torch.device("cpu" if gpu_id is None or not torch.cuda.is_available() else f"cuda:{gpu_id}")


def _script(model_dir: str) -> ModuleType | None:
    """Import the script of a model folder from `code/` or from the folder itself; None if it has none."""
    for folder in (model_dir, str(Path(model_dir, "code"))):  # `code` is then searched first
        if folder not in sys.path:
            sys.path.insert(0, folder)
    name = (os.environ.get(PROGRAM_VARIABLE) or "inference.py").removesuffix(".py")
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def _body(body: Any, content_type: str | None) -> Any:
    """Return a body as the toolkit passes it: text for JSON and CSV, else a bytearray."""
    is_text = toolkit.plain_type(content_type) in toolkit.UTF8_TYPES
    if isinstance(body, (dict, list)):  # the server has decoded it (decode_input_request=true)
        body = json.dumps(body)
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body).decode("utf-8") if is_text else body
    return body
