"""Public facts about a model version, available without calling its handler; a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchere.archiver.signature import Signature
from torchere.handlers.built_in import READ_TENSORS, request_signature
from torchere.serving.registry.version import Version
from torchere.serving.telemetry.numbers import VersionNumbers
from torchere.serving.types import ModelKey

TENSOR_HANDLER = "tensor"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about one version of a model."""

    key: ModelKey
    versions: tuple[str, ...]  # of the model, in the order of their registration
    handler: str
    manifest_model: Mapping[str, Any]  # the member `model` of the manifest
    signature: Signature | None
    max_batch_size: int
    numbers: VersionNumbers
    example: object = None  # `exampleRequest` of the model config: JSON that the handler takes

    @property
    def reads_tensors(self) -> bool:
        """Whether the handler reads tensors from every protocol itself, so that no envelope precedes it."""
        return self.handler in READ_TENSORS and self.signature is not None

    @property
    def platform(self) -> str:
        """Platform of the model, named as in the Open Inference Protocol: `<project>_<format>`."""
        if "modelFile" in self.manifest_model:
            return "pytorch_eager"
        suffix = str(self.manifest_model.get("serializedFile", "")).rpartition(".")[2]
        return _PLATFORMS.get(suffix, "pytorch_python")


def facts_of(version: Version, versions: tuple[str, ...]) -> ModelFacts:
    """Return the current facts of a version; `versions` are all versions of its model."""
    return ModelFacts(
        key=version.key,
        versions=versions,
        handler=version.origin.handler,
        manifest_model=version.origin.archive.manifest.get("model") or {},
        signature=request_signature(version.origin.handler, version.origin.archive.tensors),
        max_batch_size=version.settings.batch.max_batch_size,
        numbers=version.observer.meter,
        example=version.origin.archive.config.raw.get("exampleRequest"),
    )


_PLATFORMS = {
    "pt": "pytorch_torchscript",
    "pt2": "pytorch_export",
    "so": "pytorch_aotinductor",
    "onnx": "onnx_onnxv1",
}
