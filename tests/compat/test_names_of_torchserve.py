"""Every module of TorchServe 0.12.0 and its archivers, and the public names in it, outside a server.

A superset of what TorchServe's examples, documentation and tests import. Each name resolves where
`torchere-ts` is installed, or stands below with the reason why it makes no sense there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

COMPAT = Path(__file__).parents[2] / "compat"
WORKER = "it runs TorchServe's worker process, which torchere has none of"
OLD = "it is of MXNet Model Server, TorchServe's predecessor"
DALI = "it needs NVIDIA DALI"
PART = "a part of the function beside it, which no file outside that module imports"
ARCHIVER = "a constant of how the archiver works inside"
# Whole modules, and those names of the others that are not there.
WITHOUT_MODULES = {
    "ts.async_service": WORKER,
    "ts.model_service_worker": WORKER,
    "ts.utils.setup_model_venv": "TorchServe's server starts it as a program to make virtual environments",
    "ts.model_service": OLD,
    "ts.model_service.model_service": OLD,
    "ts.handler_utils.preprocess": DALI,
    "ts.handler_utils.preprocess.dali": DALI,
    "ts.torch_handler.dali_handler": DALI,
    "ts.torch_handler.dali_image_classifier": DALI,
    "ts.torch_handler.trt_llm_handler": "it needs TensorRT-LLM",
    "ts.torch_handler.vllm_handler": "it needs vLLM; a copy of it in an archive is served",
    "workflow_archiver.manifest_components": ARCHIVER,
    "workflow_archiver.manifest_components.manifest": ARCHIVER,
    "workflow_archiver.manifest_components.workflow": ARCHIVER,
}
WITHOUT_NAMES = {
    "ts.handler_utils.distributed.deepspeed": {"create_checkpoints_json": PART},
    "ts.handler_utils.distributed.pt_pippy": {"pippy_installed": "PiPPy is archived"},
    "ts.handler_utils.micro_batching": dict.fromkeys(
        ("HANDLER_METHODS", "PROFILER_AVAILABLE", "WorkerThread", "execute_call"), PART
    ),
    "ts.launcher": dict.fromkeys(("PrintTillTheEnd", "Tee"), PART),
    "ts.llm_launcher": dict.fromkeys(
        ("create_mar_file", "create_tensorrt_llm_engine"), "it packs the handler of an engine"
    ),
    "ts.metrics.metric": {"MetricUnit": "an instance of `Units`"},
    "ts.metrics.metric_abstract": {"MetricUnit": "an instance of `Units`"},
    "ts.model_server": dict.fromkeys(("TS_NAMESPACE", "load_properties"), "they start the JVM"),
    "ts.protocol.otf_message_handler": dict.fromkeys(
        (
            *(
                "END_OF_LIST",
                "LOAD_MSG",
                "PREDICT_MSG",
                "RESPONSE",
                "bool_size",
                "create_load_model_response",
            ),
            *("create_predict_response", "encode_response_headers", "int_size", "retrieve_msg"),
        ),
        WORKER,
    ),
    "ts.torch_handler.base_handler": {"setup_ort_session": PART},
    "ts.torch_handler.text_handler": {"CONTRACTIONS_PATTERN": PART},
    "ts.version": {"version_path": PART},
    "model_archiver": {"version": PART},
    "model_archiver.model_packaging_utils": dict.fromkeys(
        (
            *("MANIFEST_FILE_NAME", "MAR_INF", "MODEL_ARCHIVE_VERSION", "MODEL_SERVER_VERSION"),
            *("archiving_options", "model_handlers"),
        ),
        ARCHIVER,
    ),
    "model_archiver.version": {"version_path": PART},
    "workflow_archiver": {"version": PART},
    "workflow_archiver.version": {"version_path": PART},
    "workflow_archiver.workflow_packaging_utils": dict.fromkeys(("MANIFEST_FILE_NAME", "WAR_INF"), ARCHIVER),
}
NAMES = """
ts: __version__ version
ts.arg_parser: ArgParser
ts.async_service: AsyncService predict
ts.context: Context RequestProcessor
ts.handler_utils:
ts.handler_utils.distributed:
ts.handler_utils.distributed.deepspeed: create_checkpoints_json get_ds_engine
ts.handler_utils.distributed.pt_pippy: get_pipeline_driver initialize_rpc_workers pippy_installed
ts.handler_utils.hf_batch_streamer: TextIteratorStreamerBatch
ts.handler_utils.micro_batching: HANDLER_METHODS MicroBatching PROFILER_AVAILABLE WorkerThread
  execute_call
ts.handler_utils.preprocess:
ts.handler_utils.preprocess.dali: get_dali_pipeline
ts.handler_utils.text_utils: get_tokenizer ngrams_iterator
ts.handler_utils.timer: timed
ts.handler_utils.utils: import_class send_intermediate_predict_response
ts.launcher: PrintTillTheEnd Tee register_model register_model_with_params start stop
ts.llm_launcher: create_mar_file create_tensorrt_llm_engine get_model_config main
ts.metrics: dimension metric metric_encoder metrics_store system_metrics unit
ts.metrics.caching_metric: CachingMetric
ts.metrics.dimension: Dimension
ts.metrics.metric: Metric MetricUnit
ts.metrics.metric_abstract: MetricAbstract MetricUnit
ts.metrics.metric_cache_abstract: MetricCacheAbstract
ts.metrics.metric_cache_errors: GeneralMetricsCacheError MetricsCacheIOError MetricsCacheKeyError
  MetricsCachePyYamlError MetricsCacheTypeError MetricsCacheValueError
ts.metrics.metric_cache_yaml_impl: MetricsCacheYamlImpl
ts.metrics.metric_collector:
ts.metrics.metric_encoder: MetricEncoder
ts.metrics.metric_type_enum: MetricTypes
ts.metrics.metrics_store: MetricsStore
ts.metrics.process_memory_metric: check_process_mem_usage get_cpu_usage
ts.metrics.system_metrics: collect_all cpu_utilization dimension disk_available disk_used
  disk_utilization gpu_utilization memory_available memory_used memory_utilization system_metrics
ts.metrics.unit: Units
ts.model_loader: ModelLoader ModelLoaderFactory TsModelLoader
ts.model_server: TS_NAMESPACE load_properties start
ts.model_service: model_service
ts.model_service.model_service: ModelService SingleNodeService
ts.model_service_worker: BENCHMARK DEBUG LOCAL_RANK LOCAL_WORLD_SIZE MAX_FAILURE_THRESHOLD
  SOCKET_ACCEPT_TIMEOUT TorchModelServiceWorker WORLD_RANK WORLD_SIZE
ts.protocol:
ts.protocol.otf_message_handler: END_OF_LIST LOAD_MSG PREDICT_MSG RESPONSE bool_size
  create_load_model_response create_predict_response encode_response_headers int_size retrieve_msg
  send_intermediate_predict_response
ts.service: PREDICTION_METRIC Service emit_metrics
ts.torch_handler:
ts.torch_handler.base_handler: BaseHandler ONNX_AVAILABLE XLA_AVAILABLE setup_ort_session
ts.torch_handler.contractions: CONTRACTION_MAP
ts.torch_handler.dali_handler: DALIHandler
ts.torch_handler.dali_image_classifier: DALIImageClassifier
ts.torch_handler.densenet_handler: DenseNetHandler list_classes_from_module
ts.torch_handler.distributed:
ts.torch_handler.distributed.base_deepspeed_handler: BaseDeepSpeedHandler
ts.torch_handler.distributed.base_pippy_handler: BasePippyHandler
ts.torch_handler.image_classifier: ImageClassifier
ts.torch_handler.image_segmenter: ImageSegmenter
ts.torch_handler.object_detector: ObjectDetector
ts.torch_handler.request_envelope:
ts.torch_handler.request_envelope.base: BaseEnvelope
ts.torch_handler.request_envelope.body: BodyEnvelope
ts.torch_handler.request_envelope.json: JSONEnvelope
ts.torch_handler.request_envelope.kserve: KServeEnvelope
ts.torch_handler.request_envelope.kservev2: KServev2Envelope
ts.torch_handler.text_classifier: TextClassifier
ts.torch_handler.text_handler: CONTRACTIONS_PATTERN TextHandler
ts.torch_handler.trt_llm_handler: TRTLLMHandler
ts.torch_handler.vision_handler: VisionHandler
ts.torch_handler.vllm_handler: VLLMHandler
ts.utils:
ts.utils.hf_utils: download_model
ts.utils.setup_model_venv: create_venv inherit_site_packages
ts.utils.timeit_decorator: timeit
ts.utils.util: CLEANUP_REGEX PT2Backend PredictionException check_valid_pt2_backend deprecated
  get_yaml_config list_classes_from_module load_label_mapping map_class_to_label
ts.version: __version__ version_path
model_archiver: ModelArchiver ModelArchiverConfig __version__ version
model_archiver.arg_parser: ArgParser
model_archiver.manifest_components:
model_archiver.manifest_components.manifest: Manifest RuntimeType
model_archiver.manifest_components.model: Model
model_archiver.model_archiver: ModelArchiver
model_archiver.model_archiver_config: ModelArchiverConfig
model_archiver.model_archiver_error: ModelArchiverError
model_archiver.model_packaging: generate_model_archive package_model
model_archiver.model_packaging_utils: MANIFEST_FILE_NAME MAR_INF MODEL_ARCHIVE_VERSION
  MODEL_SERVER_VERSION ModelExportUtils archiving_options model_handlers
model_archiver.version: __version__ version_path
workflow_archiver: __version__ version
workflow_archiver.arg_parser: ArgParser
workflow_archiver.manifest_components:
workflow_archiver.manifest_components.manifest: Manifest
workflow_archiver.manifest_components.workflow: Workflow
workflow_archiver.version: __version__ version_path
workflow_archiver.workflow_archiver_error: WorkflowArchiverError
workflow_archiver.workflow_packaging: generate_workflow_archive package_workflow
workflow_archiver.workflow_packaging_utils: MANIFEST_FILE_NAME WAR_INF WorkflowExportUtils
"""
ASKING = """
import importlib, json, sys
import torchere_ts
torchere_ts.install()
missing = {}
for module, names in json.load(sys.stdin).items():
    try:
        found = importlib.import_module(module)
    except ImportError:
        missing[module] = None
        continue
    if lacking := [name for name in names if not hasattr(found, name)]:
        missing[module] = lacking
print(json.dumps(missing))
"""


def test_each_name_resolves_or_has_a_reason(tmp_path: Path) -> None:
    lines = NAMES.replace("\n  ", " ").strip().splitlines()
    names = {module: found.split() for module, _, found in (line.partition(":") for line in lines)}
    environment = {**os.environ, "PYTHONPATH": str(COMPAT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASKING],
        input=json.dumps(names),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    without = {**dict.fromkeys(WITHOUT_MODULES), **{name: list(each) for name, each in WITHOUT_NAMES.items()}}
    assert json.loads(done.stdout.splitlines()[-1]) == without
