"""Model folders as SageMaker users have them, the requests to each, and what the toolkit answered.

`recorded.json` holds what sagemaker-inference 1.10.1 and sagemaker-pytorch-inference 2.0.25 answered on
TorchServe 0.12.0 with torch 2.13.0: status, content type and body, without tracebacks.
"""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

JSON, CSV, NPY = "application/json", "text/csv", "application/x-npy"
BINARY = "application/octet-stream"


class Folder(NamedTuple):
    """A folder: its script, the name of its model file, the requests that are sent, and a packed handler."""

    script: str | None
    model: str | None = None
    requests: str = "tensors"
    handler: str | None = None
    handler_code: str | None = None


def npy(values: Sequence[Sequence[float]] | Sequence[int]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, dtype="float32"))
    return buffer.getvalue()


NUMBERS = """
def model_fn(d): return 4
def input_fn(d, c): return float(d)
def predict_fn(d, m): return d * m
def output_fn(p, a): return str(p)
"""

FOLDERS = {
    "plain": Folder(None, "model.pt", "tensors"),
    "named": Folder(None, "net.pth", "tensors"),
    "model_fn": Folder(
        """
import torch
def model_fn(model_dir):
    m = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(m.weight, 2.0); torch.nn.init.constant_(m.bias, 0.5)
    return m.eval()
""",
        None,
        "tensors",
    ),
    "input_fn": Folder(
        """
import json, torch
def input_fn(data, content_type):
    if content_type == 'application/x-pairs':
        return torch.tensor([[float(x) for x in data.decode().split(';')]])
    raise ValueError('only pairs, not ' + str(content_type))
""",
        "model.pt",
        "pairs",
    ),
    "predict_fn": Folder(
        """
def predict_fn(data, model):
    return {'sum': float(data.sum()), 'out': model(data).tolist()}
""",
        "model.pt",
        "tensors",
    ),
    "output_fn": Folder(
        """
def output_fn(prediction, accept):
    return 'text:' + str(prediction.tolist()), 'text/plain'
""",
        "model.pt",
        "tensors",
    ),
    "output_plain": Folder(
        """
def output_fn(prediction, accept):
    return str(prediction.tolist()) + ' as ' + accept
""",
        "model.pt",
        "tensors",
    ),
    "transform_fn": Folder(
        """
def transform_fn(model, data, content_type, accept):
    return repr((type(data).__name__, data, content_type, accept))
""",
        "model.pt",
        "all",
    ),
    "context": Folder(
        """
def model_fn(model_dir, context):
    return context.model_name
def input_fn(data, content_type, context):
    return (data, content_type, context.model_name)
def predict_fn(data, model, context):
    return [str(data), model]
def output_fn(prediction, accept, context):
    return str(prediction)
""",
        None,
        "all",
    ),
    "errors": Folder(
        """
from sagemaker_inference.errors import BaseInferenceToolkitError
def model_fn(d): return None
def input_fn(data, content_type):
    if data == 'input': raise ValueError('bad input')
    return data
def predict_fn(data, model):
    if data == 'predict': raise RuntimeError('bad predict')
    if data == 'own': raise BaseInferenceToolkitError(422, 'own message', 'own phrase')
    return data
def output_fn(p, accept):
    if p == 'output': raise KeyError('bad output')
    return p
""",
        None,
        "errors",
    ),
    "toolkit": Folder(
        """
from sagemaker_inference import content_types, decoder, encoder, errors
def model_fn(d): return 3
def input_fn(data, content_type):
    return decoder.decode(data, content_type)
def predict_fn(data, model):
    return data * model
def output_fn(p, accept):
    if accept == content_types.OCTET_STREAM: raise errors.UnsupportedFormatError(accept)
    return encoder.encode(p, accept)
""",
        None,
        "tensors",
    ),
    "members": Folder(
        """
from sagemaker_inference import content_types, decoder, default_inference_handler, encoder, environment
from sagemaker_inference import default_handler_service, logging, parameters, utils
from sagemaker_inference.decoder import _csv_to_numpy, _json_to_numpy, _npy_to_numpy
from sagemaker_inference.encoder import _array_to_csv, _array_to_json, _array_to_npy
from sagemaker_inference.transformer import Transformer
from sagemaker_pytorch_serving_container import default_pytorch_inference_handler
import os
logger = logging.get_logger()
torch_functions = default_pytorch_inference_handler.DefaultPytorchInferenceHandler()
readers = {content_types.CSV: _csv_to_numpy, content_types.JSON: _json_to_numpy}
writers = {content_types.CSV: _array_to_csv, content_types.JSON: _array_to_json}
def model_fn(d):
    path = os.path.join(d, 'note.txt')
    utils.write_file(path, utils.remove_crlf('two\\r\\nlines'))
    os.environ[parameters.DEFAULT_INVOCATIONS_ACCEPT_ENV] = content_types.JSON
    return [utils.read_file(path), environment.Environment().module_name, logger.name]
def input_fn(data, content_type):
    if content_type in readers:
        return readers[content_type](data, dtype=float)
    assert utils.retrieve_content_type_header({'content-type': content_type}) == content_type
    return torch_functions.default_input_fn(data, content_type).numpy()
def predict_fn(data, model):
    assert model == ['two  lines', 'inference', 'sagemaker-inference'], model
    return _npy_to_numpy(_array_to_npy(data * 2))
def output_fn(p, accept):
    return writers.get(accept, lambda p: encoder.encode(p, accept))(p)
""",
        None,
        "tensors",
    ),
    "arity": Folder(
        """
def model_fn(a, b, c): return None
""",
        None,
        "tensors",
    ),
    "both": Folder(
        """
def transform_fn(m, d, c, a): return 'x'
def input_fn(d, c): return d
""",
        "model.pt",
        "tensors",
    ),
    "beside": Folder(
        """
from helper import factor
def model_fn(d): return factor
def input_fn(d, c): return float(d)
def predict_fn(d, m): return d * m
def output_fn(p, a): return str(p)
""",
        None,
        "number",
    ),
    "service": Folder(  # as the toolkit's own file, which users copy into their folder
        NUMBERS,
        None,
        "number",
        "handler_service.py",
        """
from sagemaker_inference.default_handler_service import DefaultHandlerService
from sagemaker_inference.transformer import Transformer
from sagemaker_pytorch_serving_container.default_pytorch_inference_handler import \\
    DefaultPytorchInferenceHandler
import os, sys
class HandlerService(DefaultHandlerService):
    def __init__(self):
        self._initialized = False
        transformer = Transformer(default_inference_handler=DefaultPytorchInferenceHandler())
        super(HandlerService, self).__init__(transformer=transformer)
    def initialize(self, context):
        if not self._initialized:
            sys.path.append(os.path.join(context.system_properties.get('model_dir'), 'code'))
            self._initialized = True
        super().initialize(context)
""",
    ),
    "functions": Folder(  # a handler of the folder that has the functions itself
        None,
        None,
        "number",
        "own_handler.py",
        """
from sagemaker_inference import default_inference_handler
from sagemaker_inference.default_handler_service import DefaultHandlerService
from sagemaker_inference.transformer import Transformer
class HandlerService(DefaultHandlerService):  # a handler's file has one class
    def __init__(self):
        class Functions(default_inference_handler.DefaultInferenceHandler):
            def default_model_fn(self, model_dir): return 4
            def default_predict_fn(self, data, model): return data * model
        super().__init__(transformer=Transformer(default_inference_handler=Functions()))
""",
    ),
    "named_service": Folder(
        NUMBERS, None, "number", "sagemaker_pytorch_serving_container.handler_service:handle"
    ),
    "service_module": Folder(
        NUMBERS, None, "number", "sagemaker_pytorch_serving_container.handler_service.py"
    ),
}

REQUESTS: dict[str, list[tuple[str | None, bytes, str | None]]] = {
    "tensors": [
        (JSON, b"[[1.0, 2.0], [3, 4]]", None),
        (JSON, b"[[1.0, 2.0]]", CSV),
        (JSON, b"[[1.0, 2.0]]", "*/*"),
        (JSON, b"[[1.0, 2.0]]", "text/csv, application/json"),
        (CSV, b"1.0,2.0\n3,4\n", JSON),
        (NPY, npy([[1, 2]]), JSON),
        (NPY, npy([[1, 2]]), NPY),
        (BINARY, b"xx", JSON),
        (JSON, b"no json", JSON),
        (JSON, b"[[1.0]]", JSON),
        (JSON, b"[[1.0, 2.0]]", "image/png"),
        (JSON, b"[[1.0, 2.0]]", BINARY),
    ],
    "all": [
        (JSON, b'{"a": 1}', JSON),
        (CSV, b"a,b", CSV),
        (f"{JSON}; charset=utf-8", b'{"a": 1}', JSON),
        (f"{CSV}; charset=utf-8", b"a,b", CSV),
        (BINARY, b"\x00\x01", None),
        (NPY, npy([1]), JSON),
        ("text/plain", "gr\u00fcn".encode(), "text/plain"),
        (None, b"raw", None),
    ],
    "pairs": [("application/x-pairs", b"1;2", JSON), (JSON, b"[[1,2]]", JSON)],
    "errors": [(CSV, text, JSON) for text in (b"fine", b"input", b"predict", b"own", b"output")],
    "number": [(JSON, b"2.5", JSON)],
}


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(self.layer.weight, 1.0)
        torch.nn.init.constant_(self.layer.bias, 0.25)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layer(values)


def write(name: str, folder: Path) -> None:
    """Write one of the folders, as SageMaker unpacks its `model.tar.gz`."""
    script, model, _, handler, handler_code = FOLDERS[name]
    (folder / "code").mkdir(parents=True)
    if model:
        torch.jit.script(Linear()).save(str(folder / model))
    if script:
        (folder / "code" / "inference.py").write_text(script)
    if name == "beside":
        (folder / "code" / "helper.py").write_text("factor = 4\n")
    if handler:
        manifest = {"runtime": "python", "model": {"modelName": "model", "handler": handler}}
        (folder / "MAR-INF").mkdir()
        (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    if handler_code:
        (folder / str(handler)).write_text(handler_code)
