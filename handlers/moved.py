"""Modules of handlers under the paths that they had before they were sorted into folders.

An old path (`image_classifier` below `torchere.handlers`) imports the module of today, the same object.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "torchere.handlers."

# Old name below `torchere.handlers` -> name of today below it, or in full.
NEW_PATHS = {
    "aot": "compiled.load",
    "aot_abi": "compiled.library",
    "aot_build": "compiled.package",
    "aot_gil": "compiled.package",
    "aot_keywords": "compiled.load",
    "aot_model": "compiled.library",
    "aot_package": "compiled.package",
    "archive_caches": "archive_import",
    "archive_plain_names": "archive_import",
    "autocast": "loading.compile",
    "caching_metric": "metrics",
    "class_import": "ts_compat.legacy",
    "compile_options": "loading.compile",
    "contractions": "text",
    "devices": "loading.devices",
    "eager": "loading.eager",
    "entry_point": "resolve",
    "envelopes_v2": "envelopes",
    "image": "vision.decode",
    "image_arrays": "vision.decode",
    "image_classifier": "vision.tasks",
    "image_segmenter": "vision.tasks",
    "image_transform": "vision.transform",
    "insights": "vision",
    "json_text": "encode",
    "loading.autocast": "loading.compile",
    "loading.oneapi": "loading.compile",
    "metric_types": "metrics",
    "metrics_legacy": "ts_compat.legacy",
    "mock_context": "ts_compat.legacy",
    "nested_lists": "base",
    "object_detector": "vision.tasks",
    "onnx": "loading.onnx",
    "per_request": "rows",
    "profiling": "base",
    "request_signatures": "built_in",
    "row_value": "rows",
    "shared_models": "loading.weights",
    "shared_weights": "loading.weights",
    "signature": "torchere.archiver.signature",
    "speech_segments": "audio.voice_activity",
    "streaming": "context",
    "tensors_answer": "tensors.answer",
    "tensors_batch": "tensors.request",
    "tensors_bytes": "tensors.codec",
    "tensors_classes": "tensors.answer",
    "tensors_json": "tensors.codec",
    "tensors_npy": "tensors.npy",
    "tensors_outputs": "tensors.answer",
    "tensors_rows": "tensors.request",
    "text.embedding": "text.tasks",
    "text.sequence_classifier": "text.tasks",
    "text_classifier": "text",
    "text_embedding": "text.tasks",
    "text_streamer": "text.streamer",
    "text_tokens": "text.tokens",
    "timer": "metrics",
    "torchscript": "loading.torchscript",
    "torchscript_mapped": "loading.torchscript",
    "torchscript_state": "loading.torchscript",
    "ts_alias": "ts_compat.alias",
    "ts_compat.texts": "text",
    "version": "ts_compat.alias",
    "voice_activity": "audio.voice_activity",
    "warm_up": "base",
    "wav": "audio.wav",
    "weights": "loading.weights",
}


class _MovedFinder:
    """The meta-path finder for old paths. It comes last: a module that is there goes first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module of today, or None; the parameters are the import system's."""
        new = NEW_PATHS.get(fullname.removeprefix(_PACKAGE)) if fullname.startswith(_PACKAGE) else None
        if new is None:
            return None
        return ModuleSpec(fullname, SecondNameLoader(new if new.startswith("torchere.") else _PACKAGE + new))


class SecondNameLoader(Loader):
    """Loader of a second name of a module, which is imported under its own `name` if it is not yet."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        module = importlib.import_module(self._name)
        self._spec = getattr(module, "__spec__", None)  # code may have replaced its module by any object
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has replaced by the second name's."""
        if self._spec is not None:
            module.__spec__ = self._spec


_finder = _MovedFinder()


def install() -> None:
    """Let old paths lead to the modules of today, in this process. Idempotent."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
