"""The standard gRPC reflection service, which tells tools like grpcurl the services of a port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from functools import cached_property
from typing import Any

from grpc_reflection.v1alpha import reflection_pb2

from torchere.serving.frontend.grpc.call import Call
from torchere.serving.frontend.grpc.errors import MANAGEMENT
from torchere.serving.frontend.grpc.health import HEALTH
from torchere.serving.frontend.grpc.open_inference_descriptors import reflection_pool
from torchere.serving.frontend.grpc.protos import inference_pb2, management_pb2
from torchere.serving.frontend.grpc.service import Openers, service

_REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
_FILES = (inference_pb2.DESCRIPTOR, management_pb2.DESCRIPTOR, HEALTH.file, reflection_pb2.DESCRIPTOR)


class _Reflection:
    def __init__(self, names: Iterable[str]) -> None:
        self._names = (*names, _REFLECTION.full_name)

    @cached_property
    def _servicer(self) -> Any:
        from grpc_reflection.v1alpha import reflection  # noqa: PLC0415 - brings all of grpcio; few ask

        return reflection.aio.ReflectionServicer(self._names, reflection_pool(_FILES))

    async def info(self, requests: AsyncIterator[Any], call: Call) -> AsyncIterator[Any]:
        async for answer in self._servicer.ServerReflectionInfo(requests, None):
            yield answer


def reflection_service(names: Iterable[str]) -> Callable[[set[Any]], Openers]:
    """Return the reflection service for the services with these names and for itself."""
    return service(_REFLECTION, {"ServerReflectionInfo": _Reflection(names).info}, MANAGEMENT)
