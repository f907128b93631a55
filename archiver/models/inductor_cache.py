"""Keeps what Inductor caches of a model in a folder that goes when the compilation is over."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"  # torch reads it each time, and sets it itself


@contextmanager
def private_cache(folder: Path) -> Iterator[None]:
    """Let Inductor cache below `folder` while the block runs, and remove all of it afterwards.

    Else a copy of the weights would stay in the system's temporary folder for each compilation, where others
    may read it. The headers that Inductor compiles ahead hold nothing of a model and take seconds: they stay
    where they are. One compilation in a process at a time.
    """
    from torch._inductor.utils import clear_inductor_caches  # noqa: PLC0415  # torch._inductor takes seconds

    before = os.environ.get(_VARIABLE)
    with tempfile.TemporaryDirectory(dir=folder, prefix="inductor-", ignore_cleanup_errors=True) as cache:
        clear_inductor_caches()  # what is remembered of files elsewhere
        os.environ[_VARIABLE] = cache
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = before
            clear_inductor_caches()
