"""Every module of TorchServe 0.12.0 and its archivers, its public names and their methods, outside a server.

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
    "ts.arg_parser": {"ArgParser.model_service_worker_args": WORKER},
    "ts.handler_utils.distributed.deepspeed": {"create_checkpoints_json": PART},
    "ts.handler_utils.distributed.pt_pippy": {"pippy_installed": "PiPPy is archived"},
    "ts.handler_utils.micro_batching": dict.fromkeys(
        ("HANDLER_METHODS", "PROFILER_AVAILABLE", "WorkerThread", "execute_call"), PART
    ),
    "ts.launcher": dict.fromkeys(("PrintTillTheEnd", "Tee"), PART),
    "ts.llm_launcher": dict.fromkeys(
        ("create_mar_file", "create_tensorrt_llm_engine"), "it packs the handler of an engine"
    ),
    "ts.metrics.caching_metric": {"CachingMetric.emit_metrics": PART},
    "ts.metrics.metric_cache_abstract": {"MetricCacheAbstract.initialize_cache": "an abstract method"},
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
    "ts.torch_handler.text_classifier": {"TextClassifier.get_insights": "see `docs/differences.md`"},
    "ts.torch_handler.text_handler": {"CONTRACTIONS_PATTERN": PART},
    "ts.version": {"version_path": PART},
    "model_archiver": {"version": PART},
    "model_archiver.model_packaging_utils": dict.fromkeys(
        (
            *("MANIFEST_FILE_NAME", "MAR_INF", "MODEL_ARCHIVE_VERSION", "MODEL_SERVER_VERSION"),
            *("archiving_options", "model_handlers"),
            *(f"ModelExportUtils.{name}" for name in ("get_archive_export_path", "check_mar_already_exists")),
            *(f"ModelExportUtils.{name}" for name in ("find_unique", "clean_temp_files", "make_dir")),
            *(f"ModelExportUtils.{name}" for name in ("copy_artifacts", "archive", "archive_dir")),
            *(f"ModelExportUtils.{name}" for name in ("directory_filter", "file_filter")),
            "ModelExportUtils.check_model_name_regex_or_exit",
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
METHODS = """
model_archiver.arg_parser.ArgParser: export_model_args_parser
model_archiver.model_archiver.ModelArchiver: generate_model_archive
model_archiver.model_archiver_config.ModelArchiverConfig: from_args
model_archiver.model_packaging_utils.ModelExportUtils: get_archive_export_path check_mar_already_exists
  find_unique generate_model generate_manifest_json clean_temp_files make_dir copy_artifacts archive
  archive_dir directory_filter file_filter check_model_name_regex_or_exit validate_inputs
ts.arg_parser.ArgParser: ts_parser model_service_worker_args extract_args
ts.context.Context: get_request_id get_request_header get_all_request_header set_response_content_type
  get_response_content_type get_response_status set_response_status set_all_response_status
  get_response_headers set_response_header get_sequence_id
ts.context.RequestProcessor: get_request_property report_status get_response_status_code
  get_response_status_phrase add_response_property get_response_headers get_response_header
  get_request_properties
ts.handler_utils.hf_batch_streamer.TextIteratorStreamerBatch: put end
ts.handler_utils.micro_batching.MicroBatching: shutdown handle get_micro_batch_idx
ts.metrics.caching_metric.CachingMetric: emit_metrics add_or_update update
ts.metrics.dimension.Dimension: to_dict
ts.metrics.metric.Metric: update reset to_dict
ts.metrics.metric_abstract.MetricAbstract: add_or_update
ts.metrics.metric_cache_abstract.MetricCacheAbstract: set_request_ids add_metric add_counter add_time
  add_size add_percent add_error initialize_cache get_metric add_metric_to_cache
ts.metrics.metric_cache_yaml_impl.MetricsCacheYamlImpl: initialize_cache add_metric_to_cache get_metric
  cache_keys
ts.metrics.metric_encoder.MetricEncoder: default
ts.metrics.metrics_store.MetricsStore: add_counter add_time add_size add_percent add_error add_metric
ts.model_loader.ModelLoaderFactory: get_model_loader
ts.model_loader.ModelLoader: load
ts.model_loader.TsModelLoader: load
ts.torch_handler.base_handler.BaseHandler: initialize preprocess inference postprocess handle
  explain_handle describe_handle get_device
ts.torch_handler.densenet_handler.DenseNetHandler: initialize inference handle
ts.torch_handler.distributed.base_deepspeed_handler.BaseDeepSpeedHandler: initialize
ts.torch_handler.distributed.base_pippy_handler.BasePippyHandler: initialize
ts.torch_handler.image_classifier.ImageClassifier: set_max_result_classes get_max_result_classes
  postprocess
ts.torch_handler.image_segmenter.ImageSegmenter: postprocess
ts.torch_handler.object_detector.ObjectDetector: initialize postprocess
ts.torch_handler.request_envelope.base.BaseEnvelope: handle parse_input format_output
ts.torch_handler.request_envelope.body.BodyEnvelope: parse_input format_output
ts.torch_handler.request_envelope.json.JSONEnvelope: parse_input format_output
ts.torch_handler.request_envelope.kserve.KServeEnvelope: parse_input format_output
ts.torch_handler.request_envelope.kservev2.KServev2Envelope: parse_input format_output
ts.torch_handler.text_classifier.TextClassifier: preprocess inference postprocess get_insights
ts.torch_handler.text_handler.TextHandler: initialize get_source_vocab_path get_word_token
  summarize_attributions
ts.torch_handler.vision_handler.VisionHandler: initialize preprocess get_insights
workflow_archiver.workflow_packaging_utils.WorkflowExportUtils: generate_manifest_json validate_inputs
"""
ASKING = """
import importlib, json, operator, sys
import torchere_ts
torchere_ts.install()
missing = {}
for module, names in json.load(sys.stdin).items():
    try:
        found = importlib.import_module(module)
    except ImportError:
        missing[module] = None
        continue
    for name in names:
        try:
            operator.attrgetter(name)(found)
        except AttributeError:
            missing.setdefault(module, []).append(name)
print(json.dumps(missing))
"""


def _table(text: str) -> list[tuple[str, list[str]]]:
    lines = [line.partition(":") for line in text.replace("\n  ", " ").strip().splitlines()]
    return [(name, found.split()) for name, _, found in lines]


def test_each_name_resolves_or_has_a_reason(tmp_path: Path) -> None:
    names = dict(_table(NAMES))
    for name, methods in _table(METHODS):
        module, _, its_class = name.rpartition(".")
        names[module] += [f"{its_class}.{method}" for method in methods]
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
