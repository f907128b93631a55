from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchere.handlers.ts_compat import alias as ts_alias


@pytest.fixture(autouse=True)
def _installed() -> None:
    ts_alias.install()


@pytest.mark.parametrize("name", sorted(ts_alias.ALIASES))
def test_every_aliased_module_imports_and_holds_its_names(name: str) -> None:
    module = importlib.import_module(name)
    for home, wanted, alias in ts_alias.names_of(name):
        ours = importlib.import_module(f"torchere.handlers.{home}")
        if wanted == "*":
            assert [n for n in vars(ours) if not n.startswith("_") and not hasattr(module, n)] == []
        else:
            assert getattr(module, alias) is getattr(ours, wanted)


@pytest.mark.parametrize(
    ("module", "handler"),
    [
        ("image_classifier", "ImageClassifier"),
        ("image_segmenter", "ImageSegmenter"),
        ("object_detector", "ObjectDetector"),
    ],
)
def test_a_script_that_searches_a_module_finds_its_handler(module: str, handler: str) -> None:
    from torchere.handlers.vision import VisionHandler

    found = vars(importlib.import_module(f"ts.torch_handler.{module}")).values()
    classes = [each for each in found if isinstance(each, type) and issubclass(each, VisionHandler)]
    assert [each.__name__ for each in dict.fromkeys(classes)] == ["VisionHandler", handler]


def test_the_imports_handlers_write_give_our_classes() -> None:
    scope: dict[str, object] = {}
    exec(
        "import ts\n"
        "from ts.context import Context\n"
        "from ts.torch_handler.base_handler import BaseHandler\n"
        "from ts.torch_handler.image_classifier import ImageClassifier\n"
        "from ts.utils.util import CLEANUP_REGEX, PredictionException, list_classes_from_module\n"
        "from ts.handler_utils.utils import send_intermediate_predict_response\n"
        "from ts.handler_utils.timer import timed\n"
        "from ts.metrics.dimension import Dimension\n"
        "import ts.torch_handler.vision_handler as vision\n",
        scope,
    )
    from torchere.handlers.base import BaseHandler
    from torchere.handlers.vision import VisionHandler

    assert scope["BaseHandler"] is BaseHandler
    assert scope["vision"].VisionHandler is VisionHandler  # type: ignore[attr-defined]
    assert scope["ts"].__version__ == "0.12.0"  # type: ignore[attr-defined]


def test_importing_the_package_is_enough_for_what_is_below_it() -> None:
    code = (
        "from torchere.handlers import ts_alias; ts_alias.install(); import ts;"
        "print(ts.context.Context.__name__, ts.utils.util.PredictionException('no', 418));"
        "print(hasattr(ts, 'launcher'), hasattr(ts.torch_handler, 'nothing'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["Context no : 418", "False False"]


def test_handlers_sample_the_host() -> None:
    samples = importlib.import_module("ts.metrics.system_metrics")
    samples.system_metrics.clear()
    for sample in (samples.cpu_utilization, samples.memory_used, samples.disk_available):
        sample()
    samples.gpu_utilization(0)
    names = [(metric.name, metric.unit) for metric in samples.system_metrics]
    assert names == [
        ("CPUUtilization", "Percent"),
        ("MemoryUsed", "Megabytes"),
        ("DiskAvailable", "Gigabytes"),
    ]
    assert importlib.import_module("ts.metrics.process_memory_metric").get_cpu_usage(os.getpid()) > 0


def test_gpus_are_sampled_by_nvidias_program(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = importlib.import_module("ts.metrics.system_metrics")
    samples.system_metrics.clear()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    listed = "0, 40, 1000, 4000\n1, [N/A], 10, 100\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listed))
    samples.gpu_utilization(2)
    assert [(metric.name, metric.value, metric.dimensions[1].value) for metric in samples.system_metrics] == [
        ("GPUMemoryUtilization", 25.0, "0"),
        ("GPUMemoryUsed", 1000.0, "0"),
        ("GPUUtilization", 40.0, "0"),
        ("GPUMemoryUtilization", 10.0, "1"),
        ("GPUMemoryUsed", 10.0, "1"),
    ]


@pytest.mark.parametrize("name", sorted(ts_alias.NOT_SHIPPED))
def test_what_we_do_not_ship_says_so(name: str) -> None:
    with pytest.raises(ImportError, match="is not part of torchere"):
        importlib.import_module(name)


def test_a_name_torchserve_does_not_have_is_simply_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ts\.nothing"):
        importlib.import_module("ts.nothing")


def test_installing_again_changes_nothing() -> None:
    before = list(sys.meta_path)
    ts_alias.install()
    assert sys.meta_path == before


def test_installing_imports_no_torch() -> None:
    code = (
        "import sys; from torchere.handlers import ts_alias, PredictionException; ts_alias.install();"
        "import ts, ts.utils, ts.metrics.dimension; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_an_installed_toolkit_of_sagemaker_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "sagemaker_inference").mkdir()
    (tmp_path / "sagemaker_inference" / "__init__.py").write_text("NAME = 'installed'\n")
    code = (
        "from torchere.handlers import ts_alias; ts_alias.install()\n"
        "import sagemaker_inference; print(sagemaker_inference.NAME)\n"
        "try: import sagemaker_inference.decoder\n"
        "except ImportError as err: print(err)\n"
        "from sagemaker_pytorch_serving_container import handler_service\n"
        "print(handler_service.HandlerService.__name__)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "installed",
        "No module named 'sagemaker_inference.decoder'",
        "SageMakerHandler",
    ]
