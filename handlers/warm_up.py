"""Rows that a handler makes up for its first runs: whether the model takes them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def refusal_of(run: Callable[[], object]) -> Exception | None:
    """What a run of a made-up row raises; None when it is taken.

    Raises:
        torch.OutOfMemoryError, MemoryError: lack of memory is not the row's fault.
    """
    try:
        run()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as err:  # the model's own: it may raise anything
        return err
    return None
