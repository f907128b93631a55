"""TorchServe's API beside its handlers: emitted metrics, the mock context, helpers of `ts.utils`, flags."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import shutil
import socket
import sys
import threading
import time
import urllib.request
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torchere.handlers.errors import (
    MetricsCacheIOError,
    MetricsCacheKeyError,
    MetricsCachePyYamlError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from torchere.handlers.metrics import (
    MAX_SAMPLES,
    Dimension,
    MetricSample,
    MetricsCache,
    MetricTypes,
    Units,
    record_in_batch,
)

PREDICTION_METRIC = "PredictionTime"
# Maximum number of values in a store: if a handler never empties it, `emit_metrics` reports all of them with
# each batch, which takes 4 ms. A store for a large batch has room for several values of each request.
MAX_STORED = 1_000
MAX_STORED_OF_REQUEST = 16
# Flags that TorchServe's base handler sets when it is imported; handlers branch on them.
PROFILER_AVAILABLE = True
XLA_AVAILABLE = importlib.util.find_spec("torch_xla") is not None
PT2_AVAILABLE = True
PT230_AVAILABLE = True  # torch 2.10 is the oldest that torchere runs with
ONNX_AVAILABLE = importlib.util.find_spec("onnxruntime") is not None

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """Return `PT2Backend`, which was defined here; its module imports torch, which scripts don't need."""
    if name != "PT2Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("torchere.handlers.loading.compile").PT2Backend


class Metric:
    """One value with its labels, to be handed to `emit_metrics`.

    Args:
        name: metric name.
        value: number, or text that reads as one.
        unit: see `Units`.
        dimensions: labels.
        request_id: the request it belongs to.
        metric_method: "counter" makes `update` add instead of replace.
    """

    def __init__(  # noqa: PLR0917  # TorchServe's signature
        self,
        name: str,
        value: float | str,
        unit: str,
        dimensions: Sequence[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.name = name
        self.value = float(value)
        self.unit = Units.units.get(unit, unit)
        self.dimensions = list(dimensions)
        self.request_id = request_id
        self.metric_method = metric_method

    def update(self, value: float | str) -> None:
        """Replace the value, or add to it when the metric is a counter."""
        self.value = self.value + float(value) if self.metric_method == "counter" else float(value)

    def reset(self) -> None:
        """Set the value to 0."""
        self.value = 0.0

    @property
    def metric_type(self) -> MetricTypes:
        """How the values are aggregated."""
        return next((kind for kind in MetricTypes if kind.value == self.metric_method), MetricTypes.GAUGE)

    def to_dict(self) -> dict[str, Any]:
        """Return TorchServe's dict of the current value, with its `Dimension` objects."""
        members = {"MetricName": self.name, "Value": self.value, "Unit": self.unit}
        members |= {"Dimensions": self.dimensions, "Timestamp": int(time.time())}
        return {**members, "HostName": socket.gethostname(), "RequestId": self.request_id}

    def __str__(self) -> str:
        """Return TorchServe's line for the value, which scripts for `system_metrics_cmd` print."""
        labels = ",".join(f"{item.name}:{item.value}" for item in self.dimensions)
        request = f",{self.request_id}" if self.request_id else ""
        host = f"#hostname:{socket.gethostname()},{int(time.time())}{request}"
        value = str(self.value).removesuffix(".0")  # an int of the handler is a float here
        return f"{self.name}.{self.unit}:{value}|#{labels}|{host}"

    @classmethod
    def of(cls, sample: MetricSample) -> Metric:
        """Return the metric for a record; its request ids are joined by commas, as in TorchServe."""
        labels = [Dimension(*label) for label in sample.dimensions]
        ids = ",".join(sample.request_ids) or None
        return cls(sample.name, sample.value, sample.unit, labels, ids, sample.metric_type)

    def sample(self) -> MetricSample:
        """Return the record of the current value."""
        ids = tuple(str(self.request_id).split(",")) if self.request_id else ()
        labels = tuple((item.name, str(item.value)) for item in self.dimensions)
        return MetricSample(self.name, self.value, self.unit, self.metric_type.value, labels, ids)


class MetricsStore(MetricsCache):
    """The collector of the older API: it keeps its values in the list `store`, for `emit_metrics`.

    Handlers construct it themselves, with TorchServe's arguments. A full store drops its oldest value for a
    new one, since some handlers keep one store and never empty it.
    """

    _has_dropped = threading.Event()  # for all stores, as handlers may make one for each batch

    def __init__(self, request_ids: Mapping[int, str] | object, model_name: str) -> None:
        super().__init__(model_name)
        # Handlers that construct it pass any object, usually a uuid, which identifies no request.
        self.request_ids = request_ids if isinstance(request_ids, Mapping) else {}
        self._by_labels: dict[MetricSample, Metric] = {}

    def record(self, sample: MetricSample) -> None:
        """Add one value to `store`, or update the one there with the same name, labels and requests."""
        labels = sample._replace(value=0.0)
        with self._lock:
            if not self.store:  # it is new, or the handler has emptied it
                self._by_labels.clear()
            if labels in self._by_labels and sample.metric_type != MetricTypes.HISTOGRAM:
                self._by_labels[labels].update(sample.value)
                return
            self._make_room()
            self._by_labels[labels] = Metric.of(sample)
            self.store.append(self._by_labels[labels])

    def _make_room(self) -> None:
        most = max(MAX_STORED, min(MAX_SAMPLES, MAX_STORED_OF_REQUEST * len(self.request_ids)))
        if len(self.store) < most:
            return
        while len(self.store) >= most:
            oldest = self.store.pop(0)
            found = next((labels for labels, metric in self._by_labels.items() if metric is oldest), None)
            if found is not None:  # nearly always the first
                del self._by_labels[found]
        if not self._has_dropped.is_set():
            self._has_dropped.set()
            logger.warning(
                "a MetricsStore has more than %d values, and drops its oldest ones: "
                "empty its list `store` after emit_metrics, or make a store for each batch",
                most,
            )


def emit_metrics(metrics: Iterable[object] | None) -> None:
    """Report the values with the batch that runs in this thread; outside a batch they are dropped.

    Other items, as the keys of `context.metrics.cache`, are logged as TorchServe logs them: a text that reads
    as a metric's line counts as one that the handler logs itself.
    """
    for metric in metrics or ():
        if isinstance(metric, Metric):
            record_in_batch(metric.sample())
        else:
            logger.info("[METRICS]%s", metric)


class MetricsCacheYamlImpl(MetricsCache):
    """The collector of scripts and tests, whose constructor reads a metrics configuration.

    Args:
        config_file_path: a `metrics.yaml`; `initialize_cache` declares the metrics of its `model_metrics`.

    Raises:
        MetricsCacheTypeError, MetricsCachePyYamlError, MetricsCacheIOError: no path, not YAML, not readable.
    """

    def __init__(self, config_file_path: str, model_name: str = "") -> None:
        super().__init__(model_name)
        if not config_file_path:
            raise MetricsCacheTypeError("Config file not initialized")
        import yaml  # noqa: PLC0415  # only where a script asks for it

        try:
            self._document = get_yaml_config(config_file_path)
        except yaml.YAMLError as err:
            raise MetricsCachePyYamlError(f"Error parsing file {config_file_path}: {err}") from err
        except OSError as err:
            raise MetricsCacheIOError(f"Error reading file {config_file_path}: {err}") from err

    def initialize_cache(self) -> None:
        """Declare the metrics that the configuration lists.

        Raises:
            MetricsCacheKeyError, MetricsCacheValueError: the section is missing, empty or invalid.
        """
        if "model_metrics" not in self._document:
            raise MetricsCacheKeyError("'model_metrics' key not found in yaml file")
        if not self._document["model_metrics"]:
            raise MetricsCacheValueError("Missing `model_metrics` specification")
        for kind, declared in self._document["model_metrics"].items():
            try:
                metric_type = MetricTypes(kind)
                for metric in declared:
                    self.add_metric_to_cache(
                        metric["name"], metric["unit"], metric["dimensions"], metric_type
                    )
            except ValueError as err:
                raise MetricsCacheKeyError(f"Invalid metric type: {err}") from err
            except KeyError as err:
                raise MetricsCacheKeyError(f"Key not found in cache spec: {err}") from err


class MetricEncoder(json.JSONEncoder):
    """Writes metrics, dimensions and units as JSON."""

    def default(self, o: Any) -> Any:
        """Return a metric as a dict."""
        if not isinstance(o, Metric):
            return super().default(o)
        return {**o.to_dict(), "Dimensions": [each.to_dict() for each in o.dimensions]}


class MockContext:
    """A context with the attributes that most handlers use; handlers import it for their own tests.

    Args:
        model_pt_file: the manifest's `serializedFile`; "" or None for none.
        model_dir: where the model's files are.
        model_file: the manifest's `modelFile`; "" or None for none.
        gpu_id: passed to the handler where CUDA is available.
        model_name: for the metrics.
        model_yaml_config_file: name of a YAML file in `model_dir` that becomes `model_yaml_config`.
    """

    def __init__(  # noqa: PLR0917  # TorchServe's signature
        self,
        model_pt_file: str | None = "model.pt",
        model_dir: str = "ts/torch_handler/unit_tests/models/tmp",
        model_file: str | None = "model.py",
        gpu_id: str | None = "0",
        model_name: str = "mnist",
        model_yaml_config_file: str | None = None,
    ) -> None:
        import torch  # noqa: PLC0415  # takes seconds, and scripts of `system_metrics_cmd` need `Metric` alone

        named = {"serializedFile": model_pt_file, "modelFile": model_file}
        self.model_name = model_name
        self.manifest = {"model": {key: name for key, name in named.items() if name}}
        self.system_properties: dict[str, Any] = {"model_dir": model_dir}
        if gpu_id and torch.cuda.is_available():
            self.system_properties["gpu_id"] = gpu_id
        self.explain = False
        self.metrics = MetricsStore(uuid.uuid4(), model_name)
        self.model_yaml_config: dict[str, Any] = {}
        if model_yaml_config_file:
            self.model_yaml_config = get_yaml_config(str(Path(model_dir, model_yaml_config_file))) or {}

    def get_request_header(self, idx: int, exp: str) -> bool:
        """Return whether a test has set `explain`; always False for request 0, as in TorchServe."""
        return bool(idx and exp and self.explain)


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """Return a class by its name, which may include its module, below the package `module_prefix`.

    Called from the code of an archive, it finds the archive's own modules too.

    Raises:
        ImportError: there is no such module, or no such class in it.
    """
    module_name, _, name = class_name.rpartition(".")
    full_name = ".".join(part for part in (module_prefix, module_name) if part)
    if not full_name:
        raise ImportError(f"{class_name!r} names no module: write 'package.module.{class_name}'")
    importer = sys._getframe(1).f_builtins["__import__"]  # the caller's, which searches the caller's archive
    module = importer(full_name, {}, {}, [name], 0)
    found = getattr(module, name, None)
    if found is None:
        raise ImportError(f"class:{name} not found in module:{full_name}.")
    return found


def get_yaml_config(yaml_file_path: str) -> Any:
    """Return the contents of a YAML file."""
    import yaml  # noqa: PLC0415  # only where a handler asks for it

    return yaml.safe_load(Path(yaml_file_path).read_text(encoding="utf-8"))


def copy_files(src_dir: Path, dst_dir: Path, files: Mapping[str, str]) -> None:
    """Copy files, given as source and target names, from one folder to another."""
    for source, target in files.items():
        shutil.copyfile(Path(src_dir, source), Path(dst_dir, target))


def download_model(model_url: str, model_dir: Path) -> None:
    """Download a file to `model.pt` in a folder."""
    with urllib.request.urlopen(model_url) as source, Path(model_dir, "model.pt").open("wb") as target:
        shutil.copyfileobj(source, target)


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[F], F]:
    """Return a decorator that warns at each call that the function moves to `replacement` in `version`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            text = f"{function.__name__} is deprecated in {version} and moved to {replacement}"
            warnings.warn(text, klass, stacklevel=2)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # of the same signature

    return decorate


def timeit(function: F) -> F:
    """Decorate a function so that the duration of each call is logged."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began_s = time.perf_counter()
        result = function(*args, **kwargs)
        elapsed_ms = (time.perf_counter() - began_s) * 1000
        logging.getLogger(function.__module__).info("%s took %.2f ms", function.__name__, elapsed_ms)
        return result

    return call  # type: ignore[return-value]  # of the same signature
