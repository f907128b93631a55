"""The one authorisation point of a gRPC port: before dispatch, for every method but the health service's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc.aio import ServerInterceptor

from torchere.serving.errors import Unauthorized
from torchere.serving.frontend.grpc.errors import UNAUTHORIZED
from torchere.serving.frontend.grpc.open_inference_descriptors import operator_paths
from torchere.serving.frontend.keys import KeyKind, Keys

_OPERATOR_PATHS = operator_paths()
FREE_PREFIX = "/grpc.health.v1.Health/"  # probes bring no token, as with /livez and /readyz


class TokenInterceptor(ServerInterceptor):
    """Lets calls pass whose metadata bring the live key of this port's kind; operators' calls need theirs."""

    def __init__(self, keys: Keys, kind: KeyKind) -> None:
        self._keys = keys
        self._kind: KeyKind = kind

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Go on with the call, or put a refusal in its place."""
        method = handler_call_details.method
        if not method.startswith(FREE_PREFIX):
            try:
                self._keys.authorize(self._kind_for(method), _authorization(handler_call_details))
            except Unauthorized:
                return _REFUSAL
        return await continuation(handler_call_details)

    def _kind_for(self, method: str) -> KeyKind:
        return "management" if method in _OPERATOR_PATHS else self._kind


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for name, value in details.invocation_metadata or ():
        if name == "authorization":
            return value if isinstance(value, str) else None
    return None


async def _refuse(requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.PERMISSION_DENIED, UNAUTHORIZED)


# Stream to stream, because that shape takes any call without reading its request first.
_REFUSAL: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)
