"""The weights of an archive before they are loaded: their kind, and how versions and instances share them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from torchere.archiver.split import Split


class WeightsKind(Enum):
    """How the model of an archive is loaded."""

    EAGER = "eager"  # a class from the model file, with or without a state dict
    HUGGING_FACE = "hugging_face"  # the files of a model folder, from which transformers makes a model
    TORCHSCRIPT = "torchscript"
    ONNX = "onnx"
    AOT_SHARED_OBJECT = "aot_shared_object"
    AOT_PACKAGE = "aot_package"


_BY_SUFFIX = {
    ".pt": WeightsKind.TORCHSCRIPT,
    ".onnx": WeightsKind.ONNX,
    ".so": WeightsKind.AOT_SHARED_OBJECT,
    ".pt2": WeightsKind.AOT_PACKAGE,
}


def weights_kind(model: dict[str, Any], model_dir: str, config: dict[str, Any]) -> WeightsKind:
    """Return the kind of weights in an archive.

    Args:
        model: the `model` object of the manifest.
        model_dir: the unpacked archive.
        config: the parsed model-config.yaml.

    Raises:
        RuntimeError: the weights are missing, or of a kind that can't be loaded; the text suggests a fix.
        ValueError: the section `parallel` is wrong.
    """
    serialized = model.get("serializedFile")
    if serialized and not Path(model_dir, serialized).is_file():
        held = ", ".join(sorted(item.name for item in Path(model_dir).iterdir())) or "nothing"
        raise RuntimeError(
            f"No model weights could be loaded: the manifest names {serialized}, and the archive holds {held}"
        )
    if model.get("modelFile"):
        return WeightsKind.EAGER
    if not serialized:
        if Split.read(config) and Path(model_dir, "config.json").is_file():
            return WeightsKind.HUGGING_FACE
        raise RuntimeError(
            "No model weights could be loaded: the archive names no file for them; make it with "
            "--serialized-file, or with --model-file for a class that makes its own"
        )
    suffix = Path(serialized).suffix
    kind = _BY_SUFFIX.get(suffix)
    if kind is WeightsKind.AOT_SHARED_OBJECT and not wants_aot_compile(config):
        raise RuntimeError(
            f"No model weights could be loaded: {serialized} is loaded only when model-config.yaml sets "
            "pt2: {export: {aot_compile: true}}"
        )
    if kind is None:
        hint = "a state_dict needs the model's class: add it with --model-file" if suffix == ".pth" else ""
        raise RuntimeError(
            f"No model weights could be loaded: {serialized} has the suffix {suffix!r}; expected one of "
            f"{', '.join(_BY_SUFFIX)}, or a --model-file beside it. {hint}".strip()
        )
    return kind


def wants_aot_compile(config: dict[str, Any]) -> bool:
    """Return whether `pt2.export.aot_compile` says that the weights are a compiled `.so`."""
    pt2 = config.get("pt2")
    export = pt2.get("export") if isinstance(pt2, dict) else None
    return isinstance(export, dict) and export.get("aot_compile") is True


# Location of weights that several versions share: a file beside the folder of the archive.
#
# Processes that map the same file share its pages; those that map equal copies do not. So the server
# gives versions with the same weights one file. If a handler could write to that file, its folder
# has a copy instead, and loaders map the file beside the folder.

WORTH_MAPPING_BYTES = 1 << 20  # copying a smaller file takes less than a millisecond


def shared_file(path: str) -> str:
    """Return the path of the server's link to the file that holds the weights `path` for several versions."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(f"{folder}.shared", name)


def file_to_map(path: str) -> str:
    """Return the file to map for the weights `path`: the one that versions share, or `path` itself.

    A handler may replace its own weights before it loads them. If their size or modification time then
    differs from the shared file's, return `path`. Thread-safe.
    """
    shared = shared_file(path)
    try:
        one, own = os.stat(shared), os.stat(path)
    except OSError:  # most archives have no such file
        return path
    alike = (one.st_size, one.st_mtime_ns) == (own.st_size, own.st_mtime_ns)
    return shared if alike else path


T = TypeVar("T")


class SharedModels:
    """Loads each model once, however many threads request it at the same time.

    Thread-safe. Several threads use a stored model at once, so its forward pass must change nothing
    (TorchScript, or an `nn.Module` in eval mode). The object lives as long as its version.
    """

    def __init__(self) -> None:
        self._models: dict[Hashable, object] = {}
        self._loading: dict[Hashable, threading.Lock] = {}  # each held while its model is loaded
        # False once a model was not shared: it may keep state, which another instance would lack.
        self.shares_all = True
        self._lock = threading.Lock()  # guards _loading; never held while a model loads

    def get_or_load(
        self, key: Hashable, load: Callable[[], T], may_share: Callable[[T], bool] = lambda _: True
    ) -> T:
        """Return the model under `key`; the first caller loads it, the others wait.

        A model that `may_share` refuses belongs to its caller alone; the next caller loads another one.

        Raises:
            Exception: raised by `load`, to the caller that ran it; the next caller tries again.
        """
        with self._lock:
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            if key not in self._models:
                model = load()
                if not may_share(model):
                    self.shares_all = False
                    return model
                self._models[key] = model
            return cast(T, self._models[key])
