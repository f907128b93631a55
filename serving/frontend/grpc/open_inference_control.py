"""Health, metadata, statistics and model repository methods of the Open Inference Protocol over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from torchere.serving.errors import InvalidRequest, NotFound
from torchere.serving.frontend.call_scope import manages
from torchere.serving.frontend.control import ControlPlane
from torchere.serving.frontend.dataplane import DataPlane
from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.protos import open_inference_pb2 as pb
from torchere.serving.frontend.grpc.service import Implementation
from torchere.serving.frontend.model_facts import ModelFacts
from torchere.serving.frontend.open_inference import metadata
from torchere.serving.frontend.open_inference.repository import Repository

Filled = TypeVar("Filled", bound=Message)


class ModelCalls:
    """All methods except inference; used only on the event loop of the data plane and control plane.

    `metadata` fills both JSON bodies and gRPC messages, because members and fields have the same names.

    Args:
        dataplane: supplies the facts of the models.
        controlplane: loads and unloads models.
        unknown_is_unready: report an unknown model as not ready, as Triton does (its clients poll for a model
            that way); otherwise `ModelReady` for an unknown model is an error, as in TorchServe.
    """

    def __init__(self, dataplane: DataPlane, controlplane: ControlPlane, *, unknown_is_unready: bool) -> None:
        self._unknown_is_unready = unknown_is_unready
        self._dataplane = dataplane
        self._controlplane = controlplane
        self._repository = Repository(controlplane)

    def methods(self) -> Mapping[str, Implementation]:
        """Return the methods by their names in the .proto file."""
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
            "RepositoryModelLoad": self.repository_load,
            "RepositoryModelUnload": self.repository_unload,
        }

    def server_live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        """Report that the server is live, as it is whenever it can respond."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        """Report whether the server is ready for traffic."""
        return pb.ServerReadyResponse(ready=self._dataplane.readiness().ready)

    def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        """Report whether a model can answer without waiting for a load; none can while the server drains."""
        try:
            key = self._facts(request).key
            return pb.ModelReadyResponse(ready=self._dataplane.model_readiness(*key).ready)
        except NotFound:
            if self._unknown_is_unready:
                return pb.ModelReadyResponse(ready=False)
            raise

    def server_metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        """Return name, version and extensions of the server."""
        return _filled(pb.ServerMetadataResponse(), metadata.server_metadata())

    def model_metadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
        """Return the input and output tensors of a model."""
        return _filled(pb.ModelMetadataResponse(), metadata.model_metadata(self._facts(request)))

    def model_config(self, request: pb.ModelConfigRequest, call: Call) -> pb.ModelConfigResponse:
        """Return the configuration of a model."""
        return _filled(pb.ModelConfigResponse(), {"config": metadata.model_config(self._facts(request))})

    def model_statistics(self, request: pb.ModelStatisticsRequest, call: Call) -> pb.ModelStatisticsResponse:
        """Return statistics of one version, of all versions of a model, or, without a name, of all models."""
        version = request.version or None
        names = [request.name]
        if not request.name:
            names = [name for name, _ in self._controlplane.list_models(2**31, 0).entries]
        found = [self._dataplane.facts_of_versions(name, version) for name in names]
        return _filled(pb.ModelStatisticsResponse(), metadata.model_statistics([*chain(*found)]))

    def repository_index(self, request: pb.RepositoryIndexRequest, call: Call) -> pb.RepositoryIndexResponse:
        """List every version with its state."""
        response = pb.RepositoryIndexResponse()
        for entry in self._repository.index(request.ready):
            response.models.add(**entry._asdict())
        return response

    async def repository_load(
        self, request: pb.RepositoryModelLoadRequest, call: Call
    ) -> pb.RepositoryModelLoadResponse:
        """Load a model and wait until it can answer."""
        given = {name: _plain(value) for name, value in request.parameters.items()}
        model = _model_of(request)
        manages(model)  # the audit log reads only `model_name`
        await self._repository.load(model, given)
        return pb.RepositoryModelLoadResponse(model_name=model, isLoaded=True)

    async def repository_unload(
        self, request: pb.RepositoryModelUnloadRequest, call: Call
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model after its requests are answered."""
        model = _model_of(request)
        manages(model)  # the audit log reads only `model_name`
        await self._repository.unload(model)
        return pb.RepositoryModelUnloadResponse(model_name=model, isUnloaded=True)

    def _facts(self, request: Any) -> ModelFacts:
        if not request.name:
            raise InvalidRequest("Parameter name is required.")
        return self._dataplane.facts(request.name, request.version or None)


def _model_of(request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest) -> str:
    model = request.model_name or request.repository_name  # KServe's stubs have the model's name as field 1
    if not model:
        raise InvalidRequest("Parameter model_name is required.")
    return model


def _filled(message: Filled, members: dict[str, Any]) -> Filled:
    # Unknown members are ignored: REST has the misspelt key of TorchServe's server metadata, and inputs of
    # a model have `parameters`, which the public messages lack, and `format`, whose default is meant.
    ParseDict(members, message, ignore_unknown_fields=True)
    return message


def _plain(parameter: pb.ModelRepositoryParameter) -> object:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)
