"""Old import paths of handler modules, from before they were sorted into folders.

An old path (`image_classifier` below `torchere.handlers`) imports today's module, the same object.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGE = "torchere.handlers."

# Today's name, below `torchere.handlers` or in full -> the old names below `torchere.handlers`.
_OLD_NAMES = {
    "archive_import": "archive_caches, archive_plain_names",
    "audio.voice_activity": "speech_segments, voice_activity",
    "audio.wav": "wav",
    "base": "nested_lists, profiling, warm_up",
    "built_in": "request_signatures",
    "compiled.library": "aot_abi, aot_model",
    "compiled.load": "aot, aot_keywords",
    "compiled.package": "aot_build, aot_gil, aot_package",
    "context": "streaming",
    "encode": "json_text",
    "envelopes": "envelopes_v2",
    "loading.compile": "autocast, compile_options, loading.autocast, loading.oneapi",
    "loading.devices": "devices",
    "loading.eager": "eager",
    "loading.onnx": "onnx",
    "loading.torchscript": "torchscript, torchscript_mapped, torchscript_state",
    "loading.weights": "shared_models, shared_weights, weights",
    "metrics": "caching_metric, metric_types, timer",
    "resolve": "entry_point",
    "rows": "per_request, row_value",
    "tensors.answer": "tensors_answer, tensors_classes, tensors_outputs",
    "tensors.codec": "tensors_bytes, tensors_json",
    "tensors.npy": "tensors_npy",
    "tensors.request": "tensors_batch, tensors_rows",
    "text": "contractions, text_classifier, ts_compat.texts",
    "text.streamer": "text_streamer",
    "text.tasks": "text.embedding, text.sequence_classifier, text_embedding",
    "text.tokens": "text_tokens",
    "torchere.archiver.signature": "signature",
    "ts_compat.alias": "ts_alias, version",
    "ts_compat.legacy": "class_import, metrics_legacy, mock_context, ts_compat.utilities",
    "vision": "insights",
    "vision.decode": "image, image_arrays",
    "vision.tasks": "image_classifier, image_segmenter, object_detector",
    "vision.transform": "image_transform",
}
NEW_PATHS = {old: new for new, names in _OLD_NAMES.items() for old in names.split(", ")}


class _MovedFinder:
    """The meta-path finder for old paths. It comes last, so that a module that exists takes precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads today's module, or None; the parameters are the import system's."""
        new = NEW_PATHS.get(fullname.removeprefix(_PACKAGE)) if fullname.startswith(_PACKAGE) else None
        if new is None:
            return None
        return ModuleSpec(fullname, SecondNameLoader(new if new.startswith("torchere.") else _PACKAGE + new))


class SecondNameLoader(Loader):
    """Loads a second name of a module: the same object, which is first imported under its own name."""

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
    """Make old paths import today's modules in this process. Idempotent."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
