"""Resolves `import ts...` to torchere's classes, without TorchServe; likewise imports of SageMaker's toolkit.

Handlers written for TorchServe import from `ts`. After `install()` those imports resolve as in the table
`ALIASES`. Modules in `NOT_SHIPPED` raise an ImportError with the reason, instead of "No module named".
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType

__version__ = "0.12.0"  # the TorchServe version whose contract the aliases keep, not torchere's own
_HANDLERS = "torchere.handlers."

# Module path under `ts` or in SageMaker's toolkit -> its names, by the module of torchere's handlers that
# defines them: "Name", "Name as Alias", or "*" for all public ones.
ALIASES: dict[str, dict[str, str]] = {
    "ts": {"ts_compat.alias": "__version__"},
    "ts.version": {"ts_compat.alias": "__version__"},
    "ts.context": {"context": "Context, RequestProcessor"},
    "ts.service": {"ts_compat.legacy": "emit_metrics, PREDICTION_METRIC", "errors": "PredictionException"},
    "ts.torch_handler.base_handler": {
        "base": "*",
        "ts_compat.legacy": (
            "PROFILER_AVAILABLE, XLA_AVAILABLE, PT2_AVAILABLE, PT230_AVAILABLE, ONNX_AVAILABLE"
        ),
        "loading.compile": "IPEX_AVAILABLE",
    },
    "ts.torch_handler.vision_handler": {"vision": "*"},
    # Of handlers the base class and its own: scripts take the last class that derives from `VisionHandler`.
    "ts.torch_handler.image_classifier": {
        "vision": "VisionHandler",
        "vision.tasks": "torch, map_class_to_label, ImageClassifier",
    },
    "ts.torch_handler.image_segmenter": {
        "vision": "VisionHandler",
        "vision.tasks": "torch, ImangeSegmenter, ImageSegmenter",
    },
    "ts.torch_handler.object_detector": {
        "vision": "VisionHandler",
        "vision.tasks": "torch, map_class_to_label, ObjectDetector",
    },
    "ts.torch_handler.text_handler": {"text": "*"},
    "ts.torch_handler.text_classifier": {"text": "*"},
    "ts.torch_handler.densenet_handler": {
        "densenet": "DenseNetHandler",
        "resolve": "list_classes_from_module",
    },
    "ts.torch_handler.distributed.base_pippy_handler": {"ts_compat.distributed": "BasePippyHandler"},
    "ts.torch_handler.distributed.base_deepspeed_handler": {"ts_compat.distributed": "BaseDeepSpeedHandler"},
    "ts.torch_handler.contractions": {"text": "CONTRACTIONS as CONTRACTION_MAP"},
    "ts.torch_handler.unit_tests.test_utils.mock_context": {"ts_compat.legacy": "MockContext"},
    "ts.torch_handler.unit_tests.test_utils.model_dir": {"ts_compat.legacy": "copy_files, download_model"},
    "ts.torch_handler.request_envelope.base": {"envelopes": "BaseEnvelope"},
    "ts.torch_handler.request_envelope.body": {"envelopes": "BodyEnvelope"},
    "ts.torch_handler.request_envelope.json": {"envelopes": "JSONEnvelope"},
    "ts.torch_handler.request_envelope.kserve": {"envelopes": "KServeEnvelope"},
    "ts.torch_handler.request_envelope.kservev2": {"envelopes": "KServev2Envelope"},
    "ts.handler_utils.utils": {
        "context": "send_intermediate_predict_response",
        "ts_compat.legacy": "import_class",
    },
    "ts.handler_utils.micro_batching": {"micro_batching": "MicroBatching"},
    "ts.handler_utils.text_utils": {"text": "ngrams_iterator, get_tokenizer"},
    "ts.handler_utils.distributed.pt_pippy": {
        "ts_compat.distributed": "get_pipeline_driver, initialize_rpc_workers",
    },
    "ts.handler_utils.distributed.deepspeed": {"ts_compat.distributed": "get_ds_engine"},
    "ts.handler_utils.timer": {"metrics": "timed"},
    "ts.handler_utils.hf_batch_streamer": {"text.streamer": "TextIteratorStreamerBatch"},
    "ts.protocol.otf_message_handler": {"context": "send_intermediate_predict_response"},
    "ts.utils.util": {
        "errors": "PredictionException",
        "labels": "load_label_mapping, map_class_to_label",
        "text": "CLEANUP_REGEX",
        "resolve": "list_classes_from_module",
        "loading.compile": "check_valid_pt2_backend, PT2Backend",
        "ts_compat.legacy": "get_yaml_config, deprecated",
    },
    "ts.utils.timeit_decorator": {"ts_compat.legacy": "timeit"},
    "ts.metrics.dimension": {"metrics": "Dimension"},
    "ts.metrics.unit": {"metrics": "Units"},
    "ts.metrics.metric_type_enum": {"metrics": "MetricTypes"},
    "ts.metrics.metric": {"ts_compat.legacy": "Metric"},
    # Each function here but `collect_all` is a sampler: scripts call all that they find.
    "ts.metrics.system_metrics": {
        "ts_compat.system_metrics": (
            "collect_all, dimension, system_metrics, cpu_utilization, gpu_utilization, "
            "memory_available, memory_used, memory_utilization, disk_available, disk_used, "
            "disk_utilization"
        ),
        "metrics": "Dimension",
        "ts_compat.legacy": "Metric",
    },
    "ts.metrics.process_memory_metric": {
        "ts_compat.system_metrics": "check_process_mem_usage, get_cpu_usage",
    },
    "ts.metrics.metrics_store": {"ts_compat.legacy": "MetricsStore"},
    "ts.metrics.caching_metric": {"metrics": "CachingMetric"},
    "ts.metrics.metric_abstract": {"metrics": "CachingMetric as MetricAbstract"},
    "ts.metrics.metric_encoder": {"ts_compat.legacy": "MetricEncoder"},
    "ts.metrics.metric_cache_abstract": {"metrics": "MetricsCache as MetricCacheAbstract"},
    "ts.metrics.metric_cache_yaml_impl": {"ts_compat.legacy": "MetricsCacheYamlImpl"},
    "ts.metrics.metric_cache_errors": {
        "errors": (
            "MetricsCacheTypeError, MetricsCacheKeyError, MetricsCacheValueError, "
            "MetricsCachePyYamlError, MetricsCacheIOError, "
            "MetricsCacheError as GeneralMetricsCacheError"
        ),
    },
    "sagemaker_inference.content_types": {
        "sagemaker.toolkit": "JSON, CSV, OCTET_STREAM, ANY, NPY, NPZ, UTF8_TYPES",
    },
    "sagemaker_inference.decoder": {
        "sagemaker.toolkit": (
            "decode, _decoder_map, _json_to_numpy, _csv_to_numpy, _npy_to_numpy, _npz_to_sparse"
        ),
    },
    "sagemaker_inference.encoder": {
        "sagemaker.toolkit": (
            "encode, SUPPORTED_CONTENT_TYPES, _encoder_map, _array_to_json, _array_to_npy, _array_to_csv"
        ),
    },
    "sagemaker_inference.environment": {"sagemaker.toolkit": "Environment, base_dir, model_dir, code_dir"},
    "sagemaker_inference.logging": {"sagemaker.toolkit": "get_logger, configure_logger"},
    "sagemaker_inference.parameters": {
        "sagemaker.toolkit": (
            "BASE_PATH_ENV, USER_PROGRAM_ENV, LOG_LEVEL_ENV, DEFAULT_INVOCATIONS_ACCEPT_ENV, "
            "MODEL_SERVER_WORKERS_ENV, MODEL_SERVER_TIMEOUT_ENV, MODEL_SERVER_TIMEOUT_SECONDS_ENV, "
            "STARTUP_TIMEOUT_ENV, BIND_TO_PORT_ENV, SAFE_PORT_RANGE_ENV, MULTI_MODEL_ENV, MAX_REQUEST_SIZE"
        ),
    },
    "sagemaker_inference.errors": {
        "sagemaker.toolkit": (
            "UnsupportedFormatError, BaseInferenceToolkitError, GenericInferenceToolkitError"
        ),
    },
    "sagemaker_inference.utils": {
        "sagemaker.toolkit": (
            "parse_accept, retrieve_content_type_header, read_file, write_file, remove_crlf"
        ),
    },
    "sagemaker_inference.default_handler_service": {"sagemaker.transformer": "DefaultHandlerService"},
    "sagemaker_inference.default_inference_handler": {"sagemaker.transformer": "DefaultInferenceHandler"},
    "sagemaker_inference.transformer": {"sagemaker.transformer": "Transformer"},
    "sagemaker_pytorch_serving_container.default_pytorch_inference_handler": {
        "sagemaker.transformer": "DefaultPytorchInferenceHandler, DEFAULT_MODEL_FILENAME",
        "sagemaker.toolkit": "ModelLoadError",
    },
    "sagemaker_pytorch_serving_container.handler_service": {
        "sagemaker": "SageMakerHandler as HandlerService",
    },
}

# Module path under `ts` -> why torchere does not have it, and the alternative.
NOT_SHIPPED: dict[str, str] = {
    "ts.torch_handler.dali_handler": "it needs NVIDIA DALI; decode with torchere.handlers.vision.decode",
    "ts.torch_handler.dali_image_classifier": "it needs NVIDIA DALI; use image_classifier",
    "ts.torch_handler.vllm_handler": "it needs vLLM; run the vLLM server beside this one",
    "ts.torch_handler.trt_llm_handler": "it needs TensorRT-LLM; run its own server beside this one",
    "ts.handler_utils.preprocess": "it needs NVIDIA DALI; decode with torchere.handlers.vision.decode",
    "ts.launcher": "start and stop the server with `torchserve --start` and `torchserve --stop`",
}


_PACKAGES = {
    package
    for module in (*ALIASES, *NOT_SHIPPED)
    for package in accumulate(module.split(".")[:-1], "{}.{}".format)
}
ALIASES.update({package: {} for package in _PACKAGES - ALIASES.keys()})


def names_of(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a module of the table: torchere's module, the name in it, and the name under `ts`."""
    for ours, names in ALIASES[module].items():
        for row in names.split(", "):
            name, _, alias = row.partition(" as ")
            yield ours, name, alias or name


class _AliasImporter(Loader):
    """The meta-path finder for `ts` and everything under it, and the loader of these modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of the table; the import system sets the parameters.

        Raises:
            ImportError: the module is one of TorchServe's that torchere does not have.
        """
        if fullname in ALIASES and fullname.partition(".")[0] == "ts":
            return self._spec(fullname)
        if fullname in NOT_SHIPPED:
            raise ImportError(f"{fullname} is not part of torchere: {NOT_SHIPPED[fullname]}", name=fullname)
        return None

    def _spec(self, fullname: str) -> ModuleSpec:
        return ModuleSpec(fullname, self, origin="torchere.handlers", is_package=fullname in _PACKAGES)

    def exec_module(self, module: ModuleType) -> None:
        """Fill an alias module with the names of torchere's modules."""
        # `import ts` is enough for `ts.context.Context`: TorchServe's worker has imported `ts.context`.
        module.__getattr__ = functools.partial(_module_below, module.__name__)  # type: ignore[method-assign]
        for source, name, alias in names_of(module.__name__):
            ours = importlib.import_module(_HANDLERS + source)
            if name == "*":
                vars(module).update({k: v for k, v in vars(ours).items() if not k.startswith("_")})
            else:
                setattr(module, alias, getattr(ours, name))
        if module.__name__ == "ts.metrics.process_memory_metric":
            # Scripts look this one up in `sys.modules`, where TorchServe's `ts.metrics` has put it.
            importlib.import_module("ts.metrics.system_metrics")


class _ToolkitImporter(_AliasImporter):
    """The same for SageMaker's toolkit. It comes last, so that an installed toolkit takes precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of the table; `path` has entries if the package is another's."""
        return self._spec(fullname) if fullname in ALIASES and not path else None


def _module_below(package: str, name: str) -> ModuleType:
    if f"{package}.{name}" not in ALIASES:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return importlib.import_module(f"{package}.{name}")


_importer = _AliasImporter()
_toolkit_importer = _ToolkitImporter()


def find_spec(fullname: str) -> ModuleSpec | None:
    """Return a spec for a module of the table, for other finders; see `_AliasImporter.find_spec`."""
    return _importer.find_spec(fullname)


def install() -> None:
    """Make `import ts` resolve to torchere in this process. Idempotent and cheap: imports nothing yet.

    It takes precedence over an installed TorchServe, but modules already imported stay unchanged.
    An installed toolkit of SageMaker stays, and takes precedence.
    """
    if _importer not in sys.meta_path:
        sys.meta_path.insert(0, _importer)
    if _toolkit_importer not in sys.meta_path:
        sys.meta_path.append(_toolkit_importer)
