"""Packs a model after making something of it. torch is imported here, when the first model is built."""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

from torchere.archiver.building import DEFAULT_HANDLER, BuildOptions, Built
from torchere.archiver.errors import ModelRefused
from torchere.archiver.missing import check_inputs
from torchere.archiver.progress import Progress
from torchere.archiver.request import ArchiveRequest
from torchere.archiver.signature import SIGNATURE_NAME, Signature, parse
from torchere.archiver.writer import check_target, write_archive

Say = Callable[[str], None]


def pack_model(request: ArchiveRequest, options: BuildOptions, progress: Progress, say: Say) -> Path:
    """Build the model of `options` and pack it with the rest of `request`; returns the archive's path.

    The request's serialized file, model file and configuration are those of the result, whatever it says.

    Raises:
        ModelRefused: the model, an example or an option can't be used, or PyTorch is not installed.
        PackingError: see `write_archive`; what can be known before the model is built is found before.
        OSError: a file can't be read or written.
    """
    if importlib.util.find_spec("torch") is None:
        raise ModelRefused("this needs PyTorch, and it is not installed; pip install torch")
    request.check()
    check_target(request)
    check_inputs(request)
    from torchere.archiver.models.pipeline import build  # noqa: PLC0415  # torch

    with tempfile.TemporaryDirectory(prefix="torchere-") as folder:
        built = build(options, Path(folder), say)
        if request.handler == DEFAULT_HANDLER:
            _refuse_unservable(built)
        packed = dataclasses.replace(
            request,
            serialized_file=built.serialized_file,
            model_file=built.model_file,
            config_file=built.config_file,
            extra_files=(*request.extra_files, *built.extra_files),
            made=built.beside,
        )
        path = write_archive(packed, progress)
    say(f"packed: {path} ({path.stat().st_size / 1e6:.1f} MB)" if path.is_file() else f"packed: {path}")
    return path


def _refuse_unservable(built: Built) -> None:
    """The default handler goes by the signature, and can't carry everything that one may name."""
    file = built.beside / SIGNATURE_NAME
    signature = parse(file.read_text(encoding="utf-8")) if file.is_file() else Signature((), ())
    reasons = {"BYTES": f"texts, and the handler {DEFAULT_HANDLER!r} knows numbers only"}
    if built.serialized_file is not None and built.serialized_file.suffix == ".onnx":
        reasons["BF16"] = "BF16, which onnxruntime's NumPy arrays do not have"
    roles = (("input", "takes", signature.inputs), ("output", "gives", signature.outputs))
    for role, does, specs in roles:
        for spec in specs:
            if spec.datatype in reasons:
                raise ModelRefused(
                    f"{built.serialized_file}: the {role} {spec.name!r} {does} {reasons[spec.datatype]}; "
                    "name a --handler of your own"
                )
