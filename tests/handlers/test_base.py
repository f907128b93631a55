from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from torchere.handlers.base import BaseHandler
from torchere.handlers.densenet import DenseNetHandler
from torchere.handlers.errors import PredictionException
from torchere.handlers.loading.devices import choose_device, own_stream
from torchere.handlers.loading.weights import SharedModels
from torchere.handlers.metrics import MetricsCache
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.text import TextClassifier, TextHandler
from torchere.handlers.vision import VisionHandler
from torchere.handlers.vision.tasks import ImageClassifier, ImageSegmenter, ObjectDetector

EAGER_MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(3.0))
    def forward(self, x):
        return x * self.factor
"""


@pytest.fixture
def doubler(scripted_doubler: Path, make_context: Any) -> tuple[BaseHandler, Any]:
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"})
    handler = BaseHandler()
    handler.initialize(context)
    return handler, context


# The methods of TorchServe's classes of these names, and the names that torchere reads or offers besides.
NAMES_OF_TORCHSERVE = {
    *(
        "_infer_with_profiler",
        "_is_describe",
        "_is_explain",
        "_load_pickled_model",
        "_load_torchscript_model",
    ),
    *("_load_torch_export_aot_compile", "_use_torch_export_aot_compile", "describe_handle", "explain_handle"),
    *("get_device", "get_insights", "handle", "inference", "initialize", "postprocess", "preprocess"),
    *("get_max_result_classes", "set_max_result_classes"),
}
HOOKS = {"ig", "image_processing", "warmup_data"}
OF_TEXTS = {
    *("_expand_contractions", "_remove_accented_characters", "_remove_html_tags", "_remove_punctuation"),
    *("_remove_puncutation", "_tokenize", "get_source_vocab_path", "get_word_token"),
    "summarize_attributions",
}


@pytest.mark.parametrize(
    "handler",
    [
        *(BaseHandler, VisionHandler, ImageClassifier, ImageSegmenter, ObjectDetector, DenseNetHandler),
        *(TextHandler, TextClassifier),
    ],
)
def test_methods_that_users_of_torchserve_do_not_know_have_names_that_none_of_them_gives(
    handler: type,
) -> None:
    ours = {name for name, value in vars(handler).items() if callable(value) or hasattr(value, "__get__")}
    unprefixed = {name for name in ours if not name.startswith(("__", "_torchere_"))}
    assert unprefixed <= NAMES_OF_TORCHSERVE | OF_TEXTS | HOOKS


def test_private_helpers_of_a_subclass_may_have_any_plain_name(
    make_context: Any, begin: Any, tmp_path: Path
) -> None:
    class Words(BaseHandler):
        def initialize(self, context: Any) -> None:
            self.initialized = True

        def preprocess(self, data: Any) -> Any:
            return [row["body"].split() for row in data]

        def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
            return self._run(data)

        def postprocess(self, data: Any) -> Any:
            return [{"words": count} for count in data]

        def _run(self, texts: list[list[str]]) -> list[int]:
            return [len(words) for words in texts]

    handler = Words()
    context = make_context(tmp_path)
    handler.initialize(context)
    begin(context)
    assert handler.handle([{"body": "one house"}], context) == [{"words": 2}]


def test_the_attributes_of_the_contract_are_there_before_loading() -> None:
    handler = BaseHandler()
    expected = {"model", "mapping", "device", "context", "model_pt_path", "manifest", "map_location"}
    assert {name for name in expected if getattr(handler, name) is None} == expected
    assert (handler.initialized, handler.explain, handler.target, handler.profiler_args) == (
        False,
        False,
        0,
        {},
    )


def test_torchscript_is_loaded_and_answers(doubler: tuple[BaseHandler, Any], begin: Any) -> None:
    handler, context = doubler
    begin(context, 2)
    assert handler.initialized
    assert handler.get_device() == torch.device("cpu")
    assert handler.map_location == "cpu"
    assert handler.handle([[1.0], [2.0]], context) == [[2.0], [4.0]]
    (sample,) = context.metrics.drain()
    assert (sample.name, sample.unit, sample.metric_type) == ("HandlerTime", "Milliseconds", "gauge")
    assert sample.request_ids == ("request-0", "request-1")


def test_names_of_classes_are_missed_by_handlers_that_answer_with_them(
    doubler: tuple[BaseHandler, Any], caplog: pytest.LogCaptureFixture
) -> None:
    handler, context = doubler
    with caplog.at_level("INFO"):
        handler.initialize(context)
    assert "index_to_name.json is missing" in caplog.text


def test_answers_record_no_gradients(doubler: tuple[BaseHandler, Any]) -> None:
    assert doubler[0].inference(torch.ones(1)).is_inference()


def test_an_eager_model_is_loaded_with_its_weights(tmp_path: Path, make_context: Any) -> None:
    (tmp_path / "model.py").write_text(EAGER_MODEL)
    torch.save({"factor": torch.tensor(5.0)}, tmp_path / "weights.pth")
    handler = BaseHandler()
    handler.initialize(
        make_context(tmp_path, model={"modelFile": "model.py", "serializedFile": "weights.pth"})
    )
    assert handler.model(torch.ones(1)).tolist() == [5.0]
    assert not handler.model.training


OWN_INITIALIZE = """
import os
import torch
from ts.torch_handler.base_handler import BaseHandler

class Own(BaseHandler):
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        properties = context.system_properties
        model = context.manifest["model"]
        self.device = torch.device("cpu")
        weights = os.path.join(properties.get("model_dir"), model["serializedFile"])
        if "modelFile" in model:
            self.model = self._load_pickled_model(properties.get("model_dir"), model["modelFile"], weights)
        else:
            self.model = self._load_torchscript_model(weights)
        self.initialized = True

    def preprocess(self, data):
        return torch.tensor([float(row["body"]) for row in data])
"""


@pytest.mark.parametrize("eager", [True, False])
def test_the_loaders_work_from_an_initialize_of_ones_own_without_our_constructor(
    scripted_doubler: Path, make_context: Any, begin: Any, eager: bool
) -> None:
    (scripted_doubler / "own.py").write_text(OWN_INITIALIZE)
    (scripted_doubler / "model.py").write_text(EAGER_MODEL)
    torch.save({"factor": torch.tensor(5.0)}, scripted_doubler / "weights.pth")
    files = {"modelFile": "model.py", "serializedFile": "weights.pth"}
    context = make_context(scripted_doubler, model=files if eager else {"serializedFile": "doubler.pt"})
    entry_point = load_entry_point("own", context)
    begin(context)
    assert entry_point([{"body": "3"}], context) == [15.0 if eager else 6.0]


def test_an_archive_without_weights_is_explained(tmp_path: Path, make_context: Any) -> None:
    with pytest.raises(RuntimeError, match="No model weights could be loaded"):
        BaseHandler().initialize(make_context(tmp_path))


def test_onnx_without_its_runtime_is_explained(
    tmp_path: Path, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "w.onnx").touch()
    with pytest.raises(RuntimeError, match="needs onnxruntime, which is not installed"):
        BaseHandler().initialize(make_context(tmp_path, model={"serializedFile": "w.onnx"}))


def test_a_broken_compiled_package_is_explained(tmp_path: Path, make_context: Any) -> None:
    (tmp_path / "w.pt2").write_bytes(b"not a package")
    with pytest.raises(RuntimeError, match=r"w\.pt2 is not a \.pt2 package"):
        BaseHandler().initialize(make_context(tmp_path, model={"serializedFile": "w.pt2"}))


def test_a_model_is_compiled_when_the_config_says_so(
    scripted_doubler: Path, make_context: Any, tmp_path: Path
) -> None:
    (scripted_doubler / "model.py").write_text(EAGER_MODEL)
    config = {"pt2": {"compile": {"enable": True, "backend": "eager"}}}
    handler = BaseHandler()
    handler.initialize(make_context(scripted_doubler, model={"modelFile": "model.py"}, config=config))
    assert isinstance(handler.model, torch._dynamo.eval_frame.OptimizedModule)
    assert handler.model(torch.ones(1)).tolist() == [3.0]


@pytest.mark.parametrize(
    ("pt2", "said"),
    [("eager", "backend eager"), ({"backend": "eager", "dynamic": True}, "backend eager, dynamic True")],
)
def test_the_log_has_torchserves_line_about_how_a_model_was_compiled(
    tmp_path: Path, make_context: Any, caplog: pytest.LogCaptureFixture, pt2: object, said: str
) -> None:
    (tmp_path / "model.py").write_text(EAGER_MODEL)
    caplog.set_level("INFO")
    BaseHandler().initialize(make_context(tmp_path, model={"modelFile": "model.py"}, config={"pt2": pt2}))
    assert f"Compiled model with {said}" in caplog.messages


def test_a_failed_compilation_falls_back_to_the_model(
    scripted_doubler: Path, make_context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"pt2": {"compile": {"enable": True, "mode": "warp-speed"}}}
    handler = BaseHandler()
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"}, config=config)
    handler.initialize(context)
    assert handler.model(torch.ones(1)).tolist() == [2.0]
    assert "proceeding without compilation" in caplog.text


def test_the_config_chooses_the_engine_for_int8(scripted_doubler: Path, make_context: Any) -> None:
    config = {"torchscript": {"quantized_engine": "abacus"}}
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"}, config=config)
    with pytest.raises(ValueError, match="abacus"):
        BaseHandler().initialize(context)


def test_describe_and_explain_are_chosen_by_header(doubler: tuple[BaseHandler, Any], begin: Any) -> None:
    handler, context = doubler
    begin(context, 1, describe="True")
    assert handler.handle([[1.0]], context) == [None]
    begin(context, 1, describe="False", explain="True")
    with pytest.raises(PredictionException, match="BaseHandler gives no explanations") as refused:
        handler.handle([[1.0]], context)
    assert refused.value.error_code == 400


def test_explanations_get_input_and_target(doubler: tuple[BaseHandler, Any], begin: Any) -> None:
    class Explained(BaseHandler):
        def preprocess(self, data: Any) -> Any:
            return "prepared"

        def get_insights(self, prepared: Any, inputs: Any, target: Any) -> list[Any]:
            return [(prepared, inputs, target)]

    handler, context = Explained(), doubler[1]
    begin(context, 1, explain="True")
    assert handler.handle([{"body": "raw", "target": 2}], context) == [("prepared", "raw", 2)]
    assert handler.handle([{"data": "raw"}], context) == [("prepared", "raw", 0)]
    assert handler.explain


def test_the_profiler_writes_a_trace_and_changes_no_answer(
    doubler: tuple[BaseHandler, Any], begin: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handler, context = doubler
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "true")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    begin(context, 1)
    assert handler.handle([[1.0]], context) == [[2.0]]
    assert list((tmp_path / "pytorch_profiler" / "m").glob("*.json"))


@pytest.mark.parametrize("packed_as", ["packed", None])
def test_traces_are_filed_under_the_name_the_archive_was_packed_with(
    doubler: tuple[BaseHandler, Any], begin: Any, monkeypatch: pytest.MonkeyPatch, packed_as: str | None
) -> None:
    handler, context = doubler
    folder = context.system_properties["model_dir"]
    context.manifest["model"]["modelName"] = packed_as
    monkeypatch.setenv("ENABLE_TORCH_PROFILER", "true")
    monkeypatch.setattr("tempfile.gettempdir", lambda: folder)
    begin(context, 1)
    handler.handle([[1.0]], context)
    assert [path.name for path in Path(folder, "pytorch_profiler").iterdir()] == [packed_as or "m"]


def test_stages_are_timed_when_the_config_says_so(
    scripted_doubler: Path, make_context: Any, begin: Any
) -> None:
    config = {"handler": {"profile": True}}
    context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"}, config=config)
    entry_point = load_entry_point("base_handler", context)
    begin(context, 1)
    entry_point([[1.0]], context)
    names = [sample.name for sample in context.metrics.drain()]
    assert names == ["ts_handler_preprocess", "ts_handler_inference", "ts_handler_postprocess", "HandlerTime"]


def test_instances_in_many_threads_share_one_copy_of_the_weights(
    scripted_doubler: Path, make_context: Any
) -> None:
    shared = SharedModels()
    together = threading.Barrier(4)

    def load(_: int) -> BaseHandler:
        model = {"serializedFile": "doubler.pt"}
        context = make_context(scripted_doubler, model=model, shared_models=shared, metrics=MetricsCache("m"))
        handler = BaseHandler()
        together.wait()
        handler.initialize(context)
        return handler

    with ThreadPoolExecutor(4) as pool:
        handlers = list(pool.map(load, range(4)))
        assert all(handler.model is handlers[0].model for handler in handlers)
        answers = pool.map(lambda handler: handler.inference(torch.ones(8)).tolist(), handlers * 25)
        assert all(answer == [2.0] * 8 for answer in answers)


def test_eager_models_are_shared_too(tmp_path: Path, make_context: Any) -> None:
    (tmp_path / "model.py").write_text(EAGER_MODEL)
    shared = SharedModels()
    handlers = [BaseHandler(), BaseHandler()]
    for handler in handlers:
        handler.initialize(make_context(tmp_path, model={"modelFile": "model.py"}, shared_models=shared))
    assert handlers[0].model is handlers[1].model


def test_a_loader_of_ones_own_is_not_shared(scripted_doubler: Path, make_context: Any) -> None:
    class Own(BaseHandler):
        def _load_torchscript_model(self, model_pt_path: str) -> Any:
            return torch.nn.Dropout(0.5)

    shared = SharedModels()
    handlers = [Own(), Own()]
    for handler in handlers:
        context = make_context(scripted_doubler, model={"serializedFile": "doubler.pt"}, shared_models=shared)
        handler.initialize(context)
    assert handlers[0].model is not handlers[1].model
    assert not handlers[0].model.training


class ProbeHandler(BaseHandler):
    """Gives the probe its other inputs, and takes one of its outputs."""

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return super().inference(data, torch.tensor([3]), scale=torch.tensor(2.0))["y"]


@pytest.mark.filterwarnings("ignore")
def test_a_package_compiled_ahead_of_time_answers_like_its_model(
    probe_archive: Path, make_context: Any, begin: Any
) -> None:
    handler = ProbeHandler()
    context = make_context(probe_archive, model={"serializedFile": "probe.pt2"})
    handler.initialize(context)
    begin(context, 3)
    rows = torch.rand(3, 256)
    answer = handler.handle(rows.tolist(), context)
    model = torch.export.load(probe_archive / "probe.exported.pt2").module()
    expected = model(rows, torch.tensor([3]), scale=torch.tensor(2.0))["y"]
    assert torch.allclose(torch.tensor(answer), expected, atol=1e-4)


class OwnBuffer(torch.nn.Module):
    """Computes in a buffer of its own, and gives that."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last.copy_(x)


def test_an_answer_in_a_models_own_buffer_is_not_changed_by_another_executor(
    tmp_path: Path, make_context: Any
) -> None:
    torch.jit.script(OwnBuffer().eval()).save(str(tmp_path / "m.pt"))
    shared = SharedModels()

    def handler() -> BaseHandler:
        loaded = BaseHandler()
        loaded.initialize(make_context(tmp_path, model={"serializedFile": "m.pt"}, shared_models=shared))
        return loaded

    first, second = handler(), handler()
    answer = first.inference(torch.ones(1))
    second.inference(torch.zeros(1))
    assert answer.tolist() == [1.0]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers are given a GPU, as on a server that has some; there is none."""
    gpu = torch.device("cuda:0")
    monkeypatch.setattr("torchere.handlers.base.choose_device", lambda *_: gpu)


@pytest.mark.usefixtures("on_gpu")
def test_a_package_compiled_for_the_cpu_stays_there_on_a_server_with_gpus(
    probe_archive: Path, make_context: Any
) -> None:
    handler = BaseHandler()
    handler.initialize(make_context(probe_archive, model={"serializedFile": "probe.pt2"}))
    assert (handler.map_location, handler.get_device()) == ("cpu", torch.device("cpu"))
    answer = handler.inference(torch.ones(2, 256), torch.tensor([3]), scale=torch.tensor(1.0))
    assert answer["pair"][0].tolist() == [4]


@pytest.mark.usefixtures("on_gpu")
def test_int8_torchscript_stays_on_the_cpu_of_a_server_with_gpus(
    scripted_doubler: Path, make_context: Any
) -> None:
    config = {"torchscript": {"quantized_engine": torch.backends.quantized.engine}}
    handler = BaseHandler()
    handler.initialize(make_context(scripted_doubler, model={"serializedFile": "doubler.pt"}, config=config))
    assert (handler.map_location, handler.get_device()) == ("cpu", torch.device("cpu"))
    assert handler.inference(handler.preprocess([[1.5]])).tolist() == [[3.0]]


@pytest.fixture
def on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers are given a device from which nothing can be copied back."""
    other = torch.device("meta")
    monkeypatch.setattr("torchere.handlers.base.choose_device", lambda *_: other)


@pytest.mark.usefixtures("on_another")
def test_the_weights_of_an_eager_model_go_to_the_device_once(tmp_path: Path, make_context: Any) -> None:
    (tmp_path / "model.py").write_text(EAGER_MODEL)
    torch.save({"factor": torch.tensor(5.0)}, tmp_path / "w.pth")
    handler = BaseHandler()
    handler.initialize(make_context(tmp_path, model={"modelFile": "model.py", "serializedFile": "w.pth"}))
    assert handler.model.factor.device.type == "meta"


@pytest.mark.usefixtures("on_another")
def test_a_model_that_is_all_buffers_is_moved_to_the_device(tmp_path: Path, make_context: Any) -> None:
    class Own(BaseHandler):
        def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str | None) -> Any:
            return OwnBuffer()

    handler = Own()
    handler.initialize(make_context(tmp_path, model={"modelFile": "net.py"}))
    assert handler.model.last.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and -m gpu")
@pytest.mark.parametrize("config", [{}, {"autocast": "bfloat16"}, {"autocast": "float16"}])
def test_executors_in_threads_share_a_model_on_a_gpu(
    config: dict[str, Any], tmp_path: Path, make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchere.handlers.base.choose_device", lambda *_: choose_device(0))
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).eval()
    torch.jit.script(model).save(str(tmp_path / "m.pt"))
    rows = torch.rand(128, 256)  # large enough for pinned memory
    shared = SharedModels()

    def answers(_: int) -> list[torch.Tensor]:
        own_stream(0)
        handler = BaseHandler()
        files = {"serializedFile": "m.pt"}
        handler.initialize(make_context(tmp_path, model=files, config=config, shared_models=shared))
        return [handler.inference(rows).cpu() for _ in range(5)]  # it is compiled for them meanwhile

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(answers, range(2)))
    expected = model(rows).detach()
    assert all(torch.allclose(answer, expected, atol=0.02) for each in found for answer in each)
