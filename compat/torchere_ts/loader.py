"""`ts.model_loader` and `ts.service`: load a handler and call it in any process, as scripts do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchere.handlers.context import Context, RequestProcessor
from torchere.handlers.errors import PredictionException
from torchere.handlers.metrics import MetricsCache
from torchere.handlers.resolve import load_entry_point
from torchere.handlers.ts_compat.alias import __version__
from torchere.handlers.ts_compat.legacy import PREDICTION_METRIC, emit_metrics, get_yaml_config

__all__ = [
    "PREDICTION_METRIC",
    "ModelLoader",
    "ModelLoaderFactory",
    "PredictionException",
    "Service",
    "TsModelLoader",
    "emit_metrics",
]


class Service:
    """A loaded handler and its context.

    Args:
        model_name: the name in metrics.
        model_dir: the unpacked archive.
        manifest: its manifest; None for none.
        entry_point: takes the rows and the context, and returns the answers.
        gpu: the index of its GPU; None for the CPU.
        batch_size: the most rows of a call.
        limit_max_image_pixels: whether large images are refused.
        metrics_cache: collects the handler's metrics; None for a collector of its own.
    """

    def __init__(  # noqa: PLR0917  # TorchServe's signature
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        entry_point: Callable[[list[Any], Context], Any] | None,
        gpu: int | None,
        batch_size: int | None,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> None:
        config = ((manifest or {}).get("model") or {}).get("configFile")
        self._context = Context(
            model_name,
            model_dir,
            manifest,
            batch_size,
            gpu,
            __version__,
            limit_max_image_pixels,
            MetricsCache(model_name) if metrics_cache is None else metrics_cache,
            get_yaml_config(str(Path(model_dir, config))) if config else {},
        )
        self._entry_point: Any = entry_point

    @property
    def context(self) -> Context:
        """The context that the handler gets."""
        return self._context

    def set_cl_socket(self, cl_socket: Any) -> None:
        """Keep a socket, which the handler finds in its context; answers are not written to it."""
        self.context.cl_socket = self.cl_socket = cl_socket

    @staticmethod
    def retrieve_data_for_inference(
        batch: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[list[RequestProcessor], list[dict[str, Any]], dict[int, str]]:
        """Return headers, rows and ids of requests in the form of TorchServe's worker protocol.

        Raises:
            ValueError: there is no batch.
        """
        if batch is None:
            raise ValueError("Received invalid inputs")
        processors, rows, ids = [], [], {}
        for place, request in enumerate(batch):
            row = {each["name"]: each["value"] for each in request["parameters"]}
            headers: dict[str, Any] = {
                each["name"]: {"content-type": each.get("contentType", "")} for each in request["parameters"]
            }
            headers |= {_text(each["name"]): _text(each["value"]) for each in request.get("headers") or ()}
            ids[place] = _text(request["requestId"])
            rows.append(row)
            processors.append(RequestProcessor(headers, ids[place]))
        return processors, rows, ids

    def predict(self, batch: Sequence[Mapping[str, Any]]) -> Any:
        """Call the handler with requests in the form of TorchServe's worker protocol; return its answers."""
        processors, rows, _ = self.retrieve_data_for_inference(batch)
        self.context.begin_batch(processors, None)
        return self._entry_point(rows, self.context)


class ModelLoader:
    """Loads handlers."""

    def load(  # noqa: PLR0917  # TorchServe's signature
        self,
        model_name: str,
        model_dir: str,
        handler: str | None = None,
        gpu_id: int | None = None,
        batch_size: int | None = None,
        envelope: str | None = None,
        limit_max_image_pixels: bool = True,
        metrics_cache: Any = None,
    ) -> Service:
        """Load the handler of an unpacked archive, or one that this process can import.

        Raises:
            HandlerLoadError: there is no such handler, or its code can't be imported.
        """
        file = Path(model_dir, "MAR-INF", "MANIFEST.json")
        manifest = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        handler = handler or ((manifest or {}).get("model") or {}).get("handler") or ""
        service = Service(
            model_name, model_dir, manifest, None, gpu_id, batch_size, limit_max_image_pixels, metrics_cache
        )
        runtime = str((manifest or {}).get("runtime") or "python")
        service._entry_point = load_entry_point(
            handler,
            service.context,
            envelope=envelope,
            installed=runtime != "LSP",  # the name is the caller's; a handler in C++ is a file of the archive
            runtime=runtime,
        )
        return service


class TsModelLoader(ModelLoader):
    """The loader of archives with a manifest."""


class ModelLoaderFactory:
    """Makes loaders."""

    @staticmethod
    def get_model_loader() -> ModelLoader:
        """Return a loader."""
        return TsModelLoader()


def _text(value: bytes | bytearray | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode()
