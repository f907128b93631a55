"""The distribution `torchere-ts`: TorchServe's modules in scripts and tests outside workers."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    "statement",
    [
        "import ts",
        "from ts import launcher",
        "from ts.launcher import register_model, register_model_with_params, start, stop",
        "from ts.context import Context",
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
    ],
)
def test_the_imports_of_scripts_resolve(statement: str, tmp_path: Path) -> None:
    run(statement, tmp_path)


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
