"""Every row there is."""

from __future__ import annotations

from harness import (
    rows_grpc,
    rows_http,
    rows_image,
    rows_life,
    rows_models,
    rows_overload,
    rows_streams,
    rows_tensors,
    rows_threads,
)
from harness.rows import Row

PEERS = frozenset({"torchserve", "mosec", "litserve", "triton"})  # contenders that `--peers` chooses from


def rows() -> list[Row]:
    """The rows in the order of the table."""
    return [
        *rows_http.rows(),
        *rows_threads.rows(),
        *rows_grpc.rows(),
        *rows_tensors.rows(),
        *rows_streams.rows(),
        *rows_life.rows(),
        *rows_overload.rows(),
        *rows_image.rows(),
        *rows_models.rows(),
    ]
