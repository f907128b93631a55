"""Determines the kind of model in an archive from its manifest and files, before loading."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any

from torchere.handlers.loading.compile import wants_aot_compile


class WeightsKind(Enum):
    """How the model of an archive is loaded."""

    EAGER = "eager"  # a class from the model file, with or without a state dict
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
        raise RuntimeError(
            "No model weights could be loaded: the archive names no file for them; make it with "
            "--serialized-file, or with --model-file for a class that makes its own"
        )
    return _kind_of_file(serialized, config)


def _kind_of_file(serialized: str, config: dict[str, Any]) -> WeightsKind:
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


# Location of weights that several versions share: a file beside the folder of the archive.
#
# Processes that map the same file share its pages; those that map equal copies do not. So the server
# gives versions with the same weights one file. If a handler could write to that file, it is not in the
# handler's folder, which then has a file of its own.

WORTH_MAPPING_BYTES = 1 << 20  # a smaller file is copied in less than a millisecond


def shared_file(path: str) -> str:
    """Return the path of the server's link to the file that holds the weights `path` for several versions."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(f"{folder}.shared", name)


def file_to_map(path: str) -> str:
    """Return the file to map for the weights `path`: the one that versions share, or `path` itself.

    A handler may replace its own weights before it loads them. Then their size or modification time differs,
    and `path` is used. Thread-safe.
    """
    shared = shared_file(path)
    try:
        one, own = os.stat(shared), os.stat(path)
    except OSError:  # most archives have no such file
        return path
    alike = (one.st_size, one.st_mtime_ns) == (own.st_size, own.st_mtime_ns)
    return shared if alike else path
