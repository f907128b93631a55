"""Checks whether a model accepts the rows that a handler generates for warm-up."""

from __future__ import annotations

from collections.abc import Callable

import torch


def refusal_of(run: Callable[[], object]) -> Exception | None:
    """Return the exception that a run of a generated row raises, or None if it succeeds.

    Raises:
        torch.OutOfMemoryError, MemoryError: the run lacks memory, which is not the fault of the row.
    """
    try:
        run()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as err:  # the model's own code may raise anything
        return err
    return None
