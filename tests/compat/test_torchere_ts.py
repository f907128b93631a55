"""The distribution `torchere-ts`: TorchServe's modules in scripts and tests outside workers."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

COMPAT = Path(__file__).parents[2] / "compat"


def run(code: str, folder: Path, *more: Path) -> str:
    """What a fresh Python prints that starts as one does where `torchere-ts` is installed."""
    code = f"import torchere_ts; torchere_ts.install()\n{code}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*more, COMPAT)))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_stays_as_quick_as_before_without_the_names(tmp_path: Path) -> None:
    found = run("import sys; print('torch' in sys.modules, 'torchere' in sys.modules)", tmp_path)
    assert found.split() == ["False", "False"]


STATEMENTS = [
    "import ts",
    "from ts import launcher",
    "from ts.launcher import register_model, register_model_with_params, start, stop",
    "from ts.context import Context, RequestProcessor",
    "from ts.service import PREDICTION_METRIC, PredictionException, Service, emit_metrics",
    "from ts.model_loader import ModelLoader, ModelLoaderFactory, TsModelLoader",
    "from ts.llm_launcher import get_model_config, main",
    "from ts.utils.hf_utils import download_model",
    "from ts.utils.util import list_classes_from_module, load_label_mapping, map_class_to_label",
    "from ts.metrics.dimension import Dimension; from ts.metrics.unit import Units",
    "from ts.metrics.metric import Metric; from ts.metrics.metric_type_enum import MetricTypes",
    "from ts.metrics.metric_encoder import MetricEncoder",
    "from ts.metrics.metric_cache_abstract import MetricCacheAbstract",
    "from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl",
    "import ts.metrics.metric_cache_errors as merrors; merrors.GeneralMetricsCacheError",
    "from ts.metrics.caching_metric import CachingMetric",
    "from ts.metrics.system_metrics import collect_all",
    "from ts.metrics.process_memory_metric import check_process_mem_usage",
    "from ts.handler_utils.timer import timed",
    "from ts.handler_utils.micro_batching import MicroBatching",
    "from ts.handler_utils.hf_batch_streamer import TextIteratorStreamerBatch",
    "from ts.handler_utils.utils import import_class, send_intermediate_predict_response",
    "from ts.protocol.otf_message_handler import send_intermediate_predict_response",
    "from ts.torch_handler.image_classifier import ImageClassifier",
    "from ts.torch_handler.image_segmenter import ImageSegmenter",
    "from ts.torch_handler.object_detector import ObjectDetector",
    "from ts.torch_handler.text_classifier import TextClassifier",
    "from ts.torch_handler.text_handler import TextHandler",
    "from ts.torch_handler.vision_handler import VisionHandler",
    "from ts.torch_handler.densenet_handler import DenseNetHandler",
    "from ts.torch_handler.request_envelope.base import BaseEnvelope",
    "from ts.torch_handler.request_envelope import json, body, kserve, kservev2",
    "from ts.torch_handler.distributed.base_pippy_handler import BasePippyHandler",
    "from ts.torch_handler.distributed.base_deepspeed_handler import BaseDeepSpeedHandler",
    "from ts.torch_handler.unit_tests.test_utils.model_dir import copy_files, download_model",
    "from ts.version import __version__",
    "import ts.model_server",
    "from ts.utils.util import get_yaml_config, PredictionException, deprecated",
    "from ts.utils.timeit_decorator import timeit",
    "from ts.handler_utils.text_utils import get_tokenizer, ngrams_iterator",
    "from ts.metrics.metrics_store import MetricsStore",
    "from ts.torch_handler.base_handler import BaseHandler, PT2_AVAILABLE, PROFILER_AVAILABLE",
    "from ts.torch_handler.base_handler import IPEX_AVAILABLE, ONNX_AVAILABLE, XLA_AVAILABLE",
    "from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext",
    "from model_archiver import ModelArchiver, ModelArchiverConfig",
    "from model_archiver.model_archiver_config import ModelArchiverConfig",
    "from model_archiver.model_packaging import generate_model_archive",
    "from model_archiver.arg_parser import ArgParser; ArgParser.export_model_args_parser()",
    "from model_archiver.manifest_components.manifest import RuntimeType",
    "from model_archiver.model_packaging import package_model",
    "from model_archiver.model_packaging_utils import ModelExportUtils",
    "from workflow_archiver.workflow_packaging import generate_workflow_archive, package_workflow",
    "from ts.arg_parser import ArgParser",
    "from ts.metrics import system_metrics",
    "from ts.utils.util import PT2Backend",
]
# All in one process: each start of one imports torch.
RESOLVING = """
import json, sys
for statement in json.loads(sys.argv[1]):
    try:
        exec(statement, {})
    except Exception as err:
        print(f"{statement}: {err!r}")
"""


def test_the_imports_of_scripts_resolve(tmp_path: Path) -> None:
    assert not run(f"import sys; sys.argv[1:] = [{json.dumps(STATEMENTS)!r}]\n{RESOLVING}", tmp_path)


SCRIPTED_HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Handler(BaseHandler):
    def initialize(self, context):
        self.config = context.model_yaml_config
    def handle(self, data, context):
        context.metrics.add_counter("Rows", len(data))
        return [(row["data"], context.get_request_header(0, "who"), self.config) for row in data]
"""


def test_a_script_loads_the_handler_of_an_archive_and_calls_it(tmp_path: Path) -> None:
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "h.py").write_text(SCRIPTED_HANDLER)
    (tmp_path / "c.yaml").write_text("answer: 42\n")
    model = {"modelName": "m", "handler": "h.py", "configFile": "c.yaml"}
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    found = run(
        "from ts.model_loader import ModelLoaderFactory\nfrom ts.service import Service\n"
        "loader = ModelLoaderFactory.get_model_loader()\n"
        f"service = loader.load('m', {str(tmp_path)!r}, 'h.py', batch_size=1)\n"
        "request = {'requestId': b'1', 'headers': [{'name': b'who', 'value': b'me'}],\n"
        "    'parameters': [{'name': 'data', 'value': 'x', 'contentType': 'text/plain'}]}\n"
        "print(service.predict([request]))\n"
        "headers, rows, ids = Service.retrieve_data_for_inference([request])\n"
        "service.context.request_ids, service.context.request_processor = ids, headers\n"
        "print(service._entry_point(rows, service.context), ids)\n",
        tmp_path,
    )
    assert found.splitlines() == [
        f"{[('x', 'me', {'answer': 42})]}",
        f"{[('x', 'me', {'answer': 42})]} {{0: '1'}}",
    ]


def test_a_script_loads_a_handler_beside_itself_and_is_refused_one_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "beside.py").write_text("def handle(data, context): return data and [context.cl_socket]\n")
    (tmp_path / "two.py").write_text("class One: pass\nclass Two: pass\n")
    found = run(
        "from ts.model_loader import ModelLoaderFactory\n"
        "loader = ModelLoaderFactory.get_model_loader()\n"
        "service = loader.load('m', 'empty', 'beside.py', batch_size=1)\n"
        "service.set_cl_socket('socket')\n"
        "print(service.predict([{'requestId': b'1', 'parameters': [{'name': 'data', 'value': 'x'}]}]))\n"
        "print(service._context is service.context)\n"
        "try:\n    loader.load('m', 'empty', 'two.py')\n"
        "except ValueError as err:\n    print(str(err)[:23])",
        tmp_path,
    )
    assert found.splitlines() == ["['socket']", "True", "Expected only one class"]


def test_a_script_constructs_contexts_and_collectors_as_with_torchserve(tmp_path: Path) -> None:
    (tmp_path / "metrics.yaml").write_text(
        "model_metrics:\n  counter:\n    - {name: Cats, unit: count, dimensions: [Level]}\n"
    )
    found = run(
        "from ts.context import Context, RequestProcessor\n"
        "from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl\n"
        "from ts.metrics.metric_cache_errors import MetricsCacheIOError\n"
        "metrics = MetricsCacheYamlImpl('metrics.yaml'); metrics.initialize_cache()\n"
        "context = Context('m', '.', None, 1, None, '1.0', metrics=metrics)\n"
        "context._request_processor = [RequestProcessor({'a': 'b'})]\n"
        "context.metrics.get_metric('Cats').add_or_update(1, ['Model'])\n"
        "print(context.get_request_header(0, 'a'), context.system_properties['server_version'])\n"
        "print(metrics.cache_keys(), metrics.drain()[0].name)\n"
        "try:\n    MetricsCacheYamlImpl('none.yaml')\nexcept MetricsCacheIOError as err:\n    print(err)\n",
        tmp_path,
    )
    assert found.splitlines()[:2] == ["b 1.0", "['counter:Cats'] Cats"]
    assert found.splitlines()[2].startswith("Error reading file none.yaml")


def test_the_launcher_for_language_models_says_what_to_run_instead(tmp_path: Path) -> None:
    found = run(
        "import runpy, sys; sys.argv = ['x', '--model_id', 'a/b']\n"
        "try:\n    runpy.run_module('ts.llm_launcher', run_name='__main__')\n"
        "except SystemExit as err:\n    print(err)",
        tmp_path,
    )
    assert found.endswith("beside it: vllm serve a/b\n")


def test_the_collector_of_samples_prints_what_the_server_reads(tmp_path: Path) -> None:
    from torchere.serving.telemetry.sampling import parse_samples

    found = run(
        "import io, runpy, sys; sys.argv, sys.stdin = ['x', '--gpu', '0'], io.StringIO('\\n')\n"
        "runpy.run_module('ts.metrics.metric_collector', run_name='__main__')",
        tmp_path,
    )
    names = {sample.name for sample in parse_samples(found)}
    assert {"CPUUtilization", "MemoryUsed", "DiskUsage"} <= names


def test_a_script_that_samples_the_host_loads_no_torch(tmp_path: Path) -> None:
    imports = "from ts.metrics.dimension import Dimension\nfrom ts.metrics.metric import Metric\n"
    found = run(f"{imports}import sys, ts.metrics.system_metrics\nprint('torch' in sys.modules)", tmp_path)
    assert found == "False\n"


# As TorchServe's example for Intel's GPUs does it: each function of the module is called, and one replaced.
COLLECTOR = """
import logging, sys, types
from ts.metrics.process_memory_metric import check_process_mem_usage
from intel_gpu import busy
from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric

logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
samples = sys.modules["ts.metrics.system_metrics"]
for each in map(samples.__dict__.get, dir(samples)):
    if isinstance(each, types.FunctionType) and each.__name__ not in ("collect_all", "gpu_utilization"):
        each()
host = [Dimension("Level", "Host"), Dimension("device_id", 0)]
for metric in (*samples.system_metrics, Metric("GPUUtilization", busy(0), "percent", host)):
    logging.info(str(metric))
logging.info("")
check_process_mem_usage(sys.stdin)
"""


def test_a_collector_for_other_gpus_adds_its_samples_to_those_of_the_host(tmp_path: Path) -> None:
    from torchere.serving.telemetry.sampling import parse_samples

    (tmp_path / "intel_gpu.py").write_text("def busy(index):\n    return 40.0\n")
    found = run(f"import io, sys; sys.stdin = io.StringIO('\\n')\n{COLLECTOR}", tmp_path)
    values = {sample.name: sample.value for sample in parse_samples(found)}
    assert values["GPUUtilization"] == 40.0
    assert {"CPUUtilization", "MemoryUsed", "MemoryAvailable", "DiskUsage", "DiskAvailable"} <= set(values)


def test_an_archive_is_packed_from_python(tmp_path: Path) -> None:
    (tmp_path / "h.py").write_text("def handle(data, context): return data\n")
    (tmp_path / "more.txt").write_text("more")
    run(
        "from model_archiver import ModelArchiver, ModelArchiverConfig\n"
        "ModelArchiver.generate_model_archive(ModelArchiverConfig(model_name='m', handler='h.py', "
        "version='2.0', extra_files='more.txt'))",
        tmp_path,
    )
    with zipfile.ZipFile(tmp_path / "m.mar") as archive:
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
        assert {"h.py", "more.txt"} <= set(archive.namelist())
    assert manifest["model"] == {"modelName": "m", "handler": "h.py", "modelVersion": "2.0"}


BOTH_RELEASES = """
import sys
from model_archiver.arg_parser import ArgParser
from model_archiver.model_packaging import generate_model_archive, package_model
from model_archiver.model_packaging_utils import ModelExportUtils

parsed = ArgParser.export_model_args_parser().parse_args("--model-name old -v 1.0 --handler h.py".split())
package_model(parsed, manifest=ModelExportUtils.generate_manifest_json(parsed))
sys.argv[1:] = "--model-name new -v 2.0 --handler h.py".split()
config = ArgParser.export_model_args_parser()
config.force = True
print(config.model_name, config.version, config.force, config.export_path)
package_model(config, manifest=ModelExportUtils.generate_manifest_json(config))
print(hasattr(config, "anything"))
sys.argv[2] = "line"
generate_model_archive()
"""


def test_the_parser_is_that_of_old_releases_and_the_configuration_of_new_ones(tmp_path: Path) -> None:
    (tmp_path / "h.py").write_text("def handle(data, context): return data\n")
    assert run(BOTH_RELEASES, tmp_path).splitlines() == ["new 2.0 True .", "False"]
    assert sorted(path.name for path in tmp_path.glob("*.mar")) == ["line.mar", "new.mar", "old.mar"]


VALIDATING = """
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.model_packaging_utils import ModelExportUtils
from workflow_archiver.workflow_archiver_error import WorkflowArchiverError
from workflow_archiver.workflow_packaging_utils import WorkflowExportUtils

for utils, error in ((ModelExportUtils, ModelArchiverError), (WorkflowExportUtils, WorkflowArchiverError)):
    utils.validate_inputs("m", ".")
    for given in (("m/n", "."), ("m", "nowhere")):
        try:
            utils.validate_inputs(*given)
        except error as refused:
            print(str(refused).splitlines()[0])
"""


def test_a_script_has_the_name_and_the_output_path_checked(tmp_path: Path) -> None:
    (tmp_path / "m.mar").touch()  # checked elsewhere, since --force counts
    (tmp_path / "m.war").touch()
    folder = "Given export-path nowhere is not a directory. Point to a valid export-path directory."
    assert run(VALIDATING, tmp_path).splitlines() == [
        "Model name contains special characters.",
        folder,
        "Workflow name contains special characters.",
        folder,
    ]


def test_an_installed_torchserve_keeps_its_names(tmp_path: Path) -> None:
    theirs = tmp_path / "site"
    for package in ("ts", "model_archiver"):
        (theirs / package).mkdir(parents=True)
        (theirs / package / "__init__.py").write_text("theirs = True\n")
    found = run(
        "import ts, model_archiver; print(ts.theirs, model_archiver.theirs)\n"
        "try:\n    import ts.launcher\n"
        "except ModuleNotFoundError as err:\n    print(err)",
        tmp_path,
        theirs,
    )
    assert found.splitlines() == ["True True", "No module named 'ts.launcher'"]


def test_a_server_is_started_and_stopped_from_python(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "c.properties").write_text(
        "inference_address=http://127.0.0.1:0\nmanagement_address=http://127.0.0.1:0\n"
        "metrics_address=http://127.0.0.1:0\ngrpc_inference_port=0\ngrpc_management_port=0\n"
    )
    bin_folder, temporary = Path(sys.executable).parent, tmp_path / "tmp"
    temporary.mkdir()  # its pid file is no other server's
    code = (
        f"import os; os.environ['PATH'] = {str(bin_folder)!r} + os.pathsep + os.environ['PATH']\n"
        f"os.environ['TMPDIR'] = {str(temporary)!r}\n"
        "from ts import launcher\n"
        "lines = launcher.start(model_store='store', snapshot_file='c.properties', disable_token=True, "
        "no_config_snapshots=True)\n"
        "launcher.stop()\n"
        "while lines.get(timeout=30) is not None: pass\n"
        "print('ended')"
    )
    found = run(code, tmp_path)
    assert "Model server started." in found
    assert found.splitlines()[-1] == "ended"


def test_the_server_is_run_with_the_arguments_of_the_process(tmp_path: Path) -> None:
    program = tmp_path / "torchserve"
    program.write_text('#!/bin/sh\necho "torchserve $*"\ntest "$1" = --version\n')
    program.chmod(0o755)
    code = (
        f"import os, sys; os.environ['PATH'] = {str(tmp_path)!r} + os.pathsep + os.environ['PATH']\n"
        "from ts.model_server import ArgParser, start\n"
        "sys.argv[1:] = ['--version']; start()\n"
        "print('returned', ArgParser.ts_parser().parse_args().version, flush=True)\n"
        "sys.argv[1:] = ['--stop', '--foreground']\n"
        "try:\n    start()\nexcept SystemExit as err:\n    print('failed', err.code)"
    )
    expected = ["torchserve --version", "returned True", "torchserve --stop --foreground", "failed 1"]
    assert run(code, tmp_path).splitlines() == expected


def test_the_wheel_brings_the_line_that_python_runs_at_each_start(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in COMPAT.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path):
            target = source / path.relative_to(COMPAT)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "-w", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("torchere_ts.pth") == b"import torchere_ts; torchere_ts.install()\n"


# As the exporters of OpenMMLab's projects do it, which name no `config_file`.
EXPORTER = """
import json
from argparse import Namespace
from model_archiver.model_packaging import package_model
from model_archiver.model_packaging_utils import ModelExportUtils

args = Namespace(
    model_name="m", version="1.0", handler="h.py", model_file=None, serialized_file="w.pth", extra_files=None,
    export_path=".", force=True, requirements_file=None, runtime="python", archive_format="default",
)
manifest = ModelExportUtils.generate_manifest_json(args)
told = json.loads(manifest) | {"createdOn": "today", "team": {"name": "cats"}, "torchere": {"digests": {}}}
package_model(args, json.dumps(told))
for word, other in (("h.py", "other.py"), ('"python"', '"python3"')):
    try:
        package_model(args, manifest.replace(word, other))
    except Exception as err:
        print(type(err).__name__)
"""


def test_exporters_pack_by_the_parts_of_the_archiver(tmp_path: Path) -> None:
    (tmp_path / "h.py").write_text("def handle(data, context):\n    return data\n")
    (tmp_path / "w.pth").write_bytes(b"weights")
    assert run(EXPORTER, tmp_path).split() == ["PackingError"] * 2
    with zipfile.ZipFile(tmp_path / "m.mar") as archive:
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
    model = {"modelName": "m", "serializedFile": "w.pth", "handler": "h.py", "modelVersion": "1.0"}
    assert manifest["model"] == model
    assert manifest["team"] == {"name": "cats"}
    assert set(manifest["torchere"]["digests"]) == {"h.py", "w.pth"}


def test_a_script_packs_a_workflow(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("models:\n  one: {url: one.mar}\ndag:\n  one: [last]\n")
    (tmp_path / "f.py").write_text("def last(data, context):\n    return data\n")
    run(
        "import sys; sys.argv[1:] = '--workflow-name flow --spec-file s.yaml --handler f.py'.split()\n"
        "from workflow_archiver.workflow_packaging import generate_workflow_archive\n"
        "generate_workflow_archive()\n",
        tmp_path,
    )
    with zipfile.ZipFile(tmp_path / "flow.war") as archive:
        assert {"s.yaml", "f.py", "WAR-INF/MANIFEST.json"} == set(archive.namelist())
