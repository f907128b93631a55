"""Which method a call is for, and whether its caller may: one place for every call of a gRPC port."""

from __future__ import annotations

from collections.abc import Callable

from torchere.serving.errors import Unauthorized
from torchere.serving.frontend.grpc.errors import UNAUTHORIZED
from torchere.serving.frontend.grpc.open_inference_descriptors import operator_paths
from torchere.serving.frontend.grpc.service import Openers
from torchere.serving.frontend.http2.header_blocks import Metadata
from torchere.serving.frontend.http2.receiver import OVER, Receiver
from torchere.serving.frontend.http2.status import StatusCode
from torchere.serving.frontend.http2.stream import Stream
from torchere.serving.frontend.keys import KeyKind, Keys
from torchere.serving.telemetry.metrics import Metrics

_OPERATOR_PATHS = operator_paths()
FREE_PREFIX = "/grpc.health.v1.Health/"  # probes bring no token, as with /livez and /readyz
_NOT_POST, _NOT_GRPC = 405, 415
_GRPC = "application/grpc"


def dispatcher(
    openers: Openers, keys: Keys | None, kind: KeyKind, metrics: Metrics
) -> Callable[[Stream], Receiver]:
    """What opens the calls of a port.

    Args:
        openers: its methods by path.
        keys: None when calls need none.
        kind: the key that its methods need, save those of operators, which need the management key.
        metrics: count the calls without their key.
    """

    def open_call(stream: Stream) -> Receiver:
        head = stream.head
        if head.method != "POST":
            stream.refuse(_NOT_POST, StatusCode.INTERNAL, "expected POST")
        elif not _is_grpc(head.content_type):
            stream.refuse(
                _NOT_GRPC,
                StatusCode.INTERNAL,
                f"content-type: found {head.content_type[:100]!r}, expected application/grpc",
            )
        elif head.flaw:
            stream.end(head.flaw_code, head.flaw)
        elif keys is not None and (error := _refusal(keys, kind, head.path, head.metadata)) is not None:
            metrics.refused(error)
            stream.end(StatusCode.PERMISSION_DENIED, UNAUTHORIZED)
        elif (opener := openers.get(head.path)) is not None:
            return opener(stream)
        else:
            stream.end(StatusCode.UNIMPLEMENTED, "Method not found!")
        return OVER

    return open_call


def _is_grpc(content_type: str) -> bool:
    # `application/grpc+proto` is as good; `application/grpc-web` is another protocol.
    return content_type.startswith(_GRPC) and content_type[len(_GRPC) : len(_GRPC) + 1] in ("", "+", ";")


def _refusal(keys: Keys, kind: KeyKind, path: str, metadata: Metadata) -> Unauthorized | None:
    """Why a call may not pass; None: it may."""
    if path.startswith(FREE_PREFIX):
        return None
    try:
        keys.authorize("management" if path in _OPERATOR_PATHS else kind, _authorization(metadata))
    except Unauthorized as error:
        return error
    return None


def _authorization(metadata: Metadata) -> str | None:
    for name, value in metadata:
        if name == "authorization":
            return value if isinstance(value, str) else None
    return None
