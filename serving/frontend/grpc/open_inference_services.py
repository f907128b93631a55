"""The gRPC service of the Open Inference Protocol, under its public name and under TorchServe's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchere.serving.errors import ModelNotFound, VersionNotFound
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.call import PredictionContext
from torchere.serving.frontend.grpc.errors import INFERENCE, MANAGEMENT, OPEN_INFERENCE, Table
from torchere.serving.frontend.grpc.open_inference import TensorCalls, Tensors
from torchere.serving.frontend.grpc.open_inference_control import ModelCalls
from torchere.serving.frontend.grpc.open_inference_descriptors import PUBLIC_NAME, SERVICE, TORCHSERVE_NAME
from torchere.serving.frontend.grpc.service import Openers, service
from torchere.serving.frontend.open_inference.service import TensorService
from torchere.serving.frontend.services import Services

# TorchServe's service answers INTERNAL to an inference request for a model that is not there, as its other
# inference service does, and NOT_FOUND to questions about one.
_TORCHSERVE_MODELS: Table = {
    **INFERENCE,
    ModelNotFound: MANAGEMENT[ModelNotFound],
    VersionNotFound: MANAGEMENT[VersionNotFound],
}


def open_inference_services(
    dataplane: DataPlane, controlplane: ControlPlane, services: Services
) -> list[Callable[[set[Any]], Openers]]:
    """Return both services. They differ in error codes, and in the encoding of BYTES for an envelope."""
    tensors = TensorService(dataplane, services.settings.service_envelope)
    context = PredictionContext(dataplane, services.metrics)
    public = TensorCalls(Tensors(context, tensors, as_torchserve=False)).methods()
    torchserves = TensorCalls(Tensors(context, tensors, as_torchserve=True)).methods()
    public_models = ModelCalls(dataplane, controlplane, unknown_is_unready=True).methods()
    torchserves_models = ModelCalls(dataplane, controlplane, unknown_is_unready=False).methods()
    return [
        service(SERVICE, public_models, OPEN_INFERENCE, PUBLIC_NAME),
        service(SERVICE, public, OPEN_INFERENCE, PUBLIC_NAME),
        service(SERVICE, torchserves_models, _TORCHSERVE_MODELS, TORCHSERVE_NAME),
        service(SERVICE, torchserves, INFERENCE, TORCHSERVE_NAME),
    ]
