"""The gRPC management service of TorchServe."""

from __future__ import annotations

from collections.abc import Mapping

from torchere.serving.errors import InvalidRequest
from torchere.serving.frontend import wording
from torchere.serving.frontend.control import ControlPlane, registration
from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.protos.management_pb2 import (
    DescribeModelRequest,
    ListModelsRequest,
    ManagementResponse,
    RegisterModelRequest,
    ScaleWorkerRequest,
    SetDefaultRequest,
    UnregisterModelRequest,
)
from torchere.serving.frontend.grpc.service import Implementation
from torchere.serving.frontend.request_id import new_request_id
from torchere.serving.types import InferRequest, ModelKey

PAGE_SIZE = 100  # both the default and the maximum


class ManagementService:
    """Translates between gRPC messages and the control plane; used on the control plane's event loop only."""

    def __init__(self, controlplane: ControlPlane) -> None:
        self._controlplane = controlplane

    def methods(self) -> Mapping[str, Implementation]:
        """Return the methods by their names in the .proto file."""
        return {
            "DescribeModel": self.describe,
            "ListModels": self.list_models,
            "RegisterModel": self.register,
            "ScaleWorker": self.scale,
            "SetDefault": self.set_default,
            "UnregisterModel": self.unregister,
        }

    async def describe(self, request: DescribeModelRequest, call: Call) -> ManagementResponse:
        """Return the JSON array of REST's describe."""
        version = request.model_version or None
        if request.customized and version != "all":
            wish = InferRequest(new_request_id(), ())
            described, answer = await self._controlplane.describe_customized(
                request.model_name, version, wish
            )
            return ManagementResponse(msg=wording.customized_text(described, answer))
        versions = self._controlplane.describe(request.model_name, version)
        return ManagementResponse(msg=wording.versions_text(versions))

    def list_models(self, request: ListModelsRequest, call: Call) -> ManagementResponse:
        """Return the JSON of REST's list; an unset limit means a full page (in TorchServe, an empty one)."""
        limit = request.limit if 0 < request.limit <= PAGE_SIZE else PAGE_SIZE
        page = self._controlplane.list_models(limit, max(0, request.next_page_token))
        return ManagementResponse(msg=wording.page_text(page))

    async def register(self, request: RegisterModelRequest, call: Call) -> ManagementResponse:
        """Register an archive."""
        self._controlplane.check_model_api()
        # The fields have the names of REST's parameters. Unset fields and numbers below 0 are left out.
        given = {
            field.name: value
            for field, value in request.ListFields()
            if not (isinstance(value, int) and value < 0)
        }
        wish = registration(given, self._controlplane.default_executors)
        done = await self._controlplane.register(wish, synchronous=request.synchronous)
        return ManagementResponse(msg=wording.registered(done))

    async def scale(self, request: ScaleWorkerRequest, call: Call) -> ManagementResponse:
        """Change how many executors a version has. Over gRPC, 0 means unset, for which the default is 1."""
        version = request.model_version or None
        minimum = _said(request.min_worker) or 1
        progress = await self._controlplane.scale(
            request.model_name,
            version,
            min_executors=minimum,
            max_executors=_said(request.max_worker) or minimum,
            synchronous=request.synchronous,
        )
        return ManagementResponse(msg=wording.scaled(progress, request.model_name, version, minimum))

    async def set_default(self, request: SetDefaultRequest, call: Call) -> ManagementResponse:
        """Make a version the default version."""
        key = ModelKey(request.model_name, request.model_version)
        await self._controlplane.set_default(key.name, key.version)
        return ManagementResponse(msg=wording.default_set(key))

    async def unregister(self, request: UnregisterModelRequest, call: Call) -> ManagementResponse:
        """Remove a version after its requests are answered."""
        self._controlplane.check_model_api()
        if not request.model_name:
            # As in TorchServe, the text names the wrong parameter.
            raise InvalidRequest("Parameter url is required.")
        await self._controlplane.unregister(request.model_name, request.model_version or None)
        return ManagementResponse(msg=wording.unregistered(request.model_name))


def _said(number: int) -> int | None:
    """Return a number from a message, or None if it is 0 or less, which means unset."""
    return number if number > 0 else None
