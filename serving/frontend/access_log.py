"""The access log: one line a request, for both protocols, in TorchServe's form."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("ACCESS_LOG")


def log_access(client: str, request_line: str, status: int, started_s: float) -> None:
    """Write one line; `status` is the HTTP status or the number of the gRPC code.

    Args:
        client: `host:port` of the peer.
        request_line: what stands between the quotes.
        status: what the client was told.
        started_s: monotonic seconds when the request came in.
    """
    elapsed_ms = round((time.monotonic() - started_s) * 1000)
    logger.info('/%s "%s" %d %d', client, request_line, status, elapsed_ms)
